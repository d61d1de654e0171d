#pragma once
/// Converts rows of any floating dtype to fp32 and back, single-threaded: the first and last step of kernels
/// whose inner loop is fp32.

#include <cstdint>

#include "tranche/core/dtype.h"

namespace tranche::kernels::cpu {

/// to[r, c] = from[r, c] for a tile of rows x columns; strides in elements.
void widen_tile(DataType dtype, const void* from, std::int64_t from_stride, std::int64_t rows,
                std::int64_t columns, float* to, std::int64_t to_stride);
/// The inverse, rounding to nearest even.
void narrow_tile(const float* from, std::int64_t from_stride, std::int64_t rows, std::int64_t columns,
                 DataType dtype, void* to, std::int64_t to_stride);

/// The address of element `index` in an array of `dtype`.
inline const void* element_at(DataType dtype, const void* data, std::int64_t index) {
  return static_cast<const char*>(data) + index * size_of(dtype);
}
inline void* element_at(DataType dtype, void* data, std::int64_t index) {
  return static_cast<char*>(data) + index * size_of(dtype);
}

}  // namespace tranche::kernels::cpu
