#pragma once
/// Columns of one matrix copied into another. matmul.h says how calls run and how long operands stay valid.

#include <cstdint>

#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"

namespace tranche::kernels {

/// to[r, to_column + c] = from[r, from_column + c] for every row r and c < columns; other columns of `to`
/// keep their values. The matrices have as many rows and one dtype of any kind, and do not overlap. Throws
/// InvalidArgument for columns that a matrix does not have.
void copy_columns(Stream& stream, const ConstTensorView& from, std::int64_t from_column, const TensorView& to,
                  std::int64_t to_column, std::int64_t columns);

}  // namespace tranche::kernels
