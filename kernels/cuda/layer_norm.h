#pragma once
#include <cstdint>

#include "tranche/kernels/layer_norm.h"
#include "tranche/kernels/workspace.h"

namespace tranche::kernels::cuda {

/// As in kernels/layer_norm.h, arguments checked. Forward is one launch, backward two.
void layer_norm_forward(Stream& stream, const ConstTensorView& x, const ConstTensorView& weight,
                        const ConstTensorView& bias, float epsilon, const TensorView& y,
                        const TensorView& mean, const TensorView& rstd);
void residual_layer_norm_forward(Stream& stream, const ConstTensorView& a, const ConstTensorView& b,
                                 const ConstTensorView& weight, const ConstTensorView& bias, float epsilon,
                                 const TensorView& residual, const TensorView& y, const TensorView& mean,
                                 const TensorView& rstd);
void layer_norm_backward(Stream& stream, const ConstTensorView& dy, const ConstTensorView& x,
                         const ConstTensorView& weight, const ConstTensorView& mean,
                         const ConstTensorView& rstd, bool accumulate_dx, const TensorView& dx,
                         const TensorView& weight_gradient, const TensorView& bias_gradient,
                         const Workspace& workspace);

}  // namespace tranche::kernels::cuda
