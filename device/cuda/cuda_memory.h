#pragma once
/// Memory of the GPU and pinned memory of the host.

#include <cstdint>
#include <memory>
#include <optional>

#include "device/cuda/cuda_driver.h"
#include "device/cuda/cuda_state.h"
#include "tranche/device/memory.h"

namespace tranche::cuda {

/// Memory of Tier::device.
class GpuMemory : public MemoryResource {
 public:
  struct Held {
    std::int64_t mapped = 0;
    std::int64_t placed = 0;
  };
  Tier tier() const override { return Tier::device; }
  virtual Held held() const = 0;
  virtual void release_unused() noexcept = 0;
};

/// Memory from one range of addresses whose pages are mapped on demand (RangePlacer). The range is twice as
/// long as the GPU's memory, so that holes between long-lived buffers do not exhaust it. Memory of
/// Category::communication is one mapping, so that it can be registered with a network. Freeing does not
/// wait: the caller ensures that no work uses the memory. Unmapping is a driver call that takes locks, so it
/// is kept out of deallocate: it happens when an allocation needs new memory, and in release_unused().
/// Returns null where the driver cannot map memory separately.
std::unique_ptr<GpuMemory> make_mapped_memory(std::shared_ptr<CudaState> state,
                                              const DriverFunctions& driver);
/// Calls cudaMalloc for every request; for drivers without mapping, and for wants_plain_memory(). Requests
/// are rounded up to memory_alignment, unless `exact`.
std::unique_ptr<GpuMemory> make_plain_memory(std::shared_ptr<CudaState> state, bool exact = false);

/// True with TRANCHE_PLAIN_DEVICE_MEMORY=1: every request for GPU memory or pinned memory becomes a CUDA
/// allocation of exactly its bytes, so that memory checkers see an access one byte beyond it. Slow; for
/// tests. Throws ConfigurationError for a value other than 0 and 1.
bool wants_plain_memory();

/// Memory of Tier::host: page-aligned memory of the process, registered with the runtime once and for as long
/// as it is allocated.
class PinnedMemory : public MemoryResource {
 public:
  /// The largest size of one registration: pinning takes locks of the driver, and larger registrations hold
  /// them longer.
  static constexpr std::int64_t piece_bytes = std::int64_t{1} << 30;
  explicit PinnedMemory(std::shared_ptr<CudaState> state);
  ~PinnedMemory() override;
  Tier tier() const override { return Tier::host; }
  void* allocate(const AllocationRequest& request) override;
  void deallocate(void* pointer, const AllocationRequest& request) noexcept override;
  /// The number of bytes from `pointer` to the end of its registration, which one call may copy; 0 when the
  /// memory is not from this resource.
  std::int64_t bytes_in_registration(const void* pointer) const noexcept;
  /// The bytes that are registered now.
  std::int64_t pinned_bytes() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tranche::cuda
