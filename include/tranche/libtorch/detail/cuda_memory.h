#pragma once
/// Tranche's ledger and limit count the GPU memory that torch's caching allocator holds.

#include <torch/torch.h>

#ifdef TRANCHE_LIBTORCH_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "tranche/core/error.h"
#include "tranche/device/cuda_interop.h"
#include "tranche/engine/engine.h"
#include "tranche/engine/runtime.h"

namespace tranche::libtorch::detail {

#ifdef TRANCHE_LIBTORCH_CUDA

/// Records the segments that the allocator holds on the GPU, rather than the tensors in them. Needs LibTorch
/// 2.3 or later, whose allocator reports segments. Torch cannot remove an observer, so the observers share a
/// state that the destructor closes.
class CudaAccount {
 public:
  explicit CudaAccount(Runtime& runtime) : state_(std::make_shared<State>()) {
    state_->ledger = &runtime.ledger();
    state_->device = cuda_ordinal(runtime.device());
    namespace allocator = c10::cuda::CUDACachingAllocator;
    // An allocator without a first allocation has no device and would drop its observers.
    at::empty({1}, at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(state_->device)));
    allocator::emptyCache();
    allocator::attachOutOfMemoryObserver(
        [state = state_](std::int64_t device, std::size_t bytes, std::size_t /*total*/, std::size_t left) {
          const Ledger* ledger = state->ledger.load();
          if (ledger == nullptr || device != state->device) return;
          const std::string doing = ledger->doing();
          throw OutOfMemory((doing.empty() ? "" : doing + ": ") + "'torch' (activations) asks for " +
                            format_bytes(static_cast<std::int64_t>(bytes)) + " of the GPU, where " +
                            format_bytes(static_cast<std::int64_t>(left)) + " are free\n" + ledger->table());
        });
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 3
    allocator::attachAllocatorTraceTracker([state = state_](const allocator::TraceEntry& entry) {
      Ledger* ledger = state->ledger.load();
      if (ledger == nullptr || entry.device_ != state->device) return;
      const auto bytes = static_cast<std::int64_t>(entry.size_);
      if (entry.action_ == allocator::TraceEntry::SEGMENT_ALLOC ||
          entry.action_ == allocator::TraceEntry::SEGMENT_MAP) {
        state->held += bytes;
        ledger->allocated(Tier::device, Category::activations, bytes, tag);
      } else if (entry.action_ == allocator::TraceEntry::SEGMENT_FREE ||
                 entry.action_ == allocator::TraceEntry::SEGMENT_UNMAP) {
        // Segments from before the account were never recorded.
        const std::int64_t booked = std::min(bytes, state->held.load());
        state->held -= booked;
        if (booked > 0) ledger->released(Tier::device, Category::activations, booked, tag);
      }
    });
#endif
  }
  ~CudaAccount() {
    Ledger* ledger = state_->ledger.exchange(nullptr);
    if (state_->held > 0) ledger->released(Tier::device, Category::activations, state_->held, tag);
  }
  CudaAccount(const CudaAccount&) = delete;
  CudaAccount& operator=(const CudaAccount&) = delete;

 private:
  static constexpr const char* tag = "torch";
  struct State {
    std::atomic<Ledger*> ledger = nullptr;
    std::atomic<std::int64_t> held = 0;
    int device = 0;
  };
  std::shared_ptr<State> state_;
};

/// Limits torch to the part of tranche.device_memory that the engine leaves. Called at the beginning of each
/// step or pass, because the engine allocates in the first two of each kind.
inline void limit_cuda_memory(Engine& engine) {
  const std::int64_t limit = engine.config().device_memory_limit;
  if (limit <= 0) return;
  const MemoryInfo info = engine.device().memory_info();
  const double share = static_cast<double>(limit - info.mapped) / static_cast<double>(info.total);
  c10::cuda::CUDACachingAllocator::setMemoryFraction(
      std::clamp(share, 0.0, 1.0), static_cast<c10::DeviceIndex>(cuda_ordinal(engine.device())));
}

#else

struct CudaAccount {
  explicit CudaAccount(Runtime& /*runtime*/) {}
};

#endif

}  // namespace tranche::libtorch::detail
