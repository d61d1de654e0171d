#include "engine/state_layout.h"

#include <fmt/core.h>

#include <algorithm>
#include <string>
#include <utility>

#include "core/closest_match.h"
#include "tranche/core/error.h"

namespace tranche::detail {

namespace {

void check_group(const Optimizer& optimizer, const TensorState& tensor) {
  try {
    optimizer.check_group(tensor.group);
  } catch (const InvalidArgument& error) {
    throw ConfigurationError("tranche.parameter_groups, tensor " + tensor.name + ": " + error.message());
  }
}

/// One of the two flat buffers of a unit while its tensors are found.
struct Pending {
  std::vector<std::int64_t> sizes;
  std::vector<int> tensors;
};

}  // namespace

StateLayout lay_out(const ModelSpec& model, const ParameterGroups& groups, const Optimizer& optimizer,
                    Communicator& group, Communicator* replicas) {
  if (model.units().empty()) throw ConfigurationError("the model has no units");
  StateLayout layout;
  std::vector<std::string> names;
  const TensorState* first = nullptr;  // trainable
  std::size_t total = 0, adapters = 0;
  for (const UnitSpec& spec : model.units()) {
    total += spec.tensors.size();
    adapters += 2 * spec.adapters.size();
  }
  layout.tensors.reserve(total);
  // Adapters have the last indices, so that a model draws the same weights with them as without.
  std::size_t next_index = 0, next_adapter_index = total - adapters;
  for (const UnitSpec& spec : model.units()) {
    UnitState unit;
    unit.name = spec.name;
    unit.uses_per_micro_batch = spec.uses_per_micro_batch;
    Pending trainable, frozen;
    const std::size_t own = spec.tensors.size() - 2 * spec.adapters.size();  // which adapters follow
    for (const TensorSpec& tensor : spec.tensors) {
      TensorState state;
      state.name = tensor.name;
      state.aliases = tensor.aliases;
      state.shape = tensor.shape;
      state.initializer = tensor.initializer;
      state.model_index = unit.tensors.size() < own ? next_index++ : next_adapter_index++;
      state.unit = static_cast<int>(layout.units.size());
      state.frozen = tensor.frozen || groups.frozen(tensor.name);
      state.group = groups.resolve(tensor.name, tensor.shape.rank());
      state.buffer = state.frozen ? 1 : 0;
      if (!state.frozen) check_group(optimizer, state);
      Pending& buffer = state.frozen ? frozen : trainable;
      state.flat_index = static_cast<int>(buffer.sizes.size());
      buffer.sizes.push_back(tensor.shape.elements());
      buffer.tensors.push_back(static_cast<int>(layout.tensors.size()));
      unit.tensors.push_back(static_cast<int>(layout.tensors.size()));
      names.push_back(tensor.name);
      const TensorState& added = layout.tensors.emplace_back(std::move(state));
      if (added.frozen) continue;
      std::vector<OptimizerStateTensor> of_tensor = optimizer.state({added.name, added.shape, added.group});
      if (first == nullptr) {
        first = &added;
        layout.state_tensors = std::move(of_tensor);
      } else if (of_tensor != layout.state_tensors) {
        throw ConfigurationError(fmt::format(
            "optimizer {} keeps other state for tensor {} than for {}; engines keep the same state for all "
            "trainable tensors up to now",
            optimizer.name(), added.name, first->name));
      }
    }
    unit.buffers.emplace_back(spec.name, true, group, replicas, trainable.sizes,
                              std::move(trainable.tensors));
    unit.buffers.emplace_back(spec.name + " frozen", false, group, replicas, frozen.sizes,
                              std::move(frozen.tensors));
    layout.units.push_back(std::move(unit));
  }
  const std::vector<std::string> unmatched = groups.unmatched(names);
  if (!unmatched.empty()) {
    std::string plain = unmatched.front();
    std::erase(plain, '*');
    const std::string closest = closest_match(plain, names);
    throw ConfigurationError("pattern '" + unmatched.front() +
                             "' in tranche.frozen or tranche.parameter_groups matches no tensor" +
                             (closest.empty() ? "; the first tensor is '" + names.front() + "'"
                                              : "; the closest match is '" + closest + "'"));
  }
  if (first == nullptr) throw ConfigurationError("tranche.frozen leaves no tensor to train");
  return layout;
}

}  // namespace tranche::detail
