#pragma once
#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"
#include "tranche/kernels/workspace.h"

namespace tranche::kernels {

/// y = (x - mean) * rstd * weight + bias over the last dimension (Ba et al., 2016). x, y, weight and bias
/// share a dtype; mean and rstd are fp32 [rows], written for backward. rstd = 1 / sqrt(variance + epsilon).
void layer_norm_forward(Stream& stream, const ConstTensorView& x, const ConstTensorView& weight,
                        const ConstTensorView& bias, float epsilon, const TensorView& y,
                        const TensorView& mean, const TensorView& rstd);

/// residual = a + b (fp32, rounded once), then layer_norm_forward of it, fused into one pass. a, b and
/// residual share y's dtype; residual may be a or b.
void residual_layer_norm_forward(Stream& stream, const ConstTensorView& a, const ConstTensorView& b,
                                 const ConstTensorView& weight, const ConstTensorView& bias, float epsilon,
                                 const TensorView& residual, const TensorView& y, const TensorView& mean,
                                 const TensorView& rstd);

/// dx (= or += when accumulate_dx) is in x's dtype; weight_gradient and bias_gradient (fp32 [columns]) are
/// added to: rows are summed in fixed blocks, in an order that depends on the shape only (on the CPU blocks
/// of 64 in order; on cuda also on the workspace's size). The blocks' sums use the workspace, 8 bytes per
/// column and block; if it holds few of them, the CPU takes a second pass over x and dy.
void layer_norm_backward(Stream& stream, const ConstTensorView& dy, const ConstTensorView& x,
                         const ConstTensorView& weight, const ConstTensorView& mean,
                         const ConstTensorView& rstd, bool accumulate_dx, const TensorView& dx,
                         const TensorView& weight_gradient, const TensorView& bias_gradient,
                         const Workspace& workspace = {});

}  // namespace tranche::kernels
