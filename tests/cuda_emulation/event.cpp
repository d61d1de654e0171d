// Events. Each record creates a new point, to which later waits and queries refer.
#include <fmt/format.h>

#include <chrono>

#include "tests/cuda_emulation/state.h"

using cuda_emulation::Capture;
using cuda_emulation::Point;

struct CUevent_st {
  int device = 0;
  unsigned flags = 0;
  std::mutex mutex;
  std::shared_ptr<Point> point;      // null before the first record
  std::shared_ptr<Capture> capture;  // capture of the stream in which it was last recorded
  cudaStream_t captured_in = nullptr;
};

namespace cuda_emulation {

void set_capture(cudaStream_t stream, std::shared_ptr<Capture> capture);

void Point::pass() {
  {
    std::lock_guard lock(mutex);
    when = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch())
               .count();
    passed.store(true, std::memory_order_release);
  }
  changed.notify_all();
}

void Point::wait() {
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return passed.load(std::memory_order_relaxed); });
}

namespace {

struct Events {
  std::mutex mutex;
  std::set<cudaEvent_t> live;
};

Events& events() {
  static Events& instance = *new Events;
  return instance;
}

bool is_live(cudaEvent_t event) {
  std::lock_guard lock(events().mutex);
  return events().live.count(event) > 0;
}

cudaError_t not_an_event(const char* name, cudaEvent_t event) {
  return misuse(cudaErrorInvalidResourceHandle,
                fmt::format("{}: {} is no live event", name, fmt::ptr(event)));
}

}  // namespace
}  // namespace cuda_emulation

using namespace cuda_emulation;

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return call("cudaEventCreateWithFlags", [&] {
    constexpr unsigned known = cudaEventBlockingSync | cudaEventDisableTiming | cudaEventInterprocess;
    if (event == nullptr || (flags & ~known) != 0) return cudaErrorInvalidValue;
    auto* made = new CUevent_st;
    made->device = current_device();
    made->flags = flags;
    std::lock_guard lock(events().mutex);
    events().live.insert(made);
    *event = made;
    return cudaSuccess;
  });
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return call(
      "cudaEventDestroy",
      [&] {
        {
          std::lock_guard lock(events().mutex);
          if (events().live.erase(event) > 0) {
            delete event;
            return cudaSuccess;
          }
        }
        return not_an_event("cudaEventDestroy", event);
      },
      Sticky::ignored);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return call("cudaEventRecord", [&] {
    if (!is_live(event)) return not_an_event("cudaEventRecord", event);
    const int device = device_of(stream);
    if (device >= 0 && device != event->device) {
      return misuse(cudaErrorInvalidResourceHandle, "cudaEventRecord: the event is another device's");
    }
    auto capture = capture_of(stream);
    if (capture) {
      if (capture->invalid) return cudaErrorStreamCaptureInvalidated;
      std::lock_guard lock(event->mutex);
      event->capture = std::move(capture);
      event->captured_in = stream;
      return cudaSuccess;
    }
    auto point = std::make_shared<Point>();
    const cudaError_t error = submit(stream, {[point] { point->pass(); }, false, true});
    if (error != cudaSuccess) return error;
    std::lock_guard lock(event->mutex);
    event->point = std::move(point);
    event->capture = nullptr;
    return cudaSuccess;
  });
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return call("cudaStreamWaitEvent", [&] {
    if (!is_live(event)) return not_an_event("cudaStreamWaitEvent", event);
    std::shared_ptr<Point> point;
    std::shared_ptr<Capture> captured;
    cudaStream_t captured_in = nullptr;
    {
      std::lock_guard lock(event->mutex);
      point = event->point;
      captured = event->capture;
      captured_in = event->captured_in;
    }
    const auto capture = capture_of(stream);
    if (captured) {
      if (capture && capture != captured) {
        return misuse(cudaErrorStreamCaptureMerge, "cudaStreamWaitEvent: two captures would become one");
      }
      if (!capture) {  // the stream joins the capture
        {
          std::lock_guard lock(capture_mutex());
          captured->streams.insert(stream);
          captured->unjoined.insert(stream);
        }
        set_capture(stream, captured);
      }
      if (stream == captured->origin) {
        std::lock_guard lock(capture_mutex());
        captured->unjoined.erase(captured_in);
      }
      return cudaSuccess;
    }
    if (!point) return cudaSuccess;  // the event was never recorded
    if (capture) {
      std::lock_guard lock(capture_mutex());
      capture->invalid = true;
      return misuse(cudaErrorStreamCaptureIsolation,
                    "cudaStreamWaitEvent: a captured stream waits for an event from outside of the capture");
    }
    return submit(stream, {[point] { point->wait(); }, false, point->passed.load()});
  });
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return call("cudaEventQuery", [&] {
    if (!is_live(event)) return not_an_event("cudaEventQuery", event);
    std::shared_ptr<Point> point;
    {
      std::lock_guard lock(event->mutex);
      if (event->capture) return cudaErrorCapturedEvent;
      point = event->point;
    }
    if (const cudaError_t refused = refuse_under_capture("cudaEventQuery"); refused != cudaSuccess)
      return refused;
    if (point && !point->passed.load(std::memory_order_acquire)) return cudaErrorNotReady;
    return sticky_error(event->device);
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return call("cudaEventSynchronize", [&] {
    if (!is_live(event)) return not_an_event("cudaEventSynchronize", event);
    count_host_wait();
    if ((event->flags & cudaEventBlockingSync) == 0) count_spinning_wait();
    std::shared_ptr<Point> point;
    {
      std::lock_guard lock(event->mutex);
      if (event->capture) return cudaErrorCapturedEvent;
      point = event->point;
    }
    if (const cudaError_t refused = refuse_under_capture("cudaEventSynchronize"); refused != cudaSuccess) {
      return refused;
    }
    if (point) point->wait();
    return sticky_error(event->device);
  });
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  return call("cudaEventElapsedTime", [&] {
    if (!is_live(begin)) return not_an_event("cudaEventElapsedTime", begin);
    if (!is_live(end)) return not_an_event("cudaEventElapsedTime", end);
    std::shared_ptr<Point> first, last;
    for (auto [event, point] : {std::pair(begin, &first), std::pair(end, &last)}) {
      std::lock_guard lock(event->mutex);
      if ((event->flags & cudaEventDisableTiming) != 0 || !event->point)
        return cudaErrorInvalidResourceHandle;
      *point = event->point;
    }
    if (!first->passed || !last->passed) return cudaErrorNotReady;
    *milliseconds = static_cast<float>(last->when - first->when);
    return cudaSuccess;
  });
}
