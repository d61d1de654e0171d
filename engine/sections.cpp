#include "engine/sections.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace tranche {

Kept section_of(const Stretch& stretch, const checkpoint::SectionRecord& section,
                const std::vector<OptimizerStateTensor>& state_tensors) {
  if (section.kind == "weight") return {stretch.master, DataType::float32, stretch.range};
  const auto found =
      std::find_if(state_tensors.begin(), state_tensors.end(),
                   [&](const OptimizerStateTensor& state) { return state.name == section.kind; });
  const auto state = static_cast<std::size_t>(found - state_tensors.begin());
  return {stretch.state.at(state), state_tensors[state].dtype, stretch.range};
}

checkpoint::Layout checkpoint_layout(const std::vector<UnitState>& units,
                                     const std::vector<TensorState>& tensors,
                                     const std::vector<OptimizerStateTensor>& state_tensors, DataType compute,
                                     int ranks) {
  std::vector<checkpoint::UnitDescription> described;
  for (const UnitState& unit : units) {
    checkpoint::UnitDescription description{unit.name, unit.uses_per_pass, {}};
    for (const int index : unit.tensors) {
      const TensorState& tensor = tensors[static_cast<std::size_t>(index)];
      description.tensors.push_back({tensor.name, tensor.shape, tensor.frozen, tensor.aliases});
    }
    described.push_back(std::move(description));
  }
  std::vector<checkpoint::StateDescription> states;
  for (const OptimizerStateTensor& state : state_tensors) states.push_back({state.name, state.dtype});
  return checkpoint::make_layout(described, states, DataType::float32, compute, ranks);
}

}  // namespace tranche
