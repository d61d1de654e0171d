#include "device/cuda_probe.h"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <string>

#include "device/cuda/cuda_advice.h"
#include "device/launch_queues.h"

namespace tranche::detail {
namespace {

/// The reason why there are no GPUs. Only the first two are normal on machines without one.
std::string describe(cudaError_t error, const CudaProbe& probe) {
  if (error == cudaErrorNoDevice) {
    const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
    return std::string("no GPU was found") +
           (visible == nullptr ? "" : " (CUDA_VISIBLE_DEVICES is '" + std::string(visible) + "')");
  }
  if (error == cudaErrorInsufficientDriver) {
    if (probe.driver_version == 0) return "no CUDA driver was found";
    const std::string runtime = cuda::version_text(probe.runtime_version);
    return "the driver serves CUDA " + cuda::version_text(probe.driver_version) +
           ", and this build needs CUDA " + runtime +
           ": install a newer driver, or on a data-centre GPU NVIDIA's package cuda-compat for CUDA " +
           runtime;
  }
  return std::string("the CUDA runtime failed: ") + cudaGetErrorString(error) + " (error " +
         std::to_string(static_cast<int>(error)) + ")" + cuda::advice_of(error);
}

}  // namespace

CudaProbe probe_cuda() {
  // Streams that share one of the GPU's hardware queues wait for each other without being ordered. The driver
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
    probe.problem = describe(error, probe);
    return probe;
  }
  for (int index = 0; index < count; ++index) {
    cudaDeviceProp properties{};
    if (const cudaError_t error = cudaGetDeviceProperties(&properties, index); error != cudaSuccess) {
      cudaGetLastError();
      probe.problem = describe(error, probe);
      return probe;
    }
    probe.devices.push_back({properties.name, properties.major, properties.minor,
                             static_cast<std::int64_t>(properties.totalGlobalMem),
                             properties.multiProcessorCount});
  }
  if (probe.devices.empty()) probe.problem = describe(cudaErrorNoDevice, probe);
  return probe;
}

}  // namespace tranche::detail
