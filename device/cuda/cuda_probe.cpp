#include "device/cuda_probe.h"

#include <cuda_runtime_api.h>

#include <string>

#include "device/launch_queues.h"

namespace tranche::detail {
namespace {

std::string describe(cudaError_t error) {
  // Without a usable driver the count fails with one of these two; both mean "no GPU here", not a defect.
  if (error == cudaErrorInsufficientDriver)
    return "no CUDA driver was found, or it is older than the runtime";
  if (error == cudaErrorNoDevice) return "no GPU was found";
  return std::string("the CUDA runtime failed: ") + cudaGetErrorString(error) + " (error " +
         std::to_string(static_cast<int>(error)) + ")";
}

}  // namespace

CudaProbe probe_cuda() {
  // Streams that share one of the GPU's queues wait for each other, though nothing orders them. The driver
  // reads the variable once, so it is set once, before the first call.
  static const std::string warning = ask_for_launch_queues();
  CudaProbe probe;
  probe.warning = warning;
  probe.compiled = true;
#if defined(TRANCHE_CUDA_EMULATION)
  probe.emulated = true;
#endif
  cudaRuntimeGetVersion(&probe.runtime_version);
  if (cudaDriverGetVersion(&probe.driver_version) != cudaSuccess) probe.driver_version = 0;
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    cudaGetLastError();  // clears it, so that a later call does not report this one's
    probe.problem = describe(error);
    return probe;
  }
  for (int index = 0; index < count; ++index) {
    cudaDeviceProp properties{};
    if (const cudaError_t error = cudaGetDeviceProperties(&properties, index); error != cudaSuccess) {
      cudaGetLastError();
      probe.problem = describe(error);
      return probe;
    }
    probe.devices.push_back({properties.name, properties.major, properties.minor,
                             static_cast<std::int64_t>(properties.totalGlobalMem),
                             properties.multiProcessorCount});
  }
  if (probe.devices.empty()) probe.problem = describe(cudaErrorNoDevice);
  return probe;
}

}  // namespace tranche::detail
