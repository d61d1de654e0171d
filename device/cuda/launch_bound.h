#pragma once
/// How far a thread may issue ahead of a stream.

#include <cuda_runtime_api.h>

#include <deque>
#include <memory>

#include "device/cuda/cuda_state.h"

namespace tranche::cuda {

/// A GPU's queue holds about a thousand operations; the call that finds it full blocks inside the driver,
/// where it may hold up calls of other threads: of a rank of this process, say, that the full queue's stream
/// waits for. So the issuing thread waits before that, outside the driver's locks. Of one stream, used by its
/// issuing thread.
class LaunchBound {
 public:
  /// No stream has more operations pending than this.
  static constexpr int most_pending = 512;

  explicit LaunchBound(std::shared_ptr<CudaState> state) : state_(std::move(state)) {}
  ~LaunchBound();
  LaunchBound(const LaunchBound&) = delete;
  LaunchBound& operator=(const LaunchBound&) = delete;

  /// Before an operation is issued. May wait for the stream, which is no host wait of the device's counters
  /// (the driver's own waits are none either).
  void before_operation(cudaStream_t stream) noexcept;

 private:
  void forget() noexcept;
  static constexpr int interval = 64;  ///< a call may issue two operations
  static constexpr std::size_t most_marks = 3;

  std::shared_ptr<CudaState> state_;
  int since_mark_ = 0;
  std::deque<cudaEvent_t> marks_;  ///< every `interval` operations, oldest first
};

}  // namespace tranche::cuda
