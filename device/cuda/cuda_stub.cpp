#include "tranche/core/error.h"
#include "tranche/device/cuda_probe.h"

namespace tranche {

CudaProbe probe_cuda() {
  CudaProbe probe;
  probe.problem = "CUDA is not part of this build";
  return probe;
}

std::unique_ptr<Device> make_cuda_device(const DeviceOptions&) {
  throw NotCompiled("device cuda", "TRANCHE_CUDA");
}

}  // namespace tranche
