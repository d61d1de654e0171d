#pragma once
/// Elements of a flat buffer in the memory of this rank, wherever that is. Private to engine/.

#include <vector>

#include "partition/flat_layout.h"
#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"
#include "tranche/kernels/master_weights.h"

namespace tranche::detail {

/// The state of elements [range) of a flat buffer. Views have as many elements as the range, or null data
/// where the one who made the slice did not ask for them.
struct ShardSlice {
  ElementRange range;
  TensorView gradient;            ///< main gradient, accumulation dtype
  TensorView master;              ///< as Residency::master_type() says
  std::vector<TensorView> state;  ///< one for each of FlatBuffer::states
  TensorView weight;              ///< compute dtype; null data: master is the weight
  kernels::WeightRounding rounding = kernels::WeightRounding::nearest_even;  ///< of weights
  Stream* stream = nullptr;                                                  ///< for kernels that work on it
  bool on_host = false;  ///< host memory, else device memory

  /// `master` has the lower halves of fp32 numbers, `weight` the upper ones.
  bool in_halves() const { return master.dtype == DataType::uint16; }
};

/// The elements `range`, which lie within the view's own range from `first` on. LogicError where they begin
/// within a block.
TensorView part_of(const TensorView& view, std::int64_t first, ElementRange range);
/// The elements `range`, which lie within the slice's range.
ShardSlice part_of(const ShardSlice& slice, ElementRange range);
/// Issues the copy from master to weight, rounded to its dtype, to the slice's stream; nothing where master
/// is the weight, or its lower half.
void copy_master_to_weight(const ShardSlice& slice);
/// The master weights of a slice in fp32: the slice's own, or `scratch` (fp32, as many elements, in the
/// slice's memory), to which its stream is given the conversion.
TensorView master_in_fp32(const ShardSlice& slice, void* scratch);
/// Issues the rounding of `values` (fp32) to master weights that are not fp32: bf16 to nearest even.
void take_master_from_fp32(const ShardSlice& slice, const TensorView& values);

}  // namespace tranche::detail
