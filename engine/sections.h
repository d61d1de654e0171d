#pragma once
/// Maps a rank's state to the sections of a checkpoint. Private to engine/.

#include <cstddef>
#include <vector>

#include "checkpoint/layout.h"
#include "checkpoint/shard_plan.h"
#include "engine/state_store.h"
#include "tranche/partition/mesh.h"

namespace tranche::detail {

/// The elements of a slice that this section of trainable tensors stores. If master weights are stored as two
/// 16-bit halves, the section has the lower halves.
TensorView section_of(const ShardSlice& slice, const checkpoint::SectionRecord& section,
                      const std::vector<OptimizerStateTensor>& states);

/// The flat buffer for a piece of a checkpoint's layout. A checkpoint's buffers are the kinds of a unit's
/// flat buffers (a state class, or frozen), and their instances are the parts of the flat buffers of a kind.
/// The tensors identify the flat buffer, because a layout without frozen tensors may have another order of
/// buffers.
FlatBuffer& buffer_of(StateStore& store, const checkpoint::Layout& layout,
                      const checkpoint::SectionPiece& piece);

/// Throws InvalidArgument for names of units, tensors or optimizer states that no checkpoint can hold.
void require_names(const StateStore& store);

/// The layout of a checkpoint of the store, over the ranks of `mesh`: of all tensors, or, without `frozen`,
/// of trainable ones. A unit without saved tensors is kept, empty.
checkpoint::Layout checkpoint_layout(const StateStore& store, DataType compute, const Mesh& mesh,
                                     bool frozen = true);

}  // namespace tranche::detail
