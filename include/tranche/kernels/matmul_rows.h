#pragma once
#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"
#include "tranche/kernels/workspace.h"

namespace tranche::kernels {

/// c[m, n] = a[m, k] op(b)[k, n] + bias[n] for few rows, as in generation: b, stored [n, k] with
/// `transpose_b`, is read once and in order, where matmul would pack it first. An empty bias (`{}`) means
/// none. a, b and bias share a dtype (fp32, bf16, fp16); c has that dtype, or, without bias, fp32. Sums are
/// in fp32; with bias a 16-bit sum is rounded twice, as by matmul_bias. cpu: a row of c has the same bits
/// whatever the number and contents of the other rows, for any number of threads. cuda: cuBLASLt as in
/// matmul, without that guarantee. `workspace` has at least minimum_workspace_bytes for 16-bit dtypes. Throws
/// InvalidArgument on shapes, dtypes and workspace.
void matmul_rows(Stream& stream, bool transpose_b, const ConstTensorView& a, const ConstTensorView& b,
                 const ConstTensorView& bias, const TensorView& c, const Workspace& workspace);

}  // namespace tranche::kernels
