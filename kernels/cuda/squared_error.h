#pragma once
#include "tranche/kernels/squared_error.h"

namespace tranche::kernels::cuda {

/// As in kernels/squared_error.h, arguments checked; one launch each.
void squared_error(Stream& stream, const ConstTensorView& y, const ConstTensorView& target,
                   const TensorView& loss_sum, const TensorView& row_count);
void squared_error_gradient(Stream& stream, const ConstTensorView& y, const ConstTensorView& target,
                            float scale, const TensorView& d_y);

}  // namespace tranche::kernels::cuda
