#pragma once
#include "tranche/kernels/squared_error.h"

namespace tranche::kernels::cpu {

/// As in kernels/squared_error.h, arguments checked, on the calling thread.
void squared_error(const ConstTensorView& y, const ConstTensorView& target, const TensorView& loss_sum,
                   const TensorView& row_count);
void squared_error_gradient(const ConstTensorView& y, const ConstTensorView& target, float scale,
                            const TensorView& d_y);

}  // namespace tranche::kernels::cpu
