#pragma once
/// A rank's state as the sections of a checkpoint name it. Private to engine/.

#include <vector>

#include "checkpoint/format.h"
#include "engine/state_store.h"

namespace tranche::detail {

/// The elements of a slice that a section of trainable tensors stores.
TensorView section_of(const ShardSlice& slice, const checkpoint::SectionRecord& section,
                      const std::vector<OptimizerStateTensor>& state_tensors);

/// The flat buffer that a section of trainable, or of frozen, tensors stores of a unit.
FlatBuffer& buffer_of_section(StateStore& store, int unit, bool frozen);

/// The layout of a checkpoint of everything in the store, over `ranks`.
checkpoint::Layout checkpoint_layout(const StateStore& store, DataType compute, int ranks);

}  // namespace tranche::detail
