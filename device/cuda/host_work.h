#pragma once
/// The host side of a stream: work that runs in stream order.

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "device/cuda/cuda_driver.h"
#include "device/cuda/cuda_memory.h"
#include "device/cuda/cuda_state.h"

namespace tranche {
class TraceRecorder;
}

namespace tranche::cuda {

/// The runtime may run the host functions of all streams of a process on one thread, so one that waits for a
/// peer would hold up that peer's. Therefore a host function here only tells the stream's own thread that the
/// stream has come this far, and the stream waits for a word of pinned memory which that thread writes when
/// the work is done. Where the driver cannot let streams wait for memory, the host function runs the work
/// itself.
class HostWork {
 public:
  struct Task {
    std::function<void()> work;
    std::string name;
    TraceRecorder* trace = nullptr;
    HostDependencies needs;  ///< skipped when one of these has failed
  };

  /// `driver.stream_wait_value` may be null. `pinned` gives the word.
  HostWork(std::shared_ptr<CudaState> state, PinnedMemory& pinned, const DriverFunctions& driver,
           std::shared_ptr<const std::string> stream);
  /// The stream has been synchronized (or has failed): joins the thread; what never ran is dropped.
  ~HostWork();
  HostWork(const HostWork&) = delete;
  HostWork& operator=(const HostWork&) = delete;

  /// Gives work to the stream; its failure is kept and skips later work.
  void issue(cudaStream_t stream, Task task);
  /// Waits in stream order for an event that the host completes.
  void issue_wait(cudaStream_t stream, const Event& event);
  /// Keeps a failure that is known when it is met, as if work issued now had failed.
  void fail(std::exception_ptr error) noexcept;
  /// From now on a wait for an event that does not pass within a second fails, so that tearing down cannot
  /// hang.
  void stop_waiting() noexcept;
  const std::shared_ptr<HostOutcome>& outcome() const noexcept { return outcome_; }

 private:
  struct Impl;
  std::shared_ptr<HostOutcome> outcome_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tranche::cuda
