#pragma once
/// Elements of a flat buffer in this rank's memory, on any tier. Private to engine/.

#include <vector>

#include "partition/flat_layout.h"
#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"
#include "tranche/kernels/master_weights.h"

namespace tranche::detail {

/// The state of elements [range) of a flat buffer. Views have as many elements as the range, or null data if
/// the caller that made the slice did not request them.
struct ShardSlice {
  ElementRange range;
  TensorView gradient;            ///< main gradient, accumulation dtype
  TensorView master;              ///< dtype: Residency::master_type()
  std::vector<TensorView> state;  ///< one for each of FlatBuffer::states
  TensorView weight;              ///< compute dtype; null data: master is the weight
  kernels::WeightRounding rounding = kernels::WeightRounding::nearest_even;  ///< of weights
  Stream* stream = nullptr;  ///< the stream for kernels that use it
  bool on_host = false;      ///< in host memory; otherwise in device memory

  /// True if `master` has the lower halves of fp32 numbers, and `weight` the upper ones.
  bool in_halves() const { return master.dtype == DataType::uint16; }
};

/// The elements `range` of a view whose first element is number `first`. Throws LogicError if they begin
/// within a block.
TensorView part_of(const TensorView& view, std::int64_t first, ElementRange range);
/// The elements `range`, which must lie within the slice's range.
ShardSlice part_of(const ShardSlice& slice, ElementRange range);
/// Issues the copy from master to weight, rounded to its dtype, on the slice's stream. Does nothing if master
/// is the weight, or its lower half.
void copy_master_to_weight(const ShardSlice& slice);
/// The master weights of a slice in fp32: the slice's own memory, or `scratch` (fp32, as many elements, in
/// the slice's memory), into which the conversion is issued.
TensorView master_in_fp32(const ShardSlice& slice, void* scratch);
/// Issues the rounding of `values` (fp32) into master weights that are not fp32: bf16 to nearest even.
void take_master_from_fp32(const ShardSlice& slice, const TensorView& values);

}  // namespace tranche::detail
