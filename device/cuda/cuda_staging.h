#pragma once
/// Copies between the device and pageable host memory, staged through pinned memory.

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

/// Pinned memory for the staging of a device's streams. It is kept until the device is destroyed, because
/// freeing pinned memory may wait for all work of the GPU, and streams end while others run.
class StagingMemory {
 public:
  StagingMemory(std::shared_ptr<CudaState> state, PinnedMemory& pinned)
      : state_(std::move(state)), pinned_(pinned) {}
  /// Allocates exactly `bytes`; thread-safe.
  Buffer take(std::int64_t bytes);
  void give(Buffer buffer) noexcept;
  const std::shared_ptr<CudaState>& state() const noexcept { return state_; }

 private:
  std::shared_ptr<CudaState> state_;
  PinnedMemory& pinned_;
  std::mutex mutex_;
  std::vector<Buffer> free_;
};

/// The staging buffers of one stream; used by its issuing thread. They are allocated at the first copy that
/// needs them.
class Staging {
 public:
  static constexpr std::int64_t small_bytes = 64 << 10;  ///< copies up to this size go through the ring
  static constexpr std::int64_t segment_bytes = 128 << 10;
  static constexpr int segments = 8;
  static constexpr std::int64_t chunk_bytes = std::int64_t{4}
                                              << 20;  ///< longer copies go through two of these

  Staging(StagingMemory& memory, std::string stream);
  /// The stream is idle or has failed. Undelivered data stays undelivered, because its destination may be
  /// gone.
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  /// Copies bytes > 0. Up to small_bytes this does not wait (unless the ring is full), and the data is in
  /// `host` after deliver(). Larger copies block the host until they have arrived.
  void to_host(cudaStream_t stream, void* host, const void* device, std::int64_t bytes);
  /// Copies bytes > 0. `host` may be reused when this returns.
  void from_host(cudaStream_t stream, void* device, const void* host, std::int64_t bytes);
  /// Called when the stream is idle: copies the ring's data to its destinations, in order.
  void deliver() noexcept;

 private:
  struct Delivery {
    void* host;
    const void* from;
    std::int64_t bytes;
    std::int64_t lap;  // the segment's use, counted over laps
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
  std::int64_t used_ = 0;  // bytes used in the current segment
  std::array<cudaEvent_t, segments> segment_left_{};
  std::deque<Delivery> deliveries_;
  Buffer chunks_;
  std::array<cudaEvent_t, 2> chunk_done_{};
  int next_chunk_ = 0;  ///< for copies from the host
};

}  // namespace tranche::cuda
