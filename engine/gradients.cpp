// The gradient path: from what kernels added, over the wire dtype and the ordered sum, into G.

#include <exception>
#include <utility>

#include "engine/gathering.h"
#include "engine/offloading.h"
#include "tranche/kernels/elementwise.h"

namespace tranche {

void Engine::Impl::open_gradients(int index) {
  UnitState& unit = units[index];
  require(in_micro_batch && !in_evaluation, "gradients(" + unit.name + ") outside a training micro-batch");
  require(!unit.handle_open, "gradients(" + unit.name + ") while another handle of the unit is open");
  require(
      unit.uses_begun < unit.uses_per_pass,
      "gradients(" + unit.name + ") for use " + std::to_string(unit.uses_begun + 1) +
          " of a micro-batch, but the model declares uses_per_pass = " + std::to_string(unit.uses_per_pass));
  set_phase("backward", unit.name);
  if (config.wall_clock_breakdown) pass_times.turn();
  const std::int64_t elements = unit.trainable.layout.padded_elements();
  if (unit.uses_begun == 0 && elements > 0) {
    if (residency.direct_accumulation()) {
      // First use of the step: nothing has been added yet.
      if (!unit.accumulated) {
        if (residency.lends_gradients(unit.trainable)) lend_gradients(unit);
        unit.accumulated = true;
        begin_gradients(unit);
      }
    } else {
      unit.gradient_slot = arena->acquire(elements * size_of(DataType::float32), Category::gradients,
                                          unit.name + " gradients");
      for (const Event& event : unit.gradient_slot.ready()) compute.wait(event);
      begin_gradients(unit);
    }
  }
  ++unit.uses_begun;
  unit.handle_open = true;
}

TensorView Engine::Impl::gradient_range(const UnitState& unit, std::int64_t position,
                                        std::int64_t elements) const {
  void* base = residency.direct_accumulation() ? unit.trainable.gradients_data() : unit.gradient_slot.data();
  return {static_cast<float*>(base) + position, DataType::float32, Shape{elements}};
}

void Engine::Impl::begin_gradients(UnitState& unit) {
  // A small tensor costs less to clear along with its neighbours than in a call of its own.
  constexpr std::int64_t large = 4096;
  const FlatLayout& layout = unit.trainable.layout;
  unit.unwritten.assign(static_cast<std::size_t>(layout.tensors()), 0);
  std::int64_t cleared = 0;
  const auto clear_up_to = [&](std::int64_t end) {
    if (end > cleared) kernels::fill_zero(compute, gradient_range(unit, cleared, end - cleared));
  };
  for (int tensor = 0; tensor < layout.tensors(); ++tensor) {
    if (layout.tensor_elements(tensor) < large) continue;
    unit.unwritten[static_cast<std::size_t>(tensor)] = 1;
    clear_up_to(layout.tensor_offset(tensor));
    cleared = layout.tensor_offset(tensor) + layout.tensor_elements(tensor);
  }
  clear_up_to(layout.padded_elements());
}

void Engine::Impl::clear_unwritten(UnitState& unit, int tensor) {
  char& unwritten = unit.unwritten[static_cast<std::size_t>(tensor)];
  if (unwritten == 0) return;
  unwritten = 0;
  const FlatLayout& layout = unit.trainable.layout;
  kernels::fill_zero(compute,
                     gradient_range(unit, layout.tensor_offset(tensor), layout.tensor_elements(tensor)));
}

GradientTarget Engine::Impl::gradient_target(int unit_index, int index) {
  UnitState& unit = units[unit_index];
  bool accumulate = true;
  if (index >= 0 && index < static_cast<int>(unit.tensors.size())) {
    const TensorState& tensor = tensors[unit.tensors[index]];
    if (!tensor.frozen) {
      accumulate = std::exchange(unit.unwritten[static_cast<std::size_t>(tensor.flat_index)], 0) == 0;
    }
  }
  return {gradient_view(unit_index, index), accumulate};
}

TensorView Engine::Impl::gradient_view(int unit_index, int index) {
  UnitState& unit = units[unit_index];
  if (index < 0 || index >= static_cast<int>(unit.tensors.size())) {
    throw InvalidArgument("unit " + unit.name + " has " + std::to_string(unit.tensors.size()) +
                          " tensors, no index " + std::to_string(index));
  }
  const TensorState& tensor = tensors[unit.tensors[index]];
  if (tensor.frozen) {
    // Kernels that compute several gradients at once need somewhere to put this one.
    unit.frozen_scratch.resize(unit.tensors.size());
    StepBuffer& scratch = unit.frozen_scratch[index];
    if (!scratch) {
      scratch = arena->acquire(tensor.shape.elements() * size_of(DataType::float32), Category::gradients,
                               tensor.name + " frozen scratch");
      for (const Event& event : scratch.ready()) compute.wait(event);
      kernels::fill_zero(compute, {scratch.data(), DataType::float32, tensor.shape});
    }
    return {scratch.data(), DataType::float32, tensor.shape};
  }
  clear_unwritten(unit, tensor.flat_index);
  const FlatLayout& layout = unit.trainable.layout;
  return gradient_range(unit, layout.tensor_offset(tensor.flat_index), tensor.shape.elements())
      .reshaped(tensor.shape);
}

void Engine::Impl::submit_gradients(int index) {
  UnitState& unit = units[index];
  unit.handle_open = false;
  for (StepBuffer& scratch : unit.frozen_scratch) scratch.release(compute.record());
  ++unit.uses_submitted;
  if (unit.uses_submitted < unit.uses_per_pass) return;
  for (int tensor = 0; tensor < unit.trainable.layout.tensors(); ++tensor) clear_unwritten(unit, tensor);
  set_phase("reduce", unit.name);
  launch_reduction(unit);
  set_phase("backward", unit.name);
}

void Engine::Impl::drop_gradients(int index, bool unwinding) noexcept {
  UnitState& unit = units[index];
  unit.handle_open = false;
  // Its peers are in the reduction of this unit, or will be: they hear of it before the exception is handled.
  if (unwinding) end_by_unwinding("while it held the gradients of unit " + unit.name);
  try {
    failure = "gradients of unit " + unit.name + " were dropped in micro-batch " +
              std::to_string(micro_batch) + " without reduce()";
  } catch (...) {
    failure.clear();
  }
}

void Engine::Impl::launch_reduction(UnitState& unit) {
  FlatState& flat = unit.trainable;
  const std::int64_t elements = flat.layout.padded_elements();
  if (elements == 0) return;
  const bool boundary = policy == ReductionPolicy::boundary;
  const bool last_micro_batch = micro_batch + 1 == config.accumulation_steps;
  const DataType wire = config.precision.wire;
  const DataType accumulation = config.precision.accumulation;

  if (residency.lends_gradients(flat) && !flat.lent_gradients) lend_gradients(unit);
  TensorView source{unit.gradient_slot.data(), DataType::float32, Shape{elements}};
  if (boundary) {
    TensorView accumulator{flat.gradients_data(), accumulation, Shape{elements}};
    if (!residency.direct_accumulation()) {
      if (unit.accumulated) {
        kernels::accumulate(compute, source, accumulator);
      } else {
        kernels::cast(compute, source, accumulator);
      }
      unit.accumulated = true;
      unit.gradient_slot.release(compute.record());
    }
    if (!last_micro_batch) return;
    source = accumulator;
  }

  // Rounded once, to the wire dtype; nothing is copied when it is in that dtype already, or when the
  // communicator rounds on the way into G.
  StepBuffer wire_buffer;
  ConstTensorView sent = source;
  if (!shard.rounds(source.dtype, wire)) {
    wire_buffer = arena->acquire(elements * size_of(wire), Category::communication, unit.name + " wire");
    for (const Event& event : wire_buffer.ready()) compute.wait(event);
    const TensorView rounded{wire_buffer.data(), wire, Shape{elements}};
    kernels::cast(compute, source, rounded);
    sent = rounded;
    unit.gradient_slot.release(compute.record());
  }

  ReductionOptions options;
  options.group_size = reduction_group;
  options.accumulate = !boundary && unit.accumulated;
  options.bucket_elements = config.reduce_bucket_elements;
  options.round_to = wire;
  const std::vector<Event> ready{compute.record(), unit.reduced};
  unit.reduced = shard.reduce_scatter(sent.data, sent.dtype, residency.gradients_shard(flat), accumulation,
                                      flat.layout.shard_elements(), options, ready,
                                      OperationLabel{unit.name, "backward", Traffic::data});
  if (stage == 0 && last_micro_batch) {
    // Stage 0 keeps all of G: the shards are gathered in G's own dtype, behind the rest of backward.
    const std::vector<Event> summed{unit.reduced};
    unit.reduced = all_gather_shard(flat, flat.gradients_data(), accumulation, summed, unit.name, "reduce");
  }
  unit.accumulated = true;
  wire_buffer.release(unit.reduced);
  unit.gradient_slot.release(unit.reduced);
  if (!config.overlap) unit.reduced.wait();
  if (last_micro_batch && flat.optimizer_tier != OffloadTier::none) offload->send_gradients_home(unit);
}

void Engine::Impl::close_micro_batch(const ConstTensorView& loss_sum, const ConstTensorView& token_count) {
  require(!in_inference, "end_micro_batch() inside an inference scope, which has no loss");
  require(in_micro_batch, "end_micro_batch() without begin_micro_batch()");
  for (const UnitState& unit : units) {
    require(unit.holders == 0, "end_micro_batch() while unit " + unit.name + " is still held");
    require(!unit.handle_open, "end_micro_batch() while gradients of unit " + unit.name + " are still held");
  }
  if (!in_evaluation) {
    std::string missing = failure;
    for (const UnitState& unit : units) {
      if (!missing.empty()) break;
      if (unit.trainable.layout.tensors() == 0 || unit.uses_submitted == unit.uses_per_pass) continue;
      missing = "unit " + unit.name + " submitted its gradients " + std::to_string(unit.uses_submitted) +
                " of " + std::to_string(unit.uses_per_pass) + " times in micro-batch " +
                std::to_string(micro_batch) + "; call skip_gradients() for a unit that is not used";
    }
    if (!missing.empty()) {
      // The peers wait in the reduction of this unit: they must learn of it.
      break_down(std::make_exception_ptr(LogicError(missing)));
      std::rethrow_exception(broken);
    }
  }
  if (loss_sum.dtype != DataType::float64 || token_count.dtype != DataType::int64 ||
      loss_sum.elements() != 1 || token_count.elements() != 1) {
    throw InvalidArgument("end_micro_batch() wants one fp64 loss sum and one int64 token count, got " +
                          std::string(name_of(loss_sum.dtype)) + loss_sum.shape.to_string() + " and " +
                          std::string(name_of(token_count.dtype)) + token_count.shape.to_string());
  }
  double* losses = scalars.losses();
  std::int64_t* tokens = scalars.tokens();
  const std::int64_t slot = in_evaluation ? 0 : micro_batch;
  kernels::copy(compute, loss_sum, {losses + slot, DataType::float64, Shape{1}});
  kernels::copy(compute, token_count, {tokens + slot, DataType::int64, Shape{1}});

  gathering->end_micro_batch();
  in_micro_batch = false;
  if (config.wall_clock_breakdown && !in_evaluation) pass_times.end();
  if (in_evaluation) {
    double loss = 0;
    std::int64_t count = config.train_batch_size * model.tokens_per_sample;
    runtime.device().copy_to_host(compute, &loss, losses, sizeof(loss));
    runtime.device().copy_to_host(compute, &count, tokens, sizeof(count));
    compute.synchronize();
    evaluation_loss += loss;
    evaluation_tokens += count;
    return;
  }
  for (UnitState& unit : units) unit.uses_begun = unit.uses_submitted = 0;
  ++micro_batch;
}

// --- UnitGradients --------------------------------------------------------------------------------------

UnitGradients::UnitGradients(UnitGradients&& other) noexcept
    : engine_(std::exchange(other.engine_, nullptr)), unit_(other.unit_), exceptions_(other.exceptions_) {}

UnitGradients::~UnitGradients() {
  if (engine_ != nullptr) {
    engine_->impl_->drop_gradients(unit_, std::uncaught_exceptions() > exceptions_);
  }
}

TensorView UnitGradients::tensor(int index) const {
  if (engine_ == nullptr) throw LogicError("tensor() of gradients that were handed over");
  return engine_->impl_->gradient_view(unit_, index);
}

GradientTarget UnitGradients::target(int index) const {
  if (engine_ == nullptr) throw LogicError("target() of gradients that were handed over");
  return engine_->impl_->gradient_target(unit_, index);
}

TensorView UnitGradients::tensor(std::string_view name) const {
  if (engine_ == nullptr) throw LogicError("tensor() of gradients that were handed over");
  return tensor(engine_->impl_->index_in_unit(unit_, name));
}

bool UnitGradients::wanted(int index) const {
  if (engine_ == nullptr) throw LogicError("wanted() of gradients that were handed over");
  const Engine::Impl& impl = *engine_->impl_;
  return !impl.tensors[impl.units[unit_].tensors.at(static_cast<std::size_t>(index))].frozen;
}

void UnitGradients::reduce() && {
  if (engine_ == nullptr) throw LogicError("reduce() of gradients that were handed over already");
  Engine* engine = engine_;
  engine_ = nullptr;
  engine->impl_->guarded([&] { engine->impl_->submit_gradients(unit_); });
}

}  // namespace tranche
