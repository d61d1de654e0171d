#include "engine/sections.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace tranche::detail {

TensorView section_of(const ShardSlice& slice, const checkpoint::SectionRecord& section,
                      const std::vector<OptimizerStateTensor>& state_tensors) {
  if (section.kind == "weight") return slice.master;
  const auto found =
      std::find_if(state_tensors.begin(), state_tensors.end(),
                   [&](const OptimizerStateTensor& state) { return state.name == section.kind; });
  return slice.state.at(static_cast<std::size_t>(found - state_tensors.begin()));
}

checkpoint::Layout checkpoint_layout(const StateStore& store, DataType compute, const Mesh& mesh,
                                     bool frozen) {
  std::vector<checkpoint::UnitDescription> described;
  for (const UnitState& unit : store.units()) {
    checkpoint::UnitDescription description{unit.name, unit.uses_per_micro_batch, {}};
    for (const int index : unit.tensors) {
      const TensorState& tensor = store.tensors()[static_cast<std::size_t>(index)];
      if (tensor.frozen && !frozen) continue;
      description.tensors.push_back({tensor.name, tensor.shape, tensor.frozen, tensor.aliases});
    }
    described.push_back(std::move(description));
  }
  std::vector<checkpoint::StateDescription> states;
  for (const OptimizerStateTensor& state : store.state_tensors()) states.push_back({state.name, state.dtype});
  return checkpoint::make_layout(described, states, DataType::float32, compute, mesh);
}

}  // namespace tranche::detail
