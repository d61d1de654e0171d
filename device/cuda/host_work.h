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

/// Runs host work in stream order. The runtime may run the host functions of all streams of a process on one
/// thread, so a function that waits for a peer would block that peer's. Therefore a host function here only
/// notifies the stream's own thread that the stream has reached this point; the stream then waits for a word
/// in pinned memory, which that thread writes when the work is done. Where the driver cannot let streams wait
/// for memory, the host function runs the work itself.
///
///     queued --the stream reaches it--> reached --the stream's thread--> running --> done: word written
class HostWork {
 public:
  struct Task {
    std::function<void()> work;
    std::string name;
    TraceRecorder* trace = nullptr;
    HostDependencies needs;  ///< the task is skipped when one of these has failed
  };

  /// `driver.stream_wait_value` may be null. `pinned` provides the word.
  HostWork(std::shared_ptr<CudaState> state, PinnedMemory& pinned, const DriverFunctions& driver,
           std::shared_ptr<const std::string> stream);
  /// The stream has been synchronized (or has failed): joins the thread; tasks that never ran are dropped.
  ~HostWork();
  HostWork(const HostWork&) = delete;
  HostWork& operator=(const HostWork&) = delete;

  /// Issues a task; its failure is kept and later tasks are skipped.
  void issue(cudaStream_t stream, Task task);
  /// Waits in stream order for an event that the host completes.
  void issue_wait(cudaStream_t stream, const Event& event);
  /// Records a failure that the host already knows, as if a task issued now had failed.
  void fail(std::exception_ptr error) noexcept;
  /// Makes a wait fail if its event does not pass within a second, so that shutdown cannot hang.
  void stop_waiting() noexcept;
  const std::shared_ptr<HostOutcome>& outcome() const noexcept { return outcome_; }

 private:
  struct Impl;
  std::shared_ptr<HostOutcome> outcome_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tranche::cuda
