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
  if (slice.weight.data == nullptr || slice.in_halves()) return;
  if (slice.weight.dtype == slice.master.dtype) {
    kernels::copy(*slice.stream, slice.master, slice.weight);
  } else if (slice.rounding == kernels::WeightRounding::half_away) {
    kernels::split_halves(*slice.stream, slice.master, slice.weight, {});
  } else {
    kernels::cast(*slice.stream, slice.master, slice.weight);
  }
}

TensorView master_in_fp32(const ShardSlice& slice, void* scratch) {
  if (slice.master.dtype == DataType::float32) return slice.master;
  const TensorView values{scratch, DataType::float32, slice.master.shape};
  if (slice.in_halves()) {
    kernels::join_halves(*slice.stream, slice.weight, slice.master, values);
  } else {
    kernels::cast(*slice.stream, slice.master, values);
  }
  return values;
}

void take_master_from_fp32(const ShardSlice& slice, const TensorView& values) {
  if (slice.in_halves()) {
    kernels::split_halves(*slice.stream, values, slice.weight, slice.master);
  } else {
    kernels::cast(*slice.stream, values, slice.master);
  }
}

}  // namespace tranche::detail
