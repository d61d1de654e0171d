#pragma once
#include <string>
#include <string_view>

#include "kernels/cuda/gemm.h"
#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"
#include "tranche/kernels/workspace.h"

namespace tranche::kernels::cuda {

/// As in kernels/matmul.h, arguments checked; `gemm` is the plain GEMM into `out`, `hidden` or `d_hidden`.
/// One launch, or the GEMM and the elementwise kernels that follow it where cuBLASLt has no such epilogue: a
/// matter of shape, alignment and workspace, so the same every time.
void matmul_bias(Stream& stream, Gemm gemm, const TensorView& out, const ConstTensorView& bias,
                 const Workspace& workspace);
void matmul_bias_gelu(Stream& stream, Gemm gemm, const TensorView& hidden, const TensorView& activated,
                      const ConstTensorView& bias, const Workspace& workspace);
void matmul_gelu_backward(Stream& stream, Gemm gemm, const ConstTensorView& hidden,
                          const TensorView& d_hidden, const Workspace& workspace);

/// "cuBLASLt bf16, sums in fp32", "cuBLASLt IEEE fp32 (no TF32)".
std::string_view matmul_path(DataType dtype);
/// "cuBLASLt 13.1.0, compute capability 9.0 with 132 multiprocessors": each has a part in the choice of a
/// GEMM's algorithm, and so in its bits. The device is the calling thread's; "no device" where there is none.
std::string matmul_libraries();
/// The version as cublasLtGetVersion() packs it, "13.1.0".
std::string version_text(std::size_t packed);

}  // namespace tranche::kernels::cuda
