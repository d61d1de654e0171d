#include "engine/state_layout.h"

#include <fmt/core.h>

#include <algorithm>
#include <string>
#include <utility>

#include "checkpoint/layout.h"
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

/// A flat buffer of a unit while its tensors are found.
struct Pending {
  std::vector<std::int64_t> sizes;
  std::vector<int> tensors;
};

/// The number of a tensor's class, which is added where it is a new one.
int class_of(const Optimizer& optimizer, const TrainableTensor& tensor, std::vector<StateClass>& classes) {
  StateClass own{optimizer.state(tensor), optimizer.needs_whole_matrices(tensor)};
  const auto found = std::find(classes.begin(), classes.end(), own);
  const auto number = static_cast<int>(found - classes.begin());
  if (found == classes.end()) classes.push_back(std::move(own));
  return number;
}

/// The unit's buffers, once all classes are known.
void add_buffers(UnitState& unit, StateLayout& layout, Communicator& group, Communicator* replicas) {
  const std::size_t classes = layout.state_classes.size();
  std::vector<Pending> pending(classes + 1);
  for (const int index : unit.tensors) {
    TensorState& tensor = layout.tensors[static_cast<std::size_t>(index)];
    if (tensor.frozen) tensor.buffer = static_cast<int>(classes);
    Pending& buffer = pending[static_cast<std::size_t>(tensor.buffer)];
    tensor.flat_index = static_cast<int>(buffer.sizes.size());
    buffer.sizes.push_back(tensor.shape.elements());
    buffer.tensors.push_back(index);
  }
  for (std::size_t b = 0; b <= classes; ++b) {
    const bool trainable = b < classes;
    std::string name = unit.name;
    if (!trainable) {
      name += " frozen";
    } else if (b > 0) {
      const std::vector<OptimizerStateTensor>& states = layout.state_classes[b].states;
      name += states.empty() ? " stateless" : " " + states.front().name;
    }
    FlatBuffer& flat = unit.buffers.emplace_back(
        std::move(name), trainable, group, replicas, pending[b].sizes, std::move(pending[b].tensors),
        trainable ? layout.state_classes[b].states : std::vector<OptimizerStateTensor>());
    flat.whole_matrices = trainable && layout.state_classes[b].whole_matrices;
  }
}

}  // namespace

StateLayout lay_out(const ModelSpec& model, const ParameterGroups& groups, const Optimizer& optimizer,
                    Communicator& group, Communicator* replicas) {
  if (model.units().empty()) throw ConfigurationError("the model has no units");
  StateLayout layout;
  std::vector<std::string> names;
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
      state.matrices = tensor.matrices;
      state.outputs_first = tensor.linear != LinearLayout::in_out;
      if (!state.frozen) {
        check_group(optimizer, state);
        state.buffer = class_of(optimizer, trainable_tensor(state), layout.state_classes);
      }
      unit.tensors.push_back(static_cast<int>(layout.tensors.size()));
      names.push_back(tensor.name);
      layout.tensors.push_back(std::move(state));
    }
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
  if (layout.state_classes.empty()) throw ConfigurationError("tranche.frozen leaves no tensor to train");
  if (layout.state_classes.size() > checkpoint::most_state_classes) {
    throw ConfigurationError(
        fmt::format("optimizer {} keeps {} different lists of states; at most {} are told apart",
                    optimizer.name(), layout.state_classes.size(), checkpoint::most_state_classes));
  }
  for (UnitState& unit : layout.units) add_buffers(unit, layout, group, replicas);
  return layout;
}

}  // namespace tranche::detail
