#pragma once
/// Limits how far a thread may issue ahead of a stream.

#include <cuda_runtime_api.h>

#include <deque>
#include <memory>

#include "device/cuda/cuda_state.h"

namespace tranche::cuda {

/// A GPU's queue holds about a thousand operations. The call that finds it full blocks inside the driver,
/// where it may delay calls of other threads, for example those of a rank of this process for which the full
/// queue's stream waits. So the issuing thread waits earlier, outside the driver's locks. One object per
/// stream, used by its issuing thread.
class LaunchBound {
 public:
  /// The most operations that a stream has pending.
  static constexpr int most_pending = 512;

  explicit LaunchBound(std::shared_ptr<CudaState> state) : state_(std::move(state)) {}
  ~LaunchBound();
  LaunchBound(const LaunchBound&) = delete;
  LaunchBound& operator=(const LaunchBound&) = delete;

  /// Call it before an operation is issued. It may wait for the stream; the device's counters do not count
  /// this as a host wait (nor do they count the driver's own waits).
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
