#include "device/cuda/cuda_state.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "core/clock.h"
#include "device/cuda/cuda_advice.h"
#include "tranche/core/error.h"

namespace tranche::cuda {

using detail::seconds_now;

namespace {

constexpr unsigned timed_flags = cudaEventBlockingSync;
constexpr unsigned plain_flags = cudaEventBlockingSync | cudaEventDisableTiming;
// Offsets from the base are 32-bit floats in milliseconds: up to 10 s from it, their resolution is about a
// microsecond.
constexpr double clock_lifetime = 10.0;

// True for an error after which the context is unusable; the call that reports it is seldom the cause.
bool is_sticky(cudaError_t error) {
  switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
      return true;
    default:
      return false;
  }
}

/// The number of live states, one for each rank of this process. An error can spoil the process's context,
/// which all of them share.
std::atomic<int>& ranks_of_process() {
  static std::atomic<int> ranks{0};
  return ranks;
}

}  // namespace

std::string text_of_loss(cudaError_t error) {
  if (!is_sticky(error)) return {};
  std::string text = "; work issued before has failed, and the process can not use the GPU any more";
  if (const int ranks = ranks_of_process().load(std::memory_order_relaxed); ranks > 1) {
    text +=
        ", nor can any of the " + std::to_string(ranks) +
        " ranks that are threads of it: the work may be another rank's than the one that met the error, so "
        "look at what each of them says";
  }
  return text + ": run once more with CUDA_LAUNCH_BLOCKING=1 in the environment to see which";
}

std::string error_text(cudaError_t error, const char* call, std::string_view purpose) {
  std::string text = std::string(call) + " failed";
  if (!purpose.empty()) text += " (" + std::string(purpose) + ")";
  text += std::string(": ") + cudaGetErrorName(error) + ", " + cudaGetErrorString(error);
  return text + advice_of(error) + text_of_loss(error);
}

void check(cudaError_t error, const char* call, std::string_view purpose) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // a failed call leaves it behind, and a later check would report it again
  const std::string text = error_text(error, call, purpose);
  if (error == cudaErrorMemoryAllocation) {
    throw OutOfMemory(text + "; use a smaller micro-batch, a higher stage or more ranks");
  }
  throw DeviceError(text);
}

CudaState::CudaState(int gpu) : gpu_(gpu) {
  make_current();
  check(cudaFree(nullptr), "cudaFree", "creating the context of the GPU");
  ranks_of_process().fetch_add(1, std::memory_order_relaxed);
}

CudaState::~CudaState() {
  ranks_of_process().fetch_sub(1, std::memory_order_relaxed);
  make_current_quietly();
  for (const cudaEvent_t event : timed_) cudaEventDestroy(event);
  for (const cudaEvent_t event : plain_) cudaEventDestroy(event);
  if (base_ != nullptr) cudaEventDestroy(base_);
}

cudaEvent_t CudaState::take_event(bool timed) {
  {
    std::lock_guard lock(mutex_);
    auto& pool = timed ? timed_ : plain_;
    if (!pool.empty()) {
      const cudaEvent_t event = pool.back();
      pool.pop_back();
      return event;
    }
  }
  make_current();
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, timed ? timed_flags : plain_flags), "cudaEventCreateWithFlags");
  return event;
}

void CudaState::give_event(cudaEvent_t event, bool timed) noexcept {
  if (event == nullptr) return;
  try {
    std::lock_guard lock(mutex_);
    (timed ? timed_ : plain_).push_back(event);
  } catch (...) {
    cudaEventDestroy(event);
  }
}

void CudaState::wait_for(cudaStream_t stream, std::string_view purpose) {
  const RelaxedCapture relaxed(*this);
  cudaEvent_t event = nullptr;
  try {
    event = take_event(false);
  } catch (const Error&) {  // a failed device may have none; the stream reports its outcome
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize", purpose);
    return;
  }
  const char* call = "cudaEventRecord";
  cudaError_t error = cudaEventRecord(event, stream);
  if (error == cudaSuccess) {
    call = "cudaEventSynchronize";
    error = cudaEventSynchronize(event);
  }
  give_event(event, false);
  check(error, call, purpose);
}

void CudaState::wait_quietly(cudaStream_t stream) noexcept {
  try {
    wait_for(stream, {});
  } catch (...) {
    (void)cudaStreamSynchronize(stream);  // no event could be recorded, or the device has failed
  }
}

void CudaState::renew_clock(cudaStream_t stream) {
  if (seconds_now() - renewed_.load(std::memory_order_relaxed) < clock_lifetime) return;
  std::lock_guard lock(clock_mutex_);
  make_current();
  // The shortest of a few round trips relates the event to the host's clock best.
  constexpr int tries = 4;
  double shortest = 1e9;
  cudaEvent_t best = nullptr;
  double best_seconds = 0;
  for (int i = 0; i < tries; ++i) {
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDefault), "cudaEventCreateWithFlags", "the clock's base");
    const double begin = seconds_now();
    cudaError_t error = cudaEventRecord(event, stream);
    if (error == cudaSuccess) error = cudaEventSynchronize(event);
    const double end = seconds_now();
    if (error != cudaSuccess || end - begin >= shortest) {
      cudaEventDestroy(event);
      check(error, "cudaEventSynchronize", "the clock's base");
      continue;
    }
    if (best != nullptr) cudaEventDestroy(best);
    best = event;
    best_seconds = begin + (end - begin) / 2;
    shortest = end - begin;
  }
  if (base_ != nullptr) cudaEventDestroy(base_);
  base_ = best;
  base_seconds_ = best_seconds;
  renewed_.store(best_seconds, std::memory_order_relaxed);
}

double CudaState::time_of(cudaEvent_t event) {
  std::lock_guard lock(clock_mutex_);
  make_current_quietly();
  float milliseconds = 0;
  if (base_ == nullptr || cudaEventElapsedTime(&milliseconds, base_, event) != cudaSuccess) {
    cudaGetLastError();
    return std::numeric_limits<double>::quiet_NaN();
  }
  return base_seconds_ + static_cast<double>(milliseconds) / 1e3;
}

bool CudaEventState::query() {
  if (known_passed()) return true;
  state_->make_current_quietly();  // otherwise a new thread would create the first GPU's context
  const RelaxedCapture relaxed(*state_);
  const cudaError_t error = cudaEventQuery(event_);
  if (error == cudaErrorNotReady) {
    cudaGetLastError();  // cudaGetLastError() would return "not ready" as an error
    return false;
  }
  if (error == cudaSuccess) passed_.store(true, std::memory_order_release);
  return true;  // a failed event counts as passed; wait() throws its failure
}

bool CudaEventState::wait(double seconds) {
  const RelaxedCapture relaxed(*state_);
  if (!query()) {
    state_->count_host_wait();
    state_->make_current_quietly();
    if (seconds < 0) {
      check(cudaEventSynchronize(event_), "cudaEventSynchronize", purpose());
    } else {
      constexpr int eager_tries = 64;
      constexpr std::chrono::microseconds longest_pause{100};
      std::chrono::microseconds pause{1};
      const double limit = seconds_now() + seconds;
      for (int tries = 0; !query(); ++tries) {
        const double left = limit - seconds_now();
        if (left <= 0) return false;
        if (tries < eager_tries) {
          std::this_thread::yield();
          continue;
        }
        std::this_thread::sleep_for(std::min<std::chrono::duration<double>>(
            std::chrono::duration<double>(pause), std::chrono::duration<double>(left)));
        pause = std::min(pause * 2, longest_pause);
      }
    }
  }
  if (!known_passed()) check(cudaEventQuery(event_), "cudaEventQuery", purpose());
  passed_.store(true, std::memory_order_release);
  if (const std::exception_ptr error = needs_.failure()) std::rethrow_exception(error);
  return true;
}

double CudaEventState::passed_at() {
  if (!query() || !known_passed()) return std::numeric_limits<double>::quiet_NaN();
  return state_->time_of(event_);
}

}  // namespace tranche::cuda
