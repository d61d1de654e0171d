#include "device/cuda_probe.h"
#include "tranche/core/error.h"
#include "tranche/device/cuda_interop.h"

namespace tranche {

detail::CudaProbe detail::probe_cuda() {
  CudaProbe probe;
  probe.problem = "CUDA is not part of this build";
  return probe;
}

std::unique_ptr<Device> detail::make_cuda_device(const DeviceOptions&) {
  throw NotCompiled("device cuda", "TRANCHE_CUDA");
}

// NOLINTNEXTLINE(performance-unnecessary-value-param): as it is declared
std::unique_ptr<Stream> wrap_stream(Device&, void*, std::string) {
  throw NotCompiled("device cuda", "TRANCHE_CUDA");
}

int cuda_ordinal(const Device&) {
  throw NotCompiled("device cuda", "TRANCHE_CUDA");
}

}  // namespace tranche
