#pragma once
#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"
#include "tranche/kernels/workspace.h"

namespace tranche::kernels {

/// out = x * rstd * weight over the last dimension, rstd = 1 / sqrt(mean(x^2) + epsilon) (Zhang and Sennrich,
/// 2019). x, weight and out share a dtype; rstd is fp32 [rows], written for backward. Rows are tokens, or
/// tokens * heads of head_dim numbers for norms of queries and keys. It is computed in fp32 and rounded once.
/// transformers rounds x * rstd to the dtype before it multiplies by the weight: fp32 results are equal,
/// 16-bit results are within two roundings of each other.
void rms_norm_forward(Stream& stream, const ConstTensorView& x, const ConstTensorView& weight, float epsilon,
                      const TensorView& out, const TensorView& rstd);

/// sum = a + b (fp32, rounded once), then rms_norm_forward of it, fused into one pass. a, b and sum share
/// out's dtype; sum may be a or b.
void residual_rms_norm_forward(Stream& stream, const ConstTensorView& a, const ConstTensorView& b,
                               const ConstTensorView& weight, float epsilon, const TensorView& sum,
                               const TensorView& out, const TensorView& rstd);

/// d_x (= or += when `accumulate`) is in x's dtype; weight_gradient (fp32 [columns]) is added to: rows are
/// summed in fixed blocks, in an order that depends on the shape only (on the CPU blocks of 64 in order; on
/// cuda also on the workspace's size). The blocks' sums use the workspace, 4 bytes per column and block; if
/// it holds few of them, the CPU takes a second pass over x and d_out.
void rms_norm_backward(Stream& stream, const ConstTensorView& d_out, const ConstTensorView& x,
                       const ConstTensorView& weight, const ConstTensorView& rstd, bool accumulate,
                       const TensorView& d_x, const TensorView& weight_gradient, const Workspace& workspace);

}  // namespace tranche::kernels
