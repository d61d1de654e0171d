#include "tranche/kernels/cuda/matmul.h"

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <fmt/core.h>

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
