#pragma once
/// Torch's memory in Tranche's ledger and under its limits.

#include <c10/core/CPUAllocator.h>
#include <torch/torch.h>

#include <memory>
#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tranche/core/error.h"
#include "tranche/engine/runtime.h"
#include "tranche/libtorch/detail/cuda_memory.h"

namespace tranche::libtorch {

namespace detail {

class LedgerAllocator final : public c10::Allocator {
 public:
  LedgerAllocator(TrackingResource& memory, std::int64_t cache_bytes)
      : memory_(&memory), cache_bytes_(cache_bytes) {}

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 3
  c10::DataPtr allocate(std::size_t bytes) override {
    return memory_of(bytes);
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
#else
  c10::DataPtr allocate(std::size_t bytes) const override {
    return const_cast<LedgerAllocator*>(this)->memory_of(bytes);
  }
#endif
  /// Some operators free memory by its address alone, so a header in front of it names its owner.
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_data;
  }
  /// Stops further allocations from the resource. Returns true if no tensor still has memory of it.
  bool detach() {
    const std::lock_guard lock(mutex_);
    empty_cache();
    memory_ = nullptr;
    return live_ == 0;
  }

 private:
  /// Precedes every tensor's memory; its size is the memory's alignment.
  struct alignas(64) Header {
    LedgerAllocator* owner;
    std::size_t bytes;  ///< includes the header
  };

  c10::DataPtr memory_of(std::size_t bytes) {
    if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, c10::Device(c10::kCPU)};
    void* data = take(bytes + sizeof(Header)) + 1;
    return {data, data, &free_data, c10::Device(c10::kCPU)};
  }
  Header* take(std::size_t bytes) {
    return new (take_memory(bytes)) Header{this, bytes};
  }
  void* take_memory(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    if (memory_ == nullptr) throw LogicError("torch asks for memory of an account that has ended");
    ++live_;
    if (auto kept = cache_.find(bytes); kept != cache_.end() && !kept->second.empty()) {
      void* data = kept->second.back();
      kept->second.pop_back();
      cached_ -= static_cast<std::int64_t>(bytes);
      return data;
    }
    const AllocationRequest request{static_cast<std::int64_t>(bytes), Category::activations, "torch"};
    try {
      try {
        return memory_->allocate(request);
      } catch (const OutOfMemory&) {
        if (cached_ == 0) throw;
        empty_cache();
        return memory_->allocate(request);
      }
    } catch (...) {
      --live_;
      throw;
    }
  }
  static void free_data(void* data) {
    if (data == nullptr) return;
    auto* header = static_cast<Header*>(data) - 1;
    LedgerAllocator& owner = *header->owner;
    const std::lock_guard lock(owner.mutex_);
    --owner.live_;
    if (owner.memory_ == nullptr) return;  // the resource, and with it the memory, may no longer exist
    const auto bytes = static_cast<std::int64_t>(header->bytes);
    if (owner.cached_ + bytes <= owner.cache_bytes_) {
      owner.cache_[header->bytes].push_back(header);
      owner.cached_ += bytes;
    } else {
      owner.memory_->free(header);
    }
  }
  void empty_cache() {
    for (auto& [bytes, blocks] : cache_) {
      for (void* data : blocks) memory_->free(data);
    }
    cache_.clear();
    cached_ = 0;
  }

  std::mutex mutex_;
  TrackingResource* memory_;
  std::int64_t cache_bytes_, cached_ = 0, live_ = 0;
  std::unordered_map<std::size_t, std::vector<void*>> cache_;
};

}  // namespace detail

/// While it exists, every CPU tensor that torch creates uses memory of the runtime. The ledger records it as
/// activations "torch", on the device if that is the CPU, else in host memory, and it counts against
/// tranche.device_memory or tranche.host_memory. If the limit refuses an allocation, the torch operator
/// throws OutOfMemory, also out of autograd. On a GPU the ledger records what torch's caching allocator
/// holds. The Trainer limits that to tranche.device_memory, and a refusal is an OutOfMemory with the ledger's
/// table.
///
/// There is one for a process, like torch's allocators. It must end before the runtime, and after every
/// tensor that was made while it existed; memory of tensors that outlive it is never freed.
class MemoryAccount {
 public:
  explicit MemoryAccount(Runtime& runtime, std::int64_t cache_bytes = std::int64_t{32} << 20)
      : before_(c10::GetCPUAllocator()) {
    if (dynamic_cast<detail::LedgerAllocator*>(before_) != nullptr) {
      throw LogicError("torch's memory is accounted for another runtime of this process already");
    }
    const bool gpu = runtime.device().kind() == DeviceKind::cuda;
    allocator_ = new detail::LedgerAllocator(runtime.memory(gpu ? Tier::host : Tier::device), cache_bytes);
    c10::SetCPUAllocator(allocator_, priority);
    if (gpu) gpu_ = std::make_unique<detail::CudaAccount>(runtime);
  }
  ~MemoryAccount() {
    if (allocator_ == nullptr) return;
    c10::SetCPUAllocator(before_, priority);
    if (allocator_->detach()) delete allocator_;  // else tensors still refer to it
  }
  MemoryAccount(MemoryAccount&& other) noexcept
      : before_(other.before_),
        allocator_(std::exchange(other.allocator_, nullptr)),
        gpu_(std::move(other.gpu_)) {}
  MemoryAccount& operator=(MemoryAccount&&) = delete;
  MemoryAccount(const MemoryAccount&) = delete;
  MemoryAccount& operator=(const MemoryAccount&) = delete;

 private:
  static constexpr std::uint8_t priority = 1;  ///< higher than that of torch's own allocator
  c10::Allocator* before_;
  detail::LedgerAllocator* allocator_ = nullptr;
  std::unique_ptr<detail::CudaAccount> gpu_;
};

/// `cache_bytes`: the most freed memory that is kept for requests of the same size. The ledger counts it, and
/// it is freed before a request of torch's is refused.
[[nodiscard]] inline MemoryAccount account_memory(Runtime& runtime,
                                                  std::int64_t cache_bytes = std::int64_t{32} << 20) {
  return MemoryAccount(runtime, cache_bytes);
}

}  // namespace tranche::libtorch
