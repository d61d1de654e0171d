#include "device/cuda/cuda_advice.h"

namespace tranche::cuda {

std::string advice_of(cudaError_t error) {
  switch (error) {
    case cudaErrorDevicesUnavailable:
      return "; another process uses the GPU, and its compute mode admits only one: end that process "
             "(nvidia-smi "
             "lists it), or let the administrator set the mode back (nvidia-smi -c DEFAULT)";
    case cudaErrorNoKernelImageForDevice:
      return "; this build has no kernels for the compute capability of this GPU: build it with "
             "-DCMAKE_CUDA_ARCHITECTURES=native, or make the archive without --gpu";
    case cudaErrorUnsupportedPtxVersion:
      return "; the driver is too old to translate this build's kernels for this GPU: install a newer "
             "driver, or build "
             "with -DCMAKE_CUDA_ARCHITECTURES=native";
    case cudaErrorSystemDriverMismatch:
      return "; libcuda.so and the kernel's driver are of different versions: reboot after an update of the "
             "driver, or "
             "look which libcuda.so a container brings";
    case cudaErrorCompatNotSupportedOnDevice:
      return "; libcuda.so comes from a package cuda-compat, which this GPU does not take: remove its folder "
             "from "
             "LD_LIBRARY_PATH";
    case cudaErrorSystemNotReady:
      return "; GPUs with NVSwitch need the service nvidia-fabricmanager, which does not run";
    case cudaErrorMpsConnectionFailed:
    case cudaErrorMpsServerNotReady:
    case cudaErrorMpsRpcFailure:
    case cudaErrorMpsMaxClientsReached:
    case cudaErrorMpsMaxConnectionsReached:
    case cudaErrorMpsClientTerminated:
      return "; the Multi-Process Service is in use: restart its server, or go without it (unset "
             "CUDA_MPS_PIPE_DIRECTORY)";
    case cudaErrorOperatingSystem:
    case cudaErrorUnknown:
      return "; a usual cause is that /dev/nvidia0, /dev/nvidiactl or /dev/nvidia-uvm is missing, or that "
             "this user or "
             "its container may not open it";
    default:
      return {};
  }
}

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace tranche::cuda
