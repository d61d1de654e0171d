#pragma once
/// Elements of a flat buffer in the memory of this rank, wherever that is. Private to engine/.

#include <vector>

#include "partition/flat_layout.h"
#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"

namespace tranche::detail {

/// The state of elements [range) of a flat buffer. Views have as many elements as the range, or null data
/// where the one who made the slice did not ask for them.
struct ShardSlice {
  ElementRange range;
  TensorView gradient;            ///< main gradient, accumulation dtype
  TensorView master;              ///< fp32
  std::vector<TensorView> state;  ///< one for each of FlatBuffer::states
  TensorView weight;              ///< compute dtype; null data: master is the weight
  Stream* stream = nullptr;       ///< for kernels that work on it
  bool on_host = false;           ///< host memory, else device memory
};

/// The elements `range`, which lie within the view's own range from `first` on. LogicError where they begin
/// within a block.
TensorView part_of(const TensorView& view, std::int64_t first, ElementRange range);
/// The elements `range`, which lie within the slice's range.
ShardSlice part_of(const ShardSlice& slice, ElementRange range);
/// Issues the copy from master to weight, rounded to its dtype, to the slice's stream; nothing where master
/// is the weight.
void copy_master_to_weight(const ShardSlice& slice);

}  // namespace tranche::detail
