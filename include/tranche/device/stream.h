#pragma once
/// Streams: ordered queues of work on a device.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <typeindex>
#include <typeinfo>
#include <utility>
#include <vector>

#include "tranche/device/event.h"

namespace tranche {

class TraceRecorder;

namespace detail {
class WorkRecorder;
}  // namespace detail

enum class DeviceKind : std::uint8_t { cpu, cuda, meta };
std::string_view name_of(DeviceKind kind);

/// Work issued to a stream since its creation. The kernels' cost functions (kernels/meta) count it, so it is
/// the same on every device kind.
struct WorkCount {
  std::int64_t kernels = 0;
  double floating_point_operations = 0;
  double bytes_read = 0;
  double bytes_written = 0;
  friend bool operator==(const WorkCount&, const WorkCount&) = default;
};

/// Not copyable, not movable; owned by the caller that created it through Device. Calls come from one thread
/// at a time (the issuing thread); the work may run elsewhere.
class Stream {
 public:
  Stream() = default;
  virtual ~Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  virtual DeviceKind kind() const = 0;
  virtual const std::string& name() const = 0;
  /// Host threads a kernel on this stream may use (cpu); 1 elsewhere.
  virtual int threads() const = 0;
  /// Runs `work` on the host after everything issued before. cpu: inline for the compute stream, on the
  /// stream's own thread otherwise; meta: dropped; cuda: a host function in stream order (it may block, and
  /// must neither call CUDA nor access device memory; kernels launch on native_handle() instead). `name`
  /// labels the span in a trace. A failure is reported at the next wait on a later event, and later work of
  /// the stream is skipped; an inline stream throws it directly.
  virtual void enqueue(std::string_view name, std::function<void()> work) = 0;
  /// Later work on this stream starts after `event`. On an inline stream this blocks the caller, and
  /// rethrows the event's failure.
  virtual void wait(const Event& event) = 0;
  /// The point after everything issued so far.
  virtual Event record() = 0;
  /// Blocks the host until everything issued so far is done; rethrows its failure.
  virtual void synchronize() = 0;
  /// The cudaStream_t on cuda; nullptr elsewhere.
  virtual void* native_handle() const { return nullptr; }

  /// Adds one kernel's cost to the stream's count. Called by kernels' dispatchers.
  void count(double operations, double bytes_read, double bytes_written) {
    ++work_.kernels;
    work_.floating_point_operations += operations;
    work_.bytes_read += bytes_read;
    work_.bytes_written += bytes_written;
  }
  /// Adds the cost of several kernels at once (a replayed graph).
  void count(const WorkCount& work) {
    work_.kernels += work.kernels;
    work_.floating_point_operations += work.floating_point_operations;
    work_.bytes_read += work.bytes_read;
    work_.bytes_written += work.bytes_written;
  }
  const WorkCount& work() const noexcept { return work_; }
  /// State that a library keeps between calls on one stream (a handle and the algorithms it chose): the
  /// stream's only T, default-constructed at the first call and destroyed with the stream. Each source that
  /// uses it has its own type. For the issuing thread.
  template <class T>
  T& attachment() {
    for (const auto& [type, object] : attachments_) {
      if (type == std::type_index(typeid(T))) return *static_cast<T*>(object.get());
    }
    auto made = std::make_shared<T>();
    attachments_.emplace_back(typeid(T), made);
    return *made;
  }
  /// Sets the recorder for spans of enqueued work (not owned; may be nullptr). On cuda, spans of device work
  /// are known only afterwards; synchronize() records them.
  void set_trace(TraceRecorder* trace) { trace_ = trace; }
  bool tracing() const noexcept { return trace_ != nullptr; }
  /// Records the stream's work beside executing it (on meta: instead) as row `lane` of the recorder's graph,
  /// one row per stream; not owned, nullptr for none.
  void set_recorder(detail::WorkRecorder* recorder, int lane) {
    recorder_ = recorder;
    lane_ = lane;
  }
  detail::WorkRecorder* recorder() const noexcept { return recorder_; }
  int lane() const noexcept { return lane_; }
  /// True when spans are recorded, by the trace or by a profiler of the device.
  bool spans_wanted() const noexcept { return trace_ != nullptr || profiled_; }
  /// Begin and end a span for work that goes to the stream without enqueue (kernels); use StreamSpan. No-ops
  /// where spans are not wanted, and on devices whose kernels run inside enqueue.
  virtual void begin_span(std::string_view) {}
  virtual void end_span() noexcept {}

 protected:
  TraceRecorder* trace() const noexcept { return trace_; }
  /// Called once by streams whose begin_span() also serves a profiler.
  void set_profiled(bool profiled) noexcept { profiled_ = profiled; }

 private:
  WorkCount work_;
  std::vector<std::pair<std::type_index, std::shared_ptr<void>>> attachments_;
  TraceRecorder* trace_ = nullptr;
  bool profiled_ = false;
  detail::WorkRecorder* recorder_ = nullptr;
  int lane_ = 0;
};

/// A span of the trace, and a range of the device's profiler, around the work issued to the stream in this
/// scope. Costs one test when neither is active.
class StreamSpan {
 public:
  StreamSpan(Stream& stream, std::string_view name) : stream_(stream.spans_wanted() ? &stream : nullptr) {
    if (stream_ != nullptr) stream_->begin_span(name);
  }
  ~StreamSpan() {
    if (stream_ != nullptr) stream_->end_span();
  }
  StreamSpan(const StreamSpan&) = delete;
  StreamSpan& operator=(const StreamSpan&) = delete;

 private:
  Stream* stream_;
};

}  // namespace tranche
