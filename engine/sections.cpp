#include "engine/sections.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

namespace tranche::detail {

TensorView section_of(const ShardSlice& slice, const checkpoint::SectionRecord& section,
                      const std::vector<OptimizerStateTensor>& states) {
  if (section.kind == "weight") return slice.master;
  const auto found = std::find_if(states.begin(), states.end(), [&](const OptimizerStateTensor& state) {
    return state.name == section.kind;
  });
  return slice.state.at(static_cast<std::size_t>(found - states.begin()));
}

FlatBuffer& buffer_of(StateStore& store, const checkpoint::Layout& layout,
                      const checkpoint::SectionPiece& piece) {
  const checkpoint::UnitRecord& unit = layout.units.at(static_cast<std::size_t>(piece.unit));
  const checkpoint::InstanceRecord& instance = unit.buffers.at(static_cast<std::size_t>(piece.buffer))
                                                   .instances.at(static_cast<std::size_t>(piece.instance));
  const int tensor = instance.tensors.at(0).tensor;
  const std::string& name = unit.tensors.at(static_cast<std::size_t>(tensor)).name;
  return store.buffer_of(store.tensors()[static_cast<std::size_t>(store.find_tensor(name))]);
}

namespace {

std::vector<checkpoint::UnitDescription> units_of(const StateStore& store, bool frozen) {
  std::vector<checkpoint::UnitDescription> described;
  for (const UnitState& unit : store.units()) {
    checkpoint::UnitDescription description{unit.name, unit.uses_in_model, {}};
    for (const int index : unit.tensors) {
      const TensorState& tensor = store.tensors()[static_cast<std::size_t>(index)];
      if (tensor.frozen && !frozen) continue;
      const Placement::Buffer& buffer = store.placement().buffer(store.placement().buffer_of(index));
      description.tensors.push_back({tensor.name, tensor.shape, tensor.frozen, tensor.aliases,
                                     buffer.state_class, buffer.stages, buffer.uses,
                                     store.placement().tensor(index).cut});
    }
    described.push_back(std::move(description));
  }
  return described;
}

std::vector<checkpoint::StateDescription> states_of(const StateStore& store) {
  std::vector<checkpoint::StateDescription> states;
  for (std::size_t of = 0; of < store.state_classes().size(); ++of) {
    for (const OptimizerStateTensor& state : store.state_classes()[of].states) {
      states.push_back({state.name, state.dtype, static_cast<int>(of)});
    }
  }
  return states;
}

}  // namespace

void require_names(const StateStore& store) {
  checkpoint::require_names(units_of(store, /*frozen=*/true), states_of(store));
}

checkpoint::Layout checkpoint_layout(const StateStore& store, DataType compute, const Mesh& mesh,
                                     bool frozen) {
  return checkpoint::make_layout(units_of(store, frozen), states_of(store),
                                 store.residency().saved_master_type(), compute, mesh);
}

}  // namespace tranche::detail
