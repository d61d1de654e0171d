#include "kernels/cuda/matmul.h"

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include "kernels/cuda/elementwise.h"

namespace tranche::kernels::cuda {

namespace {

/// An attribute of the calling thread's device; -1 without one.
int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  if (cudaGetDevice(&device) == cudaSuccess && cudaDeviceGetAttribute(&value, which, device) == cudaSuccess) {
    return value;
  }
  cudaGetLastError();  // clears it, so that a later call does not report this one's
  return -1;
}

}  // namespace

void matmul_bias(Stream& stream, Gemm gemm, const TensorView& out, const ConstTensorView& bias,
                 const Workspace& workspace) {
  gemm.epilogue = Epilogue::bias;
  gemm.bias = bias.data;
  if (try_gemm(stream, gemm, workspace)) return;
  gemm.epilogue = Epilogue::none;
  cuda::gemm(stream, gemm, workspace);
  add_bias(stream, out, bias);
}

// The names of cuBLASLt's GELU epilogues do not say so, but they are the tanh form, as ours.
void matmul_bias_gelu(Stream& stream, Gemm gemm, const TensorView& hidden, const TensorView& activated,
                      const ConstTensorView& bias, const Workspace& workspace) {
  Gemm fused = gemm;
  fused.epilogue = Epilogue::bias_gelu;
  fused.bias = bias.data;
  fused.auxiliary = hidden.data;
  fused.c = activated.data;
  if (try_gemm(stream, fused, workspace)) return;
  matmul_bias(stream, gemm, hidden, bias, workspace);
  gelu_forward(stream, hidden, activated);
}

void matmul_gelu_backward(Stream& stream, Gemm gemm, const ConstTensorView& hidden,
                          const TensorView& d_hidden, const Workspace& workspace) {
  gemm.epilogue = Epilogue::gelu_backward;
  gemm.auxiliary = const_cast<void*>(hidden.data);  // only read by this epilogue
  if (try_gemm(stream, gemm, workspace)) return;
  gemm.epilogue = Epilogue::none;
  gemm.auxiliary = nullptr;
  cuda::gemm(stream, gemm, workspace);
  gelu_backward(stream, hidden, d_hidden, d_hidden);
}

std::string_view matmul_path(DataType dtype) {
  switch (dtype) {
    case DataType::bfloat16:
      return "cuBLASLt bf16, sums in fp32";
    case DataType::float16:
      return "cuBLASLt fp16, sums in fp32";
    default:
      return "cuBLASLt IEEE fp32 (no TF32)";
  }
}

std::string version_text(std::size_t packed) {
  return fmt::format("{}.{}.{}", packed / 10000, packed / 100 % 100, packed % 100);
}

std::string matmul_libraries() {
  const std::string library = "cuBLASLt " + version_text(cublasLtGetVersion());
  const int major = attribute(cudaDevAttrComputeCapabilityMajor);
  if (major < 0) return library + ", no device";
  return fmt::format("{}, compute capability {}.{} with {} multiprocessors", library, major,
                     attribute(cudaDevAttrComputeCapabilityMinor), attribute(cudaDevAttrMultiProcessorCount));
}

}  // namespace tranche::kernels::cuda
