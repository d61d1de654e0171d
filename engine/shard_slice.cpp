#include "engine/shard_slice.h"

#include <fmt/core.h>

#include <cstddef>

#include "tranche/core/error.h"
#include "tranche/kernels/elementwise.h"

namespace tranche::detail {

TensorView part_of(const TensorView& view, std::int64_t first, ElementRange range) {
  auto* data = static_cast<std::byte*>(view.data);
  const std::int64_t before = range.begin - first;
  if (before % block_elements_of(view.dtype) != 0) {
    throw LogicError(fmt::format("element {} of {} is within a block", before, name_of(view.dtype)));
  }
  if (data != nullptr) data += bytes_of(view.dtype, before);
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
