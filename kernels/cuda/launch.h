#pragma once
/// Launches kernels. Sources of this folder are compiled by nvcc, or, with TRANCHE_CUDA=EMULATED, by the host
/// compiler with tests/cuda_emulation, which runs every thread of a block as a fiber; so they launch through
/// this header and never by <<<>>>.

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "device/cuda/cuda_modules.h"
#include "tranche/core/error.h"
#include "tranche/device/stream.h"

namespace tranche::kernels::cuda {

struct LaunchShape {
  dim3 grid = 1;
  dim3 block = 1;
  std::size_t dynamic_shared_bytes = 0;
};

inline cudaStream_t native(const Stream& stream) {
  return static_cast<cudaStream_t>(stream.native_handle());
}

/// Every source that launches kernels registers them through this one, which does nothing and is never
/// launched.
static __global__ void kernel_of_this_source() {}
static const tranche::cuda::KernelSource this_source(reinterpret_cast<const void*>(&kernel_of_this_source));

/// Throws the exception for a failed runtime call; `what` names the call.
void check_cuda(cudaError_t error, const char* what);

/// The number of multiprocessors of the calling thread's device; for the size of grids.
int multiprocessors();

/// Launches `kernel` on the stream. Throws on a launch error, naming the kernel.
template <class... Parameters, class... Arguments>
void launch(Stream& stream, const char* name, void (*kernel)(Parameters...), const LaunchShape& shape,
            Arguments&&... arguments) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;  // an empty grid is no error
  const StreamSpan span(stream, name);
#if defined(TRANCHE_CUDA_EMULATION)
  check_cuda(
      cuda_emulation::launch(name, reinterpret_cast<const void*>(kernel), shape.grid, shape.block,
                             shape.dynamic_shared_bytes, native(stream),
                             [kernel, ... owned = std::decay_t<Parameters>(arguments)] { kernel(owned...); }),
      name);
#else
  if (shape.dynamic_shared_bytes > 48 * 1024) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shape.dynamic_shared_bytes)),
               name);
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.dynamic_shared_bytes;
  config.stream = native(stream);
  check_cuda(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), name);
#endif
}

}  // namespace tranche::kernels::cuda
