#include "engine/gradient_reducer.h"

#include <algorithm>
#include <utility>

#include "engine/exchange.h"
#include "engine/offloaded_state.h"
#include "tranche/core/error.h"
#include "tranche/kernels/elementwise.h"

namespace tranche::detail {

GradientReducer::GradientReducer(StateStore& store, StepArena& arena, Stream& compute, Ledger& ledger,
                                 const StepScalars& scalars, Communicator* tensor, bool overlap)
    : store_(store),
      arena_(arena),
      compute_(compute),
      ledger_(ledger),
      scalars_(scalars),
      pieces_(scalars, tensor, arena, compute),
      overlap_(overlap) {
  for (std::vector<Target>& direct : direct_) direct.resize(store.trainable().size());
  begin_step();
}

// --- Micro-batches --------------------------------------------------------------------------------------

void GradientReducer::begin_micro_batch(std::int64_t micro_batch) {
  MicroBatch& uses = open_[micro_batch];
  uses.resize(store_.units().size());
  for (std::size_t u = 0; u < uses.size(); ++u) {
    for (std::vector<Target>& targets : uses[u].targets) targets.resize(store_.units()[u].buffers.size());
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
      reduce(target_of(uses, flat, static_cast<int>(b)), uses.targets[1][b], flat, micro_batch, last);
    }
  }
  open_.erase(micro_batch);
}

void GradientReducer::begin_step() {
  for (std::vector<char>& accumulated : accumulated_) accumulated.assign(store_.trainable().size(), 0);
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

// --- The memory to which kernels add --------------------------------------------------------------------

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

int GradientReducer::begun(std::int64_t micro_batch, int unit) const {
  return at(micro_batch)[static_cast<std::size_t>(unit)].begun;
}

std::int64_t GradientReducer::first_owing(std::int64_t micro_batch, int unit, int submitted) const {
  const auto index = static_cast<std::size_t>(unit);
  const std::vector<FlatBuffer>& buffers = store_.units()[index].buffers;
  const bool apart = std::all_of(buffers.begin(), buffers.end(), [](const FlatBuffer& flat) {
    return !flat.trainable || flat.empty() || !flat.uses.empty();
  });
  for (const auto& [earlier, uses] : open_) {
    if (earlier >= micro_batch) break;
    if (owes(uses, index) && (!apart || uses[index].submitted <= submitted)) return earlier;
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
      // The first use in the step: nothing has been added yet.
      if (std::exchange(accumulated_[uses.of_last(flat) ? 1 : 0][position], 1) != 0) continue;
      take_transient_gradients(flat);
      target.accumulator = accumulator_of(flat, uses.of_last(flat)).data;
    } else {
      target.slot = acquire_sum(flat, unit.name + " gradients");
    }
    begin_target(target, flat);
  }
}

StepBuffer GradientReducer::acquire_sum(const FlatBuffer& flat, std::string_view tag) {
  return acquire(flat.layout.padded_elements() * size_of(DataType::float32), Category::gradients, tag);
}

StepBuffer GradientReducer::acquire(std::int64_t bytes, Category category, std::string_view tag) {
  StepBuffer memory = arena_.acquire(bytes, category, tag);
  for (const Event& event : memory.ready()) compute_.wait(event);
  return memory;
}

GradientReducer::Target& GradientReducer::target_of(UnitUses& uses, const FlatBuffer& flat, int buffer) {
  const auto index = static_cast<std::size_t>(flat.trainable_index), b = static_cast<std::size_t>(buffer);
  const std::size_t use = uses.of_last(flat) ? 1 : 0;
  return store_.residency().direct_accumulation(flat) ? direct_[use][index] : uses.targets[use][b];
}

TensorView GradientReducer::range_of(const Target& target, std::int64_t position, std::int64_t elements) {
  void* base = target.accumulator != nullptr ? target.accumulator : target.slot.data();
  return {static_cast<float*>(base) + position, DataType::float32, Shape{elements}};
}

void GradientReducer::begin_target(Target& target, const FlatBuffer& flat) {
  // Small tensors are cleared together with their neighbours, which costs less than separate calls.
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
      // It is not a gradient: a frozen tensor has none. A kernel computes it together with another one.
      scratch = acquire(tensor.local.elements() * size_of(DataType::float32), Category::workspace,
                        tensor.name + " frozen scratch");
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
    if (complete && flat.stages == 1) reduce(target, uses.targets[1][b], flat, micro_batch, last);
    ledger_.set_phase("backward", unit.name);
  }
}

void GradientReducer::accumulate(Target& target, FlatBuffer& flat, bool of_last_use) {
  if (store_.residency().direct_accumulation(flat)) return;
  take_transient_gradients(flat);
  const TensorView accumulator = accumulator_of(flat, of_last_use);
  const TensorView source{target.slot.data(), DataType::float32, accumulator.shape};
  const auto index = static_cast<std::size_t>(flat.trainable_index);
  if (std::exchange(accumulated_[of_last_use ? 1 : 0][index], 1) != 0) {
    kernels::accumulate(compute_, source, accumulator);
  } else {
    kernels::cast(compute_, source, accumulator);
  }
  target.slot.release(compute_.record());
}

TensorView GradientReducer::accumulator_of(const FlatBuffer& flat, bool of_last_use) const {
  return {of_last_use ? flat.last_use_gradients.data() : flat.gradients_data(),
          store_.residency().precision().accumulation, Shape{flat.layout.padded_elements()}};
}

StepBuffer GradientReducer::sum_of_uses(const std::array<Target*, 2>& uses, const FlatBuffer& flat) {
  const DataType communication = store_.residency().precision().communication;
  const bool at_boundary = store_.residency().policy(flat) == ReductionPolicy::boundary;
  StepBuffer memory = acquire_sum(flat, flat.name + " sum of uses");
  const TensorView sum{memory.data(), DataType::float32, Shape{flat.layout.padded_elements()}};
  for (std::size_t use = 0; use < uses.size(); ++use) {
    TensorView gradient = at_boundary ? accumulator_of(flat, use == 1)
                                      : TensorView{uses[use]->slot.data(), DataType::float32, sum.shape};
    StepBuffer rounded;
    if (gradient.dtype != communication) {
      rounded =
          acquire(sum.elements() * size_of(communication), Category::communication, flat.name + " rounded");
      const TensorView to{rounded.data(), communication, sum.shape};
      kernels::cast(compute_, gradient, to);
      gradient = to;
    }
    if (use == 0) {
      kernels::cast(compute_, gradient, sum);
    } else {
      kernels::accumulate(compute_, gradient, sum);
    }
    rounded.release(compute_.record());
  }
  for (Target* target : uses) target->slot.release(compute_.record());
  return memory;
}

void GradientReducer::drop(std::int64_t micro_batch, int unit) noexcept {
  const auto found = open_.find(micro_batch);
  if (found != open_.end()) found->second[static_cast<std::size_t>(unit)].open = false;
}

void GradientReducer::take_transient_gradients(FlatBuffer& flat) {
  if (!store_.residency().transient_gradients(flat) || flat.transient_gradients) return;
  const std::int64_t elements = store_.residency().gradients_range(flat).size();
  flat.transient_gradients = acquire(elements * size_of(store_.residency().precision().accumulation),
                                     Category::gradients, flat.name + " reduced gradients");
}

void GradientReducer::reduce(Target& target, Target& last_use, FlatBuffer& flat, std::int64_t micro_batch,
                             bool last) {
  const Residency& residency = store_.residency();
  const Shape elements{flat.layout.padded_elements()};
  const bool reduce_once = residency.policy(flat) == ReductionPolicy::boundary;
  char& accumulated = accumulated_[0][static_cast<std::size_t>(flat.trainable_index)];

  take_transient_gradients(flat);
  TensorView source{target.slot.data(), DataType::float32, elements};
  if (reduce_once) {
    if (!flat.sums_uses()) accumulate(target, flat, false);
    if (!last) return;
    source = accumulator_of(flat, false);
  }
  if (flat.sums_uses()) {
    target.slot = sum_of_uses({&target, &last_use}, flat);
    source = {target.slot.data(), DataType::float32, elements};
  }

  pieces_.take(flat, source, reduce_once ? 0 : micro_batch);

  // The gradient is rounded once, before it is sent, unless it is already a sum of rounded gradients.
  GradientExchange& exchange = *flat.gradients_over;
  const GradientExchange::Bytes bytes =
      flat.sums_uses() ? GradientExchange::Bytes() : exchange.bytes(flat, source.dtype);
  ConstTensorView sent = source;
  StepBuffer rounded, received;
  if (bytes.sent > 0) {
    rounded = acquire(bytes.sent, Category::communication, flat.name + " communication");
    sent = exchange.round(compute_, flat, source, rounded.data());
    if (bytes.received > 0) {
      received = arena_.acquire(bytes.received, Category::communication, flat.name + " received blocks");
    }
    target.slot.release(compute_.record());
  }
  GradientSum sum;
  sum.micro_batch = micro_batch;
  sum.order(flat, reduction_group_);
  sum.accumulate = !reduce_once && accumulated != 0;
  sum.last = last;
  std::vector<Event> ready{compute_.record(), flat.reduce_done};
  ready.insert(ready.end(), received.ready().begin(), received.ready().end());
  exchange.reduce(flat, sent, received.data(), residency.gradients(flat, flat.owned()), sum, std::move(ready),
                  {store_.call_name(flat.name), "backward", Traffic::data});
  accumulated = 1;
  rounded.release(flat.reduce_done);
  received.release(flat.reduce_done);
  target.slot.release(flat.reduce_done);
  // Another stage may be able to submit its part only after it has received this rank's next results.
  if (!overlap_ && flat.stages == 1) flat.reduce_done.wait();
  if (last && flat.optimizer_tier != OffloadTier::none) {
    store_.offload()->send_gradients(flat, scalars_.statistics() + flat.trainable_index);
  }
  if (last && complete_) complete_(flat);
}

}  // namespace tranche::detail
