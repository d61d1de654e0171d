#pragma once
#include <string>
#include <string_view>

#include "kernels/cuda/gemm.h"
#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"
#include "tranche/kernels/workspace.h"

namespace tranche::kernels::cuda {

/// Like kernels/matmul.h, with checked arguments; `gemm` is the plain GEMM into `out`, `hidden` or
/// `d_hidden`. It is one launch, or, if cuBLASLt has no such epilogue, the GEMM followed by elementwise
/// kernels. Which of them depends on shape, alignment and workspace, so it is the same every time.
void matmul_bias(Stream& stream, Gemm gemm, const TensorView& out, const ConstTensorView& bias,
                 const Workspace& workspace);
void matmul_bias_gelu(Stream& stream, Gemm gemm, const TensorView& hidden, const TensorView& activated,
                      const ConstTensorView& bias, const Workspace& workspace);
void matmul_gelu_backward(Stream& stream, Gemm gemm, const ConstTensorView& hidden,
                          const TensorView& d_hidden, const Workspace& workspace);

/// "cuBLASLt bf16, sums in fp32", "cuBLASLt IEEE fp32 (no TF32)".
std::string_view matmul_path(DataType dtype);
/// "cuBLASLt 13.1.0, compute capability 9.0 with 132 multiprocessors": each of these influences the choice of
/// a GEMM's algorithm, and so its bits. The device is the calling thread's; "no device" if there is none.
std::string matmul_libraries();
/// Formats the version that cublasLtGetVersion() returns: "13.1.0".
std::string version_text(std::size_t packed);

}  // namespace tranche::kernels::cuda
