#pragma once
/// A rank's state as the sections of a checkpoint name it. Private to engine/.

#include <vector>

#include "checkpoint/format.h"
#include "engine/stretch.h"
#include "engine/unit_state.h"

namespace tranche {

struct Kept {
  void* data = nullptr;  ///< of element range.begin
  DataType dtype = DataType::float32;
  ElementRange range;  ///< of the unit's flat buffer
};
/// A section's part of a stretch (of trainable tensors).
Kept section_of(const Stretch& stretch, const checkpoint::SectionRecord& section,
                const std::vector<OptimizerStateTensor>& state_tensors);

/// Of everything that the engine keeps, over `ranks`.
checkpoint::Layout checkpoint_layout(const std::vector<UnitState>& units,
                                     const std::vector<TensorState>& tensors,
                                     const std::vector<OptimizerStateTensor>& state_tensors, DataType compute,
                                     int ranks);

}  // namespace tranche
