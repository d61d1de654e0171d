#include "engine/shard_slice.h"

#include <cstddef>

#include "tranche/kernels/elementwise.h"

namespace tranche::detail {

TensorView part_of(const TensorView& view, std::int64_t first, ElementRange range) {
  auto* data = static_cast<std::byte*>(view.data);
  if (data != nullptr) data += (range.begin - first) * size_of(view.dtype);
  return {data, view.dtype, Shape{range.size()}};
}

ShardSlice part_of(const ShardSlice& slice, ElementRange range) {
  ShardSlice part = slice;
  part.range = range;
  for (TensorView* view : {&part.gradient, &part.master, &part.weight}) {
    *view = part_of(*view, slice.range.begin, range);
  }
  for (TensorView& view : part.state) view = part_of(view, slice.range.begin, range);
  return part;
}

void copy_master_to_weight(const ShardSlice& slice) {
  if (slice.weight.data == nullptr) return;
  if (slice.weight.dtype == DataType::float32) {
    kernels::copy(*slice.stream, slice.master, slice.weight);
  } else {
    kernels::cast(*slice.stream, slice.master, slice.weight);
  }
}

}  // namespace tranche::detail
