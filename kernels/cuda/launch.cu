#include "tranche/kernels/cuda/launch.h"

namespace tranche::kernels::cuda {

void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // the runtime would report it again
  throw Error(std::string("CUDA: ") + what + ": " + cudaGetErrorString(error) + " (" +
              cudaGetErrorName(error) + ")");
}

int multiprocessors() {
  int device = 0;
  int count = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
             "cudaDeviceGetAttribute");
  return count;
}

}  // namespace tranche::kernels::cuda
