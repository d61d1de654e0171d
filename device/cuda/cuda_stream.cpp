#include "device/cuda/cuda_stream.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "device/cuda/nvtx_ranges.h"
#include "tranche/core/trace.h"

namespace tranche::cuda {
namespace {

// The most spans whose events are outstanding: a tracing run that seldom synchronizes must not accumulate
// events.
constexpr std::size_t most_spans = 4096;

cudaStream_t make_stream(const CudaState& state, CudaStream::Priority priority) {
  state.make_current();
  int least = 0;
  int greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking,
                                     priority == CudaStream::Priority::high ? greatest : least),
        "cudaStreamCreateWithPriority");
  return stream;
}

}  // namespace

CudaStream::CudaStream(StreamParts parts, std::string name, Priority priority)
    : CudaStream(parts, std::move(name), make_stream(*parts.state, priority)) {
  owned_ = true;
}

CudaStream::CudaStream(StreamParts parts, std::string name, cudaStream_t foreign)
    : parts_(std::move(parts)),
      name_(std::make_shared<const std::string>(std::move(name))),
      stream_(foreign),
      owned_(false),
      host_(parts_.state, *parts_.pinned, parts_.driver, name_),
      bound_(parts_.state),
      staging_(*parts_.staging, *name_) {
  set_profiled(nvtx::attached());
}

CudaStream::~CudaStream() {
  parts_.state->make_current_quietly();
  host_.stop_waiting();
  parts_.state->wait_quietly(stream_);
  for (const Span& span : open_spans_) parts_.state->give_event(span.begin);
  drain_spans(true);
  if (owned_) cudaStreamDestroy(stream_);
}

void CudaStream::refuse_in_capture(const char* what) const {
  if (!capturing_) return;
  throw CaptureRefused("stream '" + *name_ + "' was asked, while its work was captured for replay, to " +
                       what + ", which a graph cannot hold");
}

cudaStream_t CudaStream::native() const {
  parts_.state->make_current_quietly();  // the next call reports the failure with its purpose
  if (owned_ && !capturing_) bound_.before_operation(stream_);
  return stream_;
}

void* CudaStream::native_handle() const {
  return native();
}

void CudaStream::enqueue(std::string_view name, std::function<void()> work) {
  if (!work)
    throw InvalidArgument("stream '" + *name_ + "' was given empty work '" + std::string(name) + "'");
  refuse_in_capture("run work on the host");
  needs_.forget_settled();
  host_.issue(native(), {std::move(work), std::string(name), trace(), needs_});
}

void CudaStream::wait(const Event& event) {
  if (!event.state()) return;
  refuse_in_capture("wait for an event");
  std::shared_ptr<EventState> state = event.state();
  while (auto own = state->underlying()) state = std::move(own);
  if (const auto* recorded = dynamic_cast<const CudaEventState*>(state.get())) {
    needs_.forget_settled();
    needs_.add(recorded->needs());
    if (recorded->known_passed()) return;
    check(cudaStreamWaitEvent(native(), recorded->native(), 0), "cudaStreamWaitEvent",
          "stream '" + *name_ + "'");
    return;
  }
  if (!event.query()) {
    host_.issue_wait(native(), event);
    return;
  }
  try {
    event.wait();
  } catch (...) {
    host_.fail(std::current_exception());
  }
}

Event CudaStream::record() {
  refuse_in_capture("record an event");
  needs_.forget_settled();
  HostDependencies needs = needs_;
  if (const std::int64_t last = host_.outcome()->issued(); last > 0) needs.add(host_.outcome(), last);
  const cudaEvent_t event = parts_.state->take_event();
  auto state = std::make_shared<CudaEventState>(parts_.state, event, name_, std::move(needs));
  check(cudaEventRecord(event, native()), "cudaEventRecord", "stream '" + *name_ + "'");
  return Event(std::move(state));
}

void CudaStream::synchronize() {
  refuse_in_capture("synchronize");
  const RelaxedCapture relaxed(*parts_.state);  // another stream of this thread may be captured
  parts_.state->count_host_wait();
  parts_.state->wait_for(native(), "stream '" + *name_ + "'");
  staging_.deliver();
  drain_spans(true);
  parts_.state->renew_clock(stream_);
  std::exception_ptr error = host_.outcome()->failure_by(std::numeric_limits<std::int64_t>::max() - 1);
  if (!error) error = needs_.failure();
  if (error) std::rethrow_exception(error);
  needs_.forget_settled();
}

void CudaStream::copy_by_registration(void* to, const void* from, const void* pinned, std::int64_t bytes,
                                      cudaMemcpyKind kind) {
  const cudaStream_t stream = native();
  // One call must not cross the border of two registrations.
  for (std::int64_t done = 0; done < bytes;) {
    const std::int64_t left =
        parts_.pinned->bytes_in_registration(static_cast<const std::byte*>(pinned) + done);
    if (left <= 0) {
      throw InvalidArgument("a copy of " + std::to_string(bytes) + " B on stream '" + *name_ +
                            "' begins in pinned memory and runs over its end");
    }
    const std::int64_t piece = std::min(left, bytes - done);
    check(cudaMemcpyAsync(static_cast<std::byte*>(to) + done, static_cast<const std::byte*>(from) + done,
                          static_cast<std::size_t>(piece), kind, stream),
          "cudaMemcpyAsync", *name_);
    done += piece;
  }
}

void CudaStream::copy_to_host(void* host, const void* device, std::int64_t bytes) {
  const StreamSpan span(*this, "copy to host");
  if (parts_.pinned->bytes_in_registration(host) > 0) {
    copy_by_registration(host, device, host, bytes, cudaMemcpyDeviceToHost);
  } else {
    refuse_in_capture("copy to memory that is not pinned");
    staging_.to_host(native(), host, device, bytes);
  }
}

void CudaStream::copy_from_host(void* device, const void* host, std::int64_t bytes) {
  const StreamSpan span(*this, "copy from host");
  if (parts_.pinned->bytes_in_registration(host) > 0) {
    copy_by_registration(device, host, host, bytes, cudaMemcpyHostToDevice);
  } else {
    refuse_in_capture("copy from memory that is not pinned");
    staging_.from_host(native(), device, host, bytes);
  }
}

void CudaStream::fill(void* device, unsigned char value, std::int64_t bytes) {
  const StreamSpan span(*this, "fill bytes");
  check(cudaMemsetAsync(device, value, static_cast<std::size_t>(bytes), native()), "cudaMemsetAsync",
        "stream '" + *name_ + "'");
}

void CudaStream::begin_capture() {
  check(cudaStreamBeginCapture(native(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture",
        "stream '" + *name_ + "'");
  capturing_ = true;
  parts_.state->count_capture(1);
}

cudaGraph_t CudaStream::end_capture() {
  cudaGraph_t graph = nullptr;
  // With the flag set, native() does not wait for the stream's earlier work, which would invalidate the
  // capture.
  const cudaError_t error = cudaStreamEndCapture(native(), &graph);
  capturing_ = false;
  parts_.state->count_capture(-1);
  check(error, "cudaStreamEndCapture", "stream '" + *name_ + "'");
  return graph;
}

void CudaStream::begin_span(std::string_view name) {
  begin_traced_span(name);  // may throw, and then no end_span() follows
  nvtx::push(name);
}

void CudaStream::end_span() noexcept {
  nvtx::pop();
  end_traced_span();
}

void CudaStream::begin_traced_span(std::string_view name) {
  if (!tracing() || capturing_) return;
  if (spans_.size() >= most_spans) drain_spans(false);
  Span span{std::string(name), nullptr, nullptr};
  if (spans_.size() + open_spans_.size() < most_spans) {
    span.begin = parts_.state->take_event();
    open_spans_.push_back(span);
    check(cudaEventRecord(span.begin, native()), "cudaEventRecord", name);
  } else {
    open_spans_.push_back(span);  // too many spans are outstanding: this one is left out
  }
}

void CudaStream::end_traced_span() noexcept {
  if (open_spans_.empty() || capturing_) return;
  Span span = std::move(open_spans_.back());
  open_spans_.pop_back();
  if (span.begin == nullptr) return;
  try {
    span.end = parts_.state->take_event();
    check(cudaEventRecord(span.end, native()), "cudaEventRecord", span.name);
    spans_.push_back(span);
  } catch (...) {  // the failure itself is reported at the next wait
    parts_.state->give_event(span.begin);
    parts_.state->give_event(span.end);
  }
}

// Passes finished spans to the trace; with `all` the stream is idle, or unfinished spans are dropped.
void CudaStream::drain_spans(bool all) noexcept {
  const RelaxedCapture relaxed(*parts_.state);
  while (!spans_.empty()) {
    const Span& span = spans_.front();
    const bool finished = cudaEventQuery(span.end) == cudaSuccess;
    if (!finished) {
      cudaGetLastError();
      if (!all) return;
    }
    try {
      if (finished && tracing())
        trace()->span(*name_, span.name, parts_.state->time_of(span.begin), parts_.state->time_of(span.end));
    } catch (...) {  // a lost line of a trace is no reason to fail
    }
    parts_.state->give_event(span.begin);
    parts_.state->give_event(span.end);
    spans_.pop_front();
  }
}

}  // namespace tranche::cuda
