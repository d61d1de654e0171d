#pragma once
/// Copies between the device and memory of the host that is not pinned, by way of memory that is.

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "device/cuda/cuda_memory.h"
#include "device/cuda/cuda_state.h"

namespace tranche::cuda {

/// Pinned memory for the staging of a device's streams. Kept until the device goes: giving pinned memory back
/// may wait for all work of the GPU, and streams end while others run.
class StagingMemory {
 public:
  StagingMemory(std::shared_ptr<CudaState> state, PinnedMemory& pinned)
      : state_(std::move(state)), pinned_(pinned) {}
  /// A buffer of exactly `bytes`; thread-safe.
  Buffer take(std::int64_t bytes);
  void give(Buffer buffer) noexcept;
  const std::shared_ptr<CudaState>& state() const noexcept { return state_; }

 private:
  std::shared_ptr<CudaState> state_;
  PinnedMemory& pinned_;
  std::mutex mutex_;
  std::vector<Buffer> free_;
};

/// The staging memory of one stream; used by its issuing thread. Takes its memory at the first copy that
/// needs it.
class Staging {
 public:
  static constexpr std::int64_t small_bytes = 64 << 10;  ///< up to here a copy goes through the ring
  static constexpr std::int64_t segment_bytes = 128 << 10;
  static constexpr int segments = 8;
  static constexpr std::int64_t chunk_bytes = std::int64_t{4}
                                              << 20;  ///< longer copies go through two of these

  Staging(StagingMemory& memory, std::string stream);
  /// The stream is idle or has failed. What was not delivered stays undelivered: its destination may be gone.
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  /// bytes > 0. Up to small_bytes without a wait (unless more is under way than the ring holds); the bytes
  /// are in `host` after deliver(). More bytes stop the host until they have arrived.
  void to_host(cudaStream_t stream, void* host, const void* device, std::int64_t bytes);
  /// bytes > 0. `host` has been read when this returns.
  void from_host(cudaStream_t stream, void* device, const void* host, std::int64_t bytes);
  /// The stream is idle: hands over what came through the ring, in order.
  void deliver() noexcept;

 private:
  struct Delivery {
    void* host;
    const void* from;
    std::int64_t bytes;
    std::int64_t lap;  // of segment use
  };
  std::byte* ring_place(cudaStream_t stream, std::int64_t bytes);
  void deliver_through(std::int64_t lap) noexcept;
  std::byte* chunk(int index);
  void await(cudaEvent_t event, bool count);

  void check_copy(cudaError_t error, const char* call, const char* what, std::int64_t bytes) const;

  StagingMemory& memory_;
  std::shared_ptr<CudaState> state_;
  std::string stream_name_;
  Buffer ring_;
  std::int64_t lap_ = 0;   // segment lap_ % segments is being filled
  std::int64_t used_ = 0;  // of it
  std::array<cudaEvent_t, segments> segment_left_{};
  std::deque<Delivery> deliveries_;
  Buffer chunks_;
  std::array<cudaEvent_t, 2> chunk_done_{};
  int next_chunk_ = 0;  ///< of copies from the host
};

}  // namespace tranche::cuda
