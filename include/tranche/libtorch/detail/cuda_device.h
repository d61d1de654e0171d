#pragma once
/// Torch's device for an engine, and the engine's compute stream as torch's current stream.

#include <torch/torch.h>

#ifdef TRANCHE_LIBTORCH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "tranche/device/cuda_interop.h"
#include "tranche/libtorch/detail/cuda_memory.h"
#endif

#include <optional>

#include "tranche/core/error.h"
#include "tranche/engine/engine.h"

namespace tranche::libtorch::detail {

/// Throws ConfigurationError on meta, NotCompiled for cuda without the target's CUDA parts.
inline at::Device torch_device(Device& device) {
  switch (device.kind()) {
    case DeviceKind::cpu:
      return at::kCPU;
    case DeviceKind::cuda:
#ifdef TRANCHE_LIBTORCH_CUDA
      return at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(cuda_ordinal(device)));
#else
      throw NotCompiled("LibTorch on cuda", "TRANCHE_LIBTORCH_CUDA");
#endif
    case DeviceKind::meta:
      break;
  }
  throw ConfigurationError(
      "device meta runs no module of LibTorch, so what its activations take is not known");
}

/// In this scope torch submits its work to the engine's compute stream.
class StreamScope {
 public:
  explicit StreamScope([[maybe_unused]] Engine& engine) {
#ifdef TRANCHE_LIBTORCH_CUDA
    if (engine.device().kind() != DeviceKind::cuda) return;
    limit_cuda_memory(engine);
    void* handle = engine.compute_stream().native_handle();
    stream_.emplace(c10::cuda::getStreamFromExternal(
        static_cast<cudaStream_t>(handle), static_cast<c10::DeviceIndex>(cuda_ordinal(engine.device()))));
#endif
  }
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

 private:
#ifdef TRANCHE_LIBTORCH_CUDA
  std::optional<c10::cuda::CUDAStreamGuard> stream_;
#endif
};

}  // namespace tranche::libtorch::detail
