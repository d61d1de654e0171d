#pragma once
#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"

namespace tranche::kernels {

/// y = (x - mean) * rstd * weight + bias over the last dimension (Ba et al., 2016). x, y, weight and bias
/// share a dtype; mean and rstd are fp32 [rows], written for backward. rstd = 1 / sqrt(variance + epsilon).
void layer_norm_forward(Stream& stream, const ConstTensorView& x, const ConstTensorView& weight,
                        const ConstTensorView& bias, float epsilon, const TensorView& y,
                        const TensorView& mean, const TensorView& rstd);

/// dx (= or += when accumulate_dx) in x's dtype; weight_gradient and bias_gradient (fp32 [columns]) are added
/// to, rows in fixed blocks of 64 summed in order (independent of the number of threads).
void layer_norm_backward(Stream& stream, const ConstTensorView& dy, const ConstTensorView& x,
                         const ConstTensorView& weight, const ConstTensorView& mean,
                         const ConstTensorView& rstd, bool accumulate_dx, const TensorView& dx,
                         const TensorView& weight_gradient, const TensorView& bias_gradient);

}  // namespace tranche::kernels
