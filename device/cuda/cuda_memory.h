#pragma once
/// Memory of the GPU and pinned memory of the host.

#include <cstdint>
#include <memory>
#include <optional>

#include "device/cuda/cuda_driver.h"
#include "device/cuda/cuda_state.h"
#include "tranche/device/memory.h"

namespace tranche::cuda {

/// Tier::device.
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

/// One range of addresses, twice as long as the GPU has memory (holes between long-lived buffers must not be
/// what runs out), whose pages are mapped while they are needed (RangePlacer). Memory of
/// Category::communication is of one piece, so that it can be registered with a network.
/// Freeing waits for nothing: who frees has made sure that no work uses the memory. Unmapping is a call that
/// takes locks of the driver, so it is kept out of deallocate: it happens when an allocation needs new
/// memory, and in release_unused(). Returns nothing where the driver cannot map memory apart.
std::unique_ptr<GpuMemory> make_mapped_memory(std::shared_ptr<CudaState> state,
                                              const DriverFunctions& driver);
/// cudaMalloc for every request; for drivers without mapping, and for wants_plain_memory(). Requests are
/// rounded up to memory_alignment, but not with `exact`.
std::unique_ptr<GpuMemory> make_plain_memory(std::shared_ptr<CudaState> state, bool exact = false);

/// True with TRANCHE_PLAIN_DEVICE_MEMORY=1: every request, of the GPU's memory and of pinned memory, is an
/// allocation of CUDA's own and of exactly its bytes, so that memory checkers see an access one byte beyond
/// it. Slow; for tests. Throws ConfigurationError for a value that is neither 0 nor 1.
bool wants_plain_memory();

/// Tier::host: page-aligned memory of the process, registered with the runtime once and for as long as it is
/// held.
class PinnedMemory : public MemoryResource {
 public:
  /// Memory is registered in pieces of this size at most: pinning takes locks of the driver, and longer
  /// pieces hold them longer.
  static constexpr std::int64_t piece_bytes = std::int64_t{1} << 30;
  explicit PinnedMemory(std::shared_ptr<CudaState> state);
  ~PinnedMemory() override;
  Tier tier() const override { return Tier::host; }
  void* allocate(const AllocationRequest& request) override;
  void deallocate(void* pointer, const AllocationRequest& request) noexcept override;
  /// How many bytes from `pointer` on lie in one registered piece, so may be copied by one call; 0 when the
  /// memory is not of this resource.
  std::int64_t bytes_in_registration(const void* pointer) const noexcept;
  /// Registered now.
  std::int64_t pinned_bytes() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tranche::cuda
