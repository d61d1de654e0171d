#include <cuda_runtime_api.h>

#include "tests/device/gpu_cases.h"

namespace tranche::test {

std::string lasting_cuda_error() {
  static_cast<void>(cudaGetLastError());  // clears the error of a call that a case made to fail
  cudaError_t error = cudaDeviceSynchronize();
  if (error == cudaSuccess) return {};
  // An error of one call is cleared by the first query; an error of the context is returned again.
  static_cast<void>(cudaGetLastError());
  error = cudaDeviceSynchronize();
  if (error == cudaSuccess) return {};
  return std::string(cudaGetErrorName(error)) + ", " + cudaGetErrorString(error);
}

}  // namespace tranche::test
