#pragma once
/// Mean squared error of a row, summed over rows.

#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"

namespace tranche::kernels {

/// loss_sum (one fp64) += sum over rows of mean over columns of (y - target)^2, in order, in fp64;
/// row_count (one int64) += rows. y and target are fp32 [rows, columns].
void squared_error(Stream& stream, const ConstTensorView& y, const ConstTensorView& target,
                   const TensorView& loss_sum, const TensorView& row_count);

/// d_y = 2 * scale * (y - target) / columns, fp32; in place on y is allowed.
void squared_error_gradient(Stream& stream, const ConstTensorView& y, const ConstTensorView& target,
                            float scale, const TensorView& d_y);

}  // namespace tranche::kernels
