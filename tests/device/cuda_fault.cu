#include "kernels/cuda/launch.h"
#include "tests/device/gpu_cases_fault.h"

namespace tranche::test {
namespace {

__global__ void write_nowhere(unsigned char* address) {
#if defined(TRANCHE_CUDA_EMULATION)
  static_cast<void>(address);
  cuda_emulation::fail_thread("a write where no memory is", cuda_emulation::Where::current());
#else
  *static_cast<volatile unsigned char*>(address) = 1;
#endif
}

}  // namespace

void lose_cuda_context(Stream& stream) {
  kernels::cuda::launch(stream, "write_nowhere", write_nowhere, {}, reinterpret_cast<unsigned char*>(16));
}

}  // namespace tranche::test
