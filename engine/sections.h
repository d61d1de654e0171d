#pragma once
/// A rank's state as the sections of a checkpoint name it. Private to engine/.

#include <cstddef>
#include <vector>

#include "checkpoint/layout.h"
#include "checkpoint/shard_plan.h"
#include "engine/state_store.h"
#include "tranche/partition/mesh.h"

namespace tranche::detail {

/// The elements of a slice that a section of trainable tensors with these states stores; of master weights in
/// halves the lower ones.
TensorView section_of(const ShardSlice& slice, const checkpoint::SectionRecord& section,
                      const std::vector<OptimizerStateTensor>& states);

/// The flat buffer of which a piece of a layout is. A checkpoint's buffers are the kinds of a unit's flat
/// buffers (a state class, or frozen), and their instances are the parts of the flat buffers of a kind. The
/// tensors say which one it is: without frozen tensors the layout may have the flat buffers in another order.
FlatBuffer& buffer_of(StateStore& store, const checkpoint::Layout& layout,
                      const checkpoint::SectionPiece& piece);

/// The layout of a checkpoint of the store, over the ranks of `mesh`: of everything, or, without `frozen`, of
/// what is trained. A unit of which nothing is saved stays, empty.
checkpoint::Layout checkpoint_layout(const StateStore& store, DataType compute, const Mesh& mesh,
                                     bool frozen = true);

}  // namespace tranche::detail
