#include "engine/gradient_reducer.h"

#include <algorithm>
#include <utility>

#include "engine/offloaded_state.h"
#include "engine/quantized_exchange.h"
#include "tranche/core/error.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/kernels/quantization.h"

namespace tranche::detail {

GradientReducer::GradientReducer(StateStore& store, const Config& config, StepArena& arena, Stream& compute,
                                 Ledger& ledger, const StepScalars& scalars)
    : store_(store),
      config_(config),
      arena_(arena),
      compute_(compute),
      ledger_(ledger),
      scalars_(scalars),
      accumulated_(store.trainable().size(), 0),
      accumulated_last_use_(store.trainable().size(), 0),
      direct_(store.trainable().size()),
      direct_last_use_(store.trainable().size()) {}

// --- Micro-batches --------------------------------------------------------------------------------------

void GradientReducer::begin_micro_batch(std::int64_t micro_batch) {
  MicroBatch& uses = open_[micro_batch];
  uses.resize(store_.units().size());
  for (std::size_t u = 0; u < uses.size(); ++u) {
    uses[u].targets.resize(store_.units()[u].buffers.size());
    uses[u].last_uses.resize(store_.units()[u].buffers.size());
  }
}

std::string GradientReducer::held(std::int64_t micro_batch) const {
  const MicroBatch& uses = at(micro_batch);
  for (std::size_t u = 0; u < uses.size(); ++u) {
    if (uses[u].open) return store_.units()[u].name;
  }
  return {};
}

bool GradientReducer::owes(const MicroBatch& uses, std::size_t unit) const {
  const UnitState& state = store_.units()[unit];
  const bool trains = std::any_of(state.buffers.begin(), state.buffers.end(),
                                  [](const FlatBuffer& flat) { return flat.trainable && !flat.empty(); });
  return trains && uses[unit].submitted != state.uses_per_micro_batch();
}

std::string GradientReducer::missing(std::int64_t micro_batch) const {
  const MicroBatch& uses = at(micro_batch);
  for (std::size_t u = 0; u < uses.size(); ++u) {
    if (!owes(uses, u)) continue;
    const UnitState& unit = store_.units()[u];
    return "unit " + unit.name + " submitted its gradients " + std::to_string(uses[u].submitted) + " of " +
           std::to_string(unit.uses_per_micro_batch()) + " times in micro-batch " +
           std::to_string(micro_batch) + "; call skip_gradients() for a unit that is not used";
  }
  return {};
}

void GradientReducer::end_micro_batch(std::int64_t micro_batch, bool last) {
  for (std::size_t u = 0; u < store_.units().size(); ++u) {
    UnitState& unit = store_.units()[u];
    for (std::size_t b = 0; b < unit.buffers.size(); ++b) {
      FlatBuffer& flat = unit.buffers[b];
      if (!flat.trainable || flat.empty() || flat.stages == 1) continue;
      UnitUses& uses = at(micro_batch)[u];
      reduce(target_of(uses, flat, static_cast<int>(b)), uses.last_uses[b], flat, micro_batch, last);
    }
  }
  open_.erase(micro_batch);
}

void GradientReducer::begin_step() {
  std::fill(accumulated_.begin(), accumulated_.end(), 0);
  std::fill(accumulated_last_use_.begin(), accumulated_last_use_.end(), 0);
}

void GradientReducer::abandon_step() {
  open_.clear();
  for (FlatBuffer* flat : store_.trainable()) flat->transient_gradients = {};
  begin_step();
}

bool GradientReducer::backward_begun(std::int64_t micro_batch) const {
  const auto found = open_.find(micro_batch);
  return found != open_.end() && std::any_of(found->second.begin(), found->second.end(),
                                             [](const UnitUses& uses) { return uses.begun > 0; });
}

bool GradientReducer::submitted(std::int64_t micro_batch, int unit) const {
  return at(micro_batch)[static_cast<std::size_t>(unit)].submitted >=
         store_.units()[static_cast<std::size_t>(unit)].uses_per_micro_batch();
}

// --- Where kernels add ----------------------------------------------------------------------------------

void GradientReducer::check_open(std::int64_t micro_batch, int index) const {
  const UnitState& unit = store_.units()[static_cast<std::size_t>(index)];
  const UnitUses& uses = at(micro_batch)[static_cast<std::size_t>(index)];
  if (uses.open) {
    throw LogicError("gradients(" + unit.name + ") while another handle of the unit is open");
  }
  if (uses.begun >= unit.uses_per_micro_batch()) {
    throw LogicError(
        "gradients(" + unit.name + ") for use " + std::to_string(uses.begun + 1) + " of a micro-batch, but " +
        (unit.uses_per_micro_batch() == unit.uses_in_model ? "the model declares uses_per_micro_batch = "
                                                           : "this stage's uses of the unit are ") +
        std::to_string(unit.uses_per_micro_batch()));
  }
}

std::int64_t GradientReducer::first_owing(int unit) const {
  for (const auto& [micro_batch, uses] : open_) {
    if (owes(uses, static_cast<std::size_t>(unit))) return micro_batch;
  }
  return -1;
}

void GradientReducer::open(std::int64_t micro_batch, int index) {
  check_open(micro_batch, index);
  UnitState& unit = store_.units()[static_cast<std::size_t>(index)];
  UnitUses& uses = at(micro_batch)[static_cast<std::size_t>(index)];
  ++uses.begun;
  uses.open = true;
  for (std::size_t b = 0; b < unit.buffers.size(); ++b) {
    FlatBuffer& flat = unit.buffers[b];
    if (!flat.trainable || flat.empty() || (uses.begun > 1 && !flat.sums_uses())) continue;
    const auto position = static_cast<std::size_t>(flat.trainable_index);
    Target& target = target_of(uses, flat, static_cast<int>(b));
    if (store_.residency().direct_accumulation(flat)) {
      // First use of the step: nothing has been added yet.
      char& accumulated = uses.of_last(flat) ? accumulated_last_use_[position] : accumulated_[position];
      if (accumulated != 0) continue;
      if (store_.residency().transient_gradients(flat) && !flat.transient_gradients) {
        take_transient_gradients(flat);
      }
      target.accumulator = uses.of_last(flat) ? flat.last_use_gradients.data() : flat.gradients_data();
      accumulated = 1;
    } else {
      target.slot = acquire_sum(flat, unit.name + " gradients");
    }
    begin_target(target, flat);
  }
}

StepBuffer GradientReducer::acquire_sum(const FlatBuffer& flat, std::string_view tag) {
  StepBuffer sum =
      arena_.acquire(flat.layout.padded_elements() * size_of(DataType::float32), Category::gradients, tag);
  for (const Event& event : sum.ready()) compute_.wait(event);
  return sum;
}

GradientReducer::Target& GradientReducer::target_of(UnitUses& uses, const FlatBuffer& flat, int buffer) {
  const auto index = static_cast<std::size_t>(flat.trainable_index), b = static_cast<std::size_t>(buffer);
  if (store_.residency().direct_accumulation(flat)) {
    return uses.of_last(flat) ? direct_last_use_[index] : direct_[index];
  }
  return uses.of_last(flat) ? uses.last_uses[b] : uses.targets[b];
}

TensorView GradientReducer::range_of(const Target& target, std::int64_t position, std::int64_t elements) {
  void* base = target.accumulator != nullptr ? target.accumulator : target.slot.data();
  return {static_cast<float*>(base) + position, DataType::float32, Shape{elements}};
}

void GradientReducer::begin_target(Target& target, const FlatBuffer& flat) {
  // A small tensor costs less to clear along with its neighbours than in a call of its own.
  constexpr std::int64_t large = 4096;
  const FlatLayout& layout = flat.layout;
  target.unwritten.assign(static_cast<std::size_t>(layout.tensors()), 0);
  std::int64_t cleared = 0;
  const auto clear_up_to = [&](std::int64_t end) {
    if (end > cleared) kernels::fill_zero(compute_, range_of(target, cleared, end - cleared));
  };
  for (int tensor = 0; tensor < layout.tensors(); ++tensor) {
    if (layout.tensor_elements(tensor) < large) continue;
    target.unwritten[static_cast<std::size_t>(tensor)] = 1;
    clear_up_to(layout.tensor_offset(tensor));
    cleared = layout.tensor_offset(tensor) + layout.tensor_elements(tensor);
  }
  clear_up_to(layout.padded_elements());
}

void GradientReducer::clear_unwritten(Target& target, const FlatBuffer& flat, int tensor) {
  if (std::exchange(target.unwritten[static_cast<std::size_t>(tensor)], 0) == 0) return;
  kernels::fill_zero(
      compute_, range_of(target, flat.layout.tensor_offset(tensor), flat.layout.tensor_elements(tensor)));
}

TensorView GradientReducer::view(std::int64_t micro_batch, int unit, int index) {
  const TensorState& tensor = store_.tensor_in_unit(unit, index);
  store_.require_held(tensor);
  UnitUses& uses = at(micro_batch)[static_cast<std::size_t>(unit)];
  if (tensor.frozen) {
    // Kernels that compute several gradients at once need memory for this one too.
    uses.scratch.resize(store_.units()[static_cast<std::size_t>(unit)].tensors.size());
    StepBuffer& scratch = uses.scratch[static_cast<std::size_t>(index)];
    if (!scratch) {
      // No gradient, which a frozen tensor has none of: what a kernel computes along with another one's.
      scratch = arena_.acquire(tensor.local.elements() * size_of(DataType::float32), Category::workspace,
                               tensor.name + " frozen scratch");
      for (const Event& event : scratch.ready()) compute_.wait(event);
      kernels::fill_zero(compute_, {scratch.data(), DataType::float32, tensor.local});
    }
    return {scratch.data(), DataType::float32, tensor.local};
  }
  const FlatBuffer& flat = store_.buffer_of(tensor);
  Target& target = target_of(uses, flat, tensor.buffer);
  clear_unwritten(target, flat, tensor.flat_index);
  return range_of(target, flat.layout.tensor_offset(tensor.flat_index), tensor.local.elements())
      .reshaped(tensor.local);
}

GradientTarget GradientReducer::target(std::int64_t micro_batch, int unit, int index) {
  const TensorState& tensor = store_.tensor_in_unit(unit, index);
  store_.require_held(tensor);
  bool accumulate = true;
  if (!tensor.frozen) {
    UnitUses& uses = at(micro_batch)[static_cast<std::size_t>(unit)];
    Target& target = target_of(uses, store_.buffer_of(tensor), tensor.buffer);
    accumulate = std::exchange(target.unwritten[static_cast<std::size_t>(tensor.flat_index)], 0) == 0;
  }
  return {view(micro_batch, unit, index), accumulate};
}

// --- Reduction ------------------------------------------------------------------------------------------

void GradientReducer::submit(std::int64_t micro_batch, int index, bool last) {
  UnitState& unit = store_.units()[static_cast<std::size_t>(index)];
  UnitUses& uses = at(micro_batch)[static_cast<std::size_t>(index)];
  uses.open = false;
  for (StepBuffer& scratch : uses.scratch) scratch.release(compute_.record());
  ++uses.submitted;
  const bool complete = uses.submitted == unit.uses_per_micro_batch();
  for (std::size_t b = 0; b < unit.buffers.size(); ++b) {
    FlatBuffer& flat = unit.buffers[b];
    if (!flat.trainable || flat.empty() || !(complete || flat.sums_uses())) continue;
    Target& target = target_of(uses, flat, static_cast<int>(b));
    for (int tensor = 0; tensor < flat.layout.tensors(); ++tensor) clear_unwritten(target, flat, tensor);
    ledger_.set_phase("reduce", unit.name);
    if (flat.sums_uses() && store_.residency().policy(flat) == ReductionPolicy::boundary) {
      accumulate(target, flat, uses.of_last(flat));
    }
    if (complete && flat.stages == 1) reduce(target, uses.last_uses[b], flat, micro_batch, last);
    ledger_.set_phase("backward", unit.name);
  }
}

void GradientReducer::accumulate(Target& target, FlatBuffer& flat, bool of_last_use) {
  if (store_.residency().direct_accumulation(flat)) return;
  const auto index = static_cast<std::size_t>(flat.trainable_index);
  char& accumulated = of_last_use ? accumulated_last_use_[index] : accumulated_[index];
  if (!of_last_use && store_.residency().transient_gradients(flat) && !flat.transient_gradients) {
    take_transient_gradients(flat);
  }
  const Shape elements{flat.layout.padded_elements()};
  const TensorView source{target.slot.data(), DataType::float32, elements};
  const TensorView accumulator{of_last_use ? flat.last_use_gradients.data() : flat.gradients_data(),
                               config_.precision.accumulation, elements};
  if (accumulated != 0) {
    kernels::accumulate(compute_, source, accumulator);
  } else {
    kernels::cast(compute_, source, accumulator);
  }
  accumulated = 1;
  target.slot.release(compute_.record());
}

void GradientReducer::add_rounded(const FlatBuffer& flat, const ConstTensorView& gradient,
                                  const TensorView& sum, bool first) {
  const DataType communication = config_.precision.communication;
  const auto add = [&](const ConstTensorView& rounded) {
    if (!first) {
      kernels::accumulate(compute_, rounded, sum);
    } else if (rounded.data != sum.data) {
      kernels::cast(compute_, rounded, sum);
    }
  };
  if (gradient.dtype == communication) return add(gradient);
  StepBuffer sent = arena_.acquire(gradient.elements() * size_of(communication), Category::communication,
                                   flat.name + " rounded");
  for (const Event& event : sent.ready()) compute_.wait(event);
  const TensorView rounded{sent.data(), communication, gradient.shape};
  kernels::cast(compute_, gradient, rounded);
  add(rounded);
  sent.release(compute_.record());
}

StepBuffer GradientReducer::sum_of_uses(Target& first, Target& last, const FlatBuffer& flat) {
  const Shape elements{flat.layout.padded_elements()};
  StepBuffer memory = acquire_sum(flat, flat.name + " sum of uses");
  const TensorView sum{memory.data(), DataType::float32, elements};
  const DataType accumulation = config_.precision.accumulation;
  const bool at_boundary = store_.residency().policy(flat) == ReductionPolicy::boundary;
  add_rounded(flat,
              at_boundary ? ConstTensorView(flat.gradients_data(), accumulation, elements)
                          : ConstTensorView(first.slot.data(), DataType::float32, elements),
              sum, true);
  add_rounded(flat,
              at_boundary ? ConstTensorView(flat.last_use_gradients.data(), accumulation, elements)
                          : ConstTensorView(last.slot.data(), DataType::float32, elements),
              sum, false);
  first.slot.release(compute_.record());
  last.slot.release(compute_.record());
  return memory;
}

void GradientReducer::drop(std::int64_t micro_batch, int unit) noexcept {
  const auto found = open_.find(micro_batch);
  if (found != open_.end()) found->second[static_cast<std::size_t>(unit)].open = false;
}

void GradientReducer::take_transient_gradients(FlatBuffer& flat) {
  const std::int64_t elements = store_.residency().gradients_range(flat).size();
  flat.transient_gradients = arena_.acquire(elements * size_of(config_.precision.accumulation),
                                            Category::gradients, flat.name + " reduced gradients");
  for (const Event& event : flat.transient_gradients.ready()) compute_.wait(event);
}

GradientReducer::Sent GradientReducer::round(Target& target, FlatBuffer& flat, const TensorView& source) {
  // Rounded once, to the communication dtype or to blocks; nothing is copied when it is in that dtype
  // already, or when the communicator rounds on the way into the main gradient.
  const DataType communication = config_.precision.communication;
  const std::int64_t elements = source.elements();
  Sent sent;
  sent.values = source;
  if (flat.sums_uses()) return sent;  // a sum of what was rounded
  const bool quantizes = store_.residency().quantizes_gradients(flat);
  if (!quantizes && flat.group->rounds(source.dtype, communication)) return sent;
  const std::int64_t bytes =
      quantizes ? kernels::quantized_bytes(elements) : elements * size_of(communication);
  sent.rounded = arena_.acquire(bytes, Category::communication, flat.name + " communication");
  for (const Event& event : sent.rounded.ready()) compute_.wait(event);
  if (quantizes) {
    const int ranks = flat.group->size();
    QuantizedExchange::pack(compute_, source, ranks, config_.reduce_bucket_elements, sent.rounded.data());
    if (ranks > 1) {
      sent.received = arena_.acquire(QuantizedExchange::received_bytes(flat.layout.shard_elements(), ranks,
                                                                       config_.reduce_bucket_elements),
                                     Category::communication, flat.name + " received blocks");
    }
  } else {
    const TensorView to{sent.rounded.data(), communication, Shape{elements}};
    kernels::cast(compute_, source, to);
    sent.values = to;
  }
  target.slot.release(compute_.record());
  return sent;
}

void GradientReducer::reduce_in_group(FlatBuffer& flat, const Sent& sent, const TensorView& out,
                                      const ReductionOptions& options, std::vector<Event> ready,
                                      const OperationLabel& label) {
  if (!store_.residency().quantizes_gradients(flat)) {
    flat.reduce_done = flat.group->reduce_scatter(sent.values.data, sent.values.dtype, out.data, out.dtype,
                                                  out.elements(), options, ready, label);
    return;
  }
  ready.insert(ready.end(), sent.received.ready().begin(), sent.received.ready().end());
  store_.quantized()->reduce(*flat.group, sent.rounded.data(), sent.received.data(), out, options,
                             std::move(ready), label, flat.reduce_done);
}

void GradientReducer::reduce_over_replicas(FlatBuffer& flat, const Sent& sent,
                                           const ReductionOptions& options, std::vector<Event> ready,
                                           bool last, const OperationLabel& label) {
  // The group's sum, in fp32, is added up over the replicas in their order, each of which keeps what it owns;
  // with a reduction group of the group's size these are the bits of one reduction over all of them.
  const Residency& residency = store_.residency();
  const DataType accumulation = config_.precision.accumulation;
  const bool once = residency.sums_replicas_once(flat);
  ReductionOptions inner = options, outer = options;
  outer.givers = flat.replicas->size();
  StepBuffer of_replica;
  TensorView sum;
  if (once) {
    sum = residency.gradients(flat, flat.shard());
  } else {
    of_replica = arena_.acquire(flat.layout.shard_elements() * size_of(DataType::float32),
                                Category::communication, flat.name + " replica's sum");
    sum = {of_replica.data(), DataType::float32, Shape{flat.layout.shard_elements()}};
    ready.insert(ready.end(), of_replica.ready().begin(), of_replica.ready().end());
    inner.accumulate = false;
  }
  reduce_in_group(flat, sent, sum, inner, std::move(ready), label);
  if (once && !last) return;
  if (once) outer.accumulate = false;
  outer.group_size = flat.replicas->size();
  outer.round_to = std::nullopt;
  const TensorView own = residency.gradients(flat, flat.owned());
  const std::vector<Event> reduced{flat.reduce_done};
  flat.reduce_done = flat.replicas->reduce_scatter(sum.data, DataType::float32, own.data, accumulation,
                                                   own.elements(), outer, reduced, label);
  of_replica.release(flat.reduce_done);
  if (!last || residency.over_replicas(flat)) return;
  // Once the step's gradients are complete, every replica takes the other parts.
  const std::vector<Event> summed{flat.reduce_done};
  flat.reduce_done =
      flat.replicas->all_gather(own.data, residency.gradients(flat, flat.shard()).data, own.elements(),
                                accumulation, config_.allgather_bucket_elements, summed, label);
}

void GradientReducer::reduce(Target& target, Target& last_use, FlatBuffer& flat, std::int64_t micro_batch,
                             bool last) {
  const Residency& residency = store_.residency();
  const std::int64_t elements = flat.layout.padded_elements();
  const bool reduce_once = residency.policy(flat) == ReductionPolicy::boundary;
  const DataType accumulation = config_.precision.accumulation;
  char& accumulated = accumulated_[static_cast<std::size_t>(flat.trainable_index)];

  if (residency.transient_gradients(flat) && !flat.transient_gradients) take_transient_gradients(flat);
  TensorView source{target.slot.data(), DataType::float32, Shape{elements}};
  if (reduce_once) {
    if (!flat.sums_uses()) accumulate(target, flat, false);
    if (!last) return;
    source = {flat.gradients_data(), accumulation, Shape{elements}};
  }
  if (flat.sums_uses()) {
    target.slot = sum_of_uses(target, last_use, flat);
    source = {target.slot.data(), DataType::float32, Shape{elements}};
  }

  if (config_.gradient_noise_scale) {
    kernels::gradient_statistics(compute_, source,
                                 scalars_.of_piece(reduce_once ? 0 : micro_batch) + flat.trainable_index);
  }

  Sent sent = round(target, flat, source);
  ReductionOptions options;
  options.group_size = reduction_group_;
  // The uses of one data rank are added up first, then data ranks one by one, wherever the uses are. With
  // world_size_invariant these are added to the main gradient in turn, as they are without a pipeline.
  if (flat.stages > 1) {
    options.group_size = config_.world_size_invariant ? -flat.stages : flat.stages;
  } else if (flat.sharers > 1) {
    options.group_size = flat.sharers;  // the parts of one data rank's gradient are added up first
  } else if (flat.sums_uses() && reduction_group_ > 0) {
    options.group_size = 1;
  }
  options.accumulate = !reduce_once && accumulated != 0;
  options.bucket_elements = config_.reduce_bucket_elements;
  if (!flat.sums_uses()) options.round_to = config_.precision.communication;
  options.givers = config_.ranks_with_samples(micro_batch, flat.data_ranks()) * flat.givers_a_data_rank();
  const std::vector<Event> ready{compute_.record(), flat.reduce_done};
  const OperationLabel label{flat.name, "backward", Traffic::data};
  if (flat.replicas == nullptr) {
    reduce_in_group(flat, sent, residency.gradients(flat, flat.shard()), options, ready, label);
  } else {
    reduce_over_replicas(flat, sent, options, ready, last, label);
  }
  if (config_.stage == 0 && last) {
    // Stage 0 keeps all of it: the shards are gathered in the accumulation dtype, behind the rest of
    // backward.
    const std::vector<Event> summed{flat.reduce_done};
    flat.reduce_done = flat.all_gather(flat.gradients_data(), accumulation, config_.allgather_bucket_elements,
                                       summed, OperationLabel{flat.name, "reduce", Traffic::data});
  }
  accumulated = 1;
  sent.rounded.release(flat.reduce_done);
  sent.received.release(flat.reduce_done);
  target.slot.release(flat.reduce_done);
  // Another stage may submit its part only once it has what this rank computes next.
  if (!config_.overlap && flat.stages == 1) flat.reduce_done.wait();
  if (last && flat.optimizer_tier != OffloadTier::none) {
    store_.offload()->send_gradients(flat, scalars_.statistics() + flat.trainable_index);
  }
}

}  // namespace tranche::detail
