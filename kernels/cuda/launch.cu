#include "kernels/cuda/launch.h"

#include "device/cuda/cuda_advice.h"
#include "device/cuda/cuda_state.h"

namespace tranche::kernels::cuda {

void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // the runtime would report it again
  throw Error(std::string("CUDA: ") + what + ": " + cudaGetErrorString(error) + " (" +
              cudaGetErrorName(error) + ")" + tranche::cuda::advice_of(error) +
              tranche::cuda::text_of_loss(error));
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
