// Reads and writes tensors by name, with the checks of when this is allowed.

#include <cmath>

#include "engine/engine_impl.h"
#include "tranche/core/error.h"

namespace tranche {

using namespace detail;

TensorAccess Engine::Impl::access() {
  return {store,
          config,
          world,
          runtime.mesh(),
          runtime.device(),
          runtime.memory(Tier::device),
          {workspace_buffer.data(), workspace_buffer.bytes()},
          runtime.pipeline(),
          runtime.tensor()};
}

void Engine::Impl::require_size(const TensorState& tensor, std::size_t given, const char* call) const {
  if (static_cast<std::int64_t>(given) != tensor.shape.elements()) {
    throw InvalidArgument(std::string(call) + "(" + tensor.name + ") wants " +
                          std::to_string(tensor.shape.elements()) + " values of shape " +
                          tensor.shape.to_string() + ", got " + std::to_string(given));
  }
}

void Engine::Impl::require_not_updating(std::string_view call) const {
  require(!sequence.early().begun(),
          std::string(call) +
              " between the beginning of a step's last micro-batch and the end of step(), where "
              "tranche.update: as_reduced updates units");
}

std::vector<float> Engine::read_weight(std::string_view name) {
  impl_->require_not_updating("read_weight(" + std::string(name) + ")");
  const int index = impl_->store.find_tensor(name);
  return impl_->guarded([&] { return impl_->access().weight(index); });
}

void Engine::write_weight(std::string_view name, std::span<const float> values) {
  Impl& impl = *impl_;
  require(!impl.sequence.in_step() && !impl.sequence.in_pass(),
          "write_weight(" + std::string(name) + ") inside a step or micro-batch");
  const int index = impl.store.find_tensor(name);
  impl.require_size(impl.store.tensors()[static_cast<std::size_t>(index)], values.size(), "write_weight");
  impl.base.changed();
  impl.progress.weights_written();
  impl.guarded([&] { impl.access().write_weight(index, values); });
}

// --- Optimizer state ------------------------------------------------------------------------------------

namespace {

void require_state(const TensorState& tensor) {
  if (tensor.frozen) throw InvalidArgument("tensor " + tensor.name + " is frozen and has no optimizer state");
}

}  // namespace

std::vector<float> Engine::read_optimizer_state(std::string_view name, std::string_view state) {
  Impl& impl = *impl_;
  const int index = impl.store.find_tensor(name);
  require_state(impl.store.tensors()[static_cast<std::size_t>(index)]);
  impl.require_not_updating("read_optimizer_state(" + std::string(name) + ")");
  const int which = impl.access().find_state(index, impl.optimizer->name(), state);
  return impl.guarded([&] { return impl.access().state(index, which); });
}

void Engine::write_optimizer_state(std::string_view name, std::string_view state,
                                   std::span<const float> values) {
  Impl& impl = *impl_;
  require(!impl.sequence.in_step(), "write_optimizer_state(" + std::string(name) + ") inside a step");
  const int index = impl.store.find_tensor(name);
  const TensorState& tensor = impl.store.tensors()[static_cast<std::size_t>(index)];
  require_state(tensor);
  const int which = impl.access().find_state(index, impl.optimizer->name(), state);
  impl.require_size(tensor, values.size(), "write_optimizer_state");
  impl.guarded([&] { impl.access().write_state(index, which, values); });
}

// --- The main gradient ----------------------------------------------------------------------------------

double Engine::Impl::gradient_scale() {
  if (rule.hook_scale()) return *rule.hook_scale();
  const Mesh& mesh = runtime.mesh();
  const std::int64_t own =
      std::min(sequence.micro_batches().closed(),
               config.micro_batches_of(mesh.data_rank(runtime.rank()), mesh.data_ranks()));
  std::vector<std::int64_t> counts(static_cast<std::size_t>(own),
                                   config.micro_batch_size * model.tokens_per_sample);
  runtime.device().copy_to_host(compute, counts.data(), scalars.tokens(), own * 8);
  compute.synchronize();
  std::int64_t tokens = 0;
  // The ranks of the axis `tensor` have seen the same tokens, so only the first one counts them.
  if (world.simulated() || runtime.mesh().coordinate(MeshAxis::tensor, world.rank()) == 0) {
    for (const std::int64_t count : counts) tokens += count;
  }
  world
      .all_reduce(&tokens, 1, DataType::int64, ReduceOperation::sum,
                  OperationLabel{"tokens", "access", Traffic::control, Tier::host})
      .wait();
  return unscale(tokens);
}

int Engine::Impl::find_trainable(std::string_view name) const {
  const int index = store.find_tensor(name);
  if (!store.tensors()[static_cast<std::size_t>(index)].frozen) return index;
  throw InvalidArgument("tensor " + std::string(name) + " is frozen and has no gradient");
}

std::vector<float> Engine::Impl::read_gradient(std::string_view name) {
  const int index = find_trainable(name);
  const TensorState& tensor = store.tensors()[static_cast<std::size_t>(index)];
  require(
      sequence.in_step() && !sequence.in_pass() && sequence.micro_batches().closed() > 0,
      "read_gradient(" + tensor.name + ") outside a step: call it after end_micro_batch() and before step()");
  const Residency& residency = store.residency();
  const FlatBuffer& flat = store.buffer_of(tensor);
  const bool last = sequence.micro_batches().closed() == config.accumulation_steps;
  const bool reduced = residency.policy(flat) == ReductionPolicy::micro_batch || last;
  require(reduced || store.placement().buffer(store.placement().buffer_of(index)).uses.size() < 2,
          "read_gradient(" + tensor.name +
              ") before the last micro-batch of a step: its uses' gradients are kept apart until then "
              "(tranche.tie_sum by_use, or a pipeline)");
  // Replicas keep the ranges that they own, which are complete after each micro-batch if they are summed so
  // often.
  const bool complete = residency.over_replicas(flat) && !residency.sums_replicas_once(flat);
  require(runtime.replicas() == nullptr || !reduced || last || complete,
          "read_gradient(" + tensor.name +
              ") before the last micro-batch of a step, on a mesh with replicas and " +
              "reduction per micro-batch: the replicas' sums are complete at the end of the step only");
  std::vector<float> values = access().main_gradient(index, reduced, reducer.reduction_group());
  const double scale = gradient_scale();
  for (float& value : values) value = static_cast<float>(value * scale);
  return values;
}

void Engine::Impl::write_gradient(std::string_view name, std::span<const float> values) {
  const int index = find_trainable(name);
  const TensorState& tensor = store.tensors()[static_cast<std::size_t>(index)];
  const std::string call = "write_gradient(" + tensor.name + ")";
  require_size(tensor, values.size(), "write_gradient");
  require(sequence.in_step() && !sequence.in_pass() &&
              sequence.micro_batches().closed() == config.accumulation_steps,
          call + " before a step's gradients are whole: call it between the last of its " +
              std::to_string(config.accumulation_steps) +
              " micro-batches and step(), or in the gradient hook");
  require(!sequence.early().on(),
          call + " with tranche.update: as_reduced, which has used it; write at_the_boundary");
  const double scale = gradient_scale();
  require(scale != 0, call + ": the step saw no tokens, so it has no mean");
  const DataType dtype = config.precision.accumulation;
  std::vector<std::byte> raw(values.size() * static_cast<std::size_t>(size_of(dtype)));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto at = static_cast<std::int64_t>(i);
    store_from_float(raw.data(), at, dtype, static_cast<float>(values[i] / scale));
    if (!rule.hook_scale() || std::isfinite(load_as_float(raw.data(), at, dtype))) continue;
    throw InvalidArgument(call + " in the gradient hook: " + std::to_string(values[i]) + " at element " +
                          std::to_string(i) + " does not fit " + std::string(name_of(dtype)) +
                          "; skip the step instead");
  }
  access().write_main_gradient(index, raw);
  gradient_written = gradient_written || !rule.hook_scale();
  FlatBuffer& flat = store.buffer_of(tensor);
  if (flat.optimizer_tier != OffloadTier::none && !rule.hook_scale()) {
    access().take_statistics(flat, scalars.statistics() + flat.trainable_index);
  }
}

std::vector<float> Engine::read_gradient(std::string_view name) {
  return impl_->guarded([&] { return impl_->read_gradient(name); });
}

void Engine::write_gradient(std::string_view name, std::span<const float> values) {
  impl_->guarded([&] { impl_->write_gradient(name, values); });
}

// --- Digests --------------------------------------------------------------------------------------------

kernels::Digest Engine::weights_digest() {
  impl_->require_not_updating("weights_digest()");
  return impl_->guarded([&] { return impl_->access().digest(TensorAccess::Digested::weights); });
}
kernels::Digest Engine::state_digest() {
  impl_->require_not_updating("state_digest()");
  return impl_->guarded([&] { return impl_->access().digest(TensorAccess::Digested::weights_and_state); });
}

}  // namespace tranche
