#include "tranche/device/cuda_probe.h"

#include <cuda_runtime_api.h>

#include "tranche/core/error.h"

namespace tranche {
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
  CudaProbe probe;
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

std::unique_ptr<Device> make_cuda_device(const DeviceOptions& options) {
  const CudaProbe probe = probe_cuda();
  if (probe.devices.empty()) {
    throw ConfigurationError("device cuda was asked for, but " + probe.problem + "; choose device cpu");
  }
  if (options.index < 0 || options.index >= static_cast<int>(probe.devices.size())) {
    throw ConfigurationError("device cuda " + std::to_string(options.index) +
                             " was asked for, but this machine has " + std::to_string(probe.devices.size()));
  }
  throw ConfigurationError("training on device cuda is not part of this version (found " +
                           probe.devices[static_cast<std::size_t>(options.index)].name +
                           "); choose device cpu");
}

}  // namespace tranche
