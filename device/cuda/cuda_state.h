#pragma once
/// The state that the parts of one cuda device share: which GPU, pooled events, their clock, and counters.

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "device/cuda/host_outcome.h"
#include "tranche/device/device.h"
#include "tranche/device/event.h"

namespace tranche::cuda {

/// Throws the exception that a failed runtime call corresponds to: OutOfMemory where memory ran out, else
/// DeviceError with the call, its purpose, and the error's name and text.
void check(cudaError_t error, const char* call, std::string_view purpose = {});
/// The text of that exception.
std::string error_text(cudaError_t error, const char* call, std::string_view purpose);
/// The text for an error after which the process cannot use the GPU any more; it names the ranks that share
/// the process. Empty for other errors.
std::string text_of_loss(cudaError_t error);

class CudaState : public std::enable_shared_from_this<CudaState> {
 public:
  /// Makes `gpu`, the runtime's index, current, which creates its context.
  explicit CudaState(int gpu);
  ~CudaState();
  CudaState(const CudaState&) = delete;
  CudaState& operator=(const CudaState&) = delete;

  int gpu() const noexcept { return gpu_; }
  /// Makes the GPU current for the calling thread. Call it before every runtime call that depends on it,
  /// because the runtime keeps the current device per thread, and a rank has several threads.
  void make_current() const { check(cudaSetDevice(gpu_), "cudaSetDevice"); }
  /// The same for functions that must not throw.
  void make_current_quietly() const noexcept { (void)cudaSetDevice(gpu_); }

  /// Returns an event from the pool, or a new one. Timed events record when they were passed.
  cudaEvent_t take_event(bool timed = true);
  void give_event(cudaEvent_t event, bool timed = true) noexcept;

  /// The time in seconds_now() when a timed event was passed. It is within some 10 us of the host's clock;
  /// events are in the right order among themselves.
  double time_of(cudaEvent_t event);
  /// Moves the clock's base, an event. Times are 32-bit offsets from it and lose precision, so the base is
  /// renewed now and then. The stream is idle. Also called at creation.
  void renew_clock(cudaStream_t stream);

  /// Counts the streams of this device that are being captured. Meanwhile the runtime refuses queries by the
  /// capturing thread, unless it asks for a relaxed mode (RelaxedCapture).
  void count_capture(int change) noexcept { captures_.fetch_add(change, std::memory_order_relaxed); }
  bool capturing() const noexcept { return captures_.load(std::memory_order_relaxed) > 0; }

  /// Waits until the stream is idle; throws a failure with `purpose`. The thread sleeps:
  /// cudaStreamSynchronize polls by default, which would occupy a core for the length of a step, and host
  /// optimizers need the cores. A blocking event does not depend on the context's flags, which belong to the
  /// program when it has its own CUDA work.
  void wait_for(cudaStream_t stream, std::string_view purpose);
  /// The same at the end of a stream's life, when creating an event may fail.
  void wait_quietly(cudaStream_t stream) noexcept;

  void count_host_wait() noexcept { host_waits_.fetch_add(1, std::memory_order_relaxed); }
  void count_replay() noexcept { replays_.fetch_add(1, std::memory_order_relaxed); }
  /// Counts pinned memory that the device's own parts allocate and free.
  void count_staging(std::int64_t bytes) noexcept { staging_.fetch_add(bytes, std::memory_order_relaxed); }
  std::int64_t staging_bytes() const noexcept { return staging_.load(); }
  DeviceCounters counters() const noexcept { return {host_waits_.load(), replays_.load()}; }

 private:
  int gpu_;
  std::mutex mutex_;
  std::vector<cudaEvent_t> timed_;
  std::vector<cudaEvent_t> plain_;
  std::mutex clock_mutex_;
  cudaEvent_t base_ = nullptr;
  double base_seconds_ = 0;
  std::atomic<double> renewed_{-1e9};
  std::atomic<std::int64_t> host_waits_{0};
  std::atomic<std::int64_t> replays_{0};
  std::atomic<std::int64_t> staging_{0};
  std::atomic<int> captures_{0};
};

/// While an object exists, queries of events recorded outside a capture do not invalidate it.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const CudaState& state) : active_(state.capturing()) {
    if (active_) (void)cudaThreadExchangeStreamCaptureMode(&mode_);
  }
  ~RelaxedCapture() {
    if (active_) (void)cudaThreadExchangeStreamCaptureMode(&mode_);
  }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  bool active_;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

/// A recorded point of a stream.
class CudaEventState : public EventState {
 public:
  /// Owns a recorded, timed event of the state's pool and returns it at destruction.
  CudaEventState(std::shared_ptr<CudaState> state, cudaEvent_t event,
                 std::shared_ptr<const std::string> stream, HostDependencies needs)
      : state_(std::move(state)), event_(event), stream_(std::move(stream)), needs_(std::move(needs)) {}
  ~CudaEventState() override { state_->give_event(event_); }
  CudaEventState(const CudaEventState&) = delete;
  CudaEventState& operator=(const CudaEventState&) = delete;

  bool query() override;
  bool wait(double seconds) override;
  double passed_at() override;
  /// True when the event is known to be passed, without a runtime call.
  bool known_passed() const noexcept { return passed_.load(std::memory_order_acquire); }
  cudaEvent_t native() const noexcept { return event_; }
  const HostDependencies& needs() const noexcept { return needs_; }

 private:
  std::string purpose() const { return "an event of stream '" + *stream_ + "'"; }
  std::shared_ptr<CudaState> state_;
  cudaEvent_t event_;
  std::shared_ptr<const std::string> stream_;
  HostDependencies needs_;
  std::atomic<bool> passed_{false};
};

}  // namespace tranche::cuda
