#include "offload/host_link.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>

#include "core/clock.h"
#include "tranche/core/error.h"

namespace tranche::detail {
namespace {

// The scheduler ends sleeps late. Later copies may be early by at most this much to compensate, so that the
// average speed is right, but a long stall of the machine is not made up.
constexpr double most_made_up = 0.05;  // seconds
// The most pairs of events whose copies have not been measured yet.
constexpr std::size_t most_pairs = 1024;

std::chrono::steady_clock::time_point at(double seconds) {
  return std::chrono::steady_clock::time_point(
      std::chrono::duration_cast<std::chrono::steady_clock::duration>(
          std::chrono::duration<double>(seconds)));
}

double checked_speed(double bytes_per_second, const Device& device) {
  if (!(bytes_per_second >= 0) || std::isinf(bytes_per_second)) {
    throw InvalidArgument("the speed of a host link is " + std::to_string(bytes_per_second) +
                          " bytes a second; give a positive number, or 0 for as fast as the device copies");
  }
  if (bytes_per_second > 0 && device.kind() == DeviceKind::cuda) {
    throw InvalidArgument(
        "the speed of a host link can be set only where device memory is the host's own (device cpu), not "
        "on " +
        device.description() + "; leave it at 0");
  }
  return bytes_per_second;
}

// One direction of the link.
class Way {
 public:
  Way(Device& device, std::string name, const HostLinkOptions& options)
      : timed_inside_(device.host_accessible()),
        timed_by_events_(device.kind() == DeviceKind::cuda),
        bytes_per_second_(checked_speed(options.bytes_per_second, device)),
        trace_(options.trace),
        stream_(device.create_stream(std::move(name))) {
    stream_->set_trace(trace_);
  }

  Stream& stream() { return *stream_; }

  template <class Copy>
  Event issue(std::int64_t bytes, std::span<const Event> ready, const Copy& copy) {
    for (const Event& event : ready) stream_->wait(event);
    if (bytes == 0) return stream_->record();
    if (timed_by_events_) {
      Event begin = stream_->record();
      copy(*stream_);
      Event end = stream_->record();
      if (pairs_.size() >= most_pairs) collect_pairs();
      pairs_.emplace_back(std::move(begin), end);
      return end;
    }
    if (!timed_inside_) {
      copy(*stream_);
      return stream_->record();
    }
    enqueue_untraced([this, issued = seconds_now(), events = std::vector<Event>(ready.begin(), ready.end())] {
      began_ = seconds_now();
      if (bytes_per_second_ > 0) could_begin_ = earliest_begin(issued, events);
    });
    copy(*stream_);
    if (bytes_per_second_ > 0) {
      stream_->enqueue("held to the link's speed", [this, bytes] { hold(bytes); });
    }
    enqueue_untraced([this] {
      const double taken = seconds_now() - began_;
      const std::lock_guard lock(mutex_);
      busy_ += taken;
    });
    return stream_->record();
  }

  double take_busy() {
    collect_pairs();
    const std::lock_guard lock(mutex_);
    return std::exchange(busy_, 0.0);
  }

 private:
  // Enqueues bookkeeping without a span in the timeline.
  void enqueue_untraced(std::function<void()> work) {
    stream_->set_trace(nullptr);
    stream_->enqueue("host link", std::move(work));
    stream_->set_trace(trace_);
  }

  // The time at which the copy would have begun on a link without late wake-ups: it was requested, its events
  // had passed, and the previous copy had ended. Runs in the stream, after the events.
  double earliest_begin(double issued, const std::vector<Event>& events) const {
    double result = std::max(issued, free_at_);
    for (const Event& event : events) {
      if (!event.state()) continue;
      const double passed = event.passed_at();
      result = std::max(result, std::isnan(passed) ? began_ : passed);
    }
    return std::min(result, began_);
  }

  void hold(std::int64_t bytes) {
    const double due = could_begin_ + static_cast<double>(bytes) / bytes_per_second_;
    if (due > seconds_now()) std::this_thread::sleep_until(at(due));
    free_at_ = std::max(due, seconds_now() - most_made_up);
  }

  void collect_pairs() {
    while (!pairs_.empty()) {
      const auto& [begin, end] = pairs_.front();
      if (!end.query()) break;
      const double taken = end.passed_at() - begin_time(begin);
      if (taken > 0) busy_ += taken;  // not if the time is unknown (NaN)
      pairs_.pop_front();
    }
  }
  static double begin_time(const Event& begin) {
    return begin.query() ? begin.passed_at() : std::numeric_limits<double>::quiet_NaN();
  }

  const bool timed_inside_;
  const bool timed_by_events_;
  const double bytes_per_second_;
  TraceRecorder* const trace_;
  std::deque<std::pair<Event, Event>> pairs_;  // used by the issuing thread
  // The members below are times of the stream's work.
  double began_ = 0;
  double could_begin_ = 0;
  double free_at_ = 0;
  std::mutex mutex_;
  double busy_ = 0;                 // guarded by mutex_
  std::unique_ptr<Stream> stream_;  // last, because its work uses the members above
};

void check_size(std::int64_t bytes, std::string_view what) {
  if (bytes < 0) {
    throw InvalidArgument(std::string(what) + " was asked for " + std::to_string(bytes) + " bytes");
  }
}

}  // namespace

struct HostLink::Impl {
  Impl(Device& its_device, const HostLinkOptions& options)
      : device(its_device),
        to_host(its_device, "to host", options),
        from_host(its_device, "from host", options) {}

  Device& device;
  HostLinkCounts counts;
  Way to_host;
  Way from_host;
};

HostLink::HostLink(Device& device, const HostLinkOptions& options)
    : impl_(std::make_unique<Impl>(device, options)) {}

HostLink::~HostLink() = default;  // each stream runs its pending work before it is destroyed

Event HostLink::copy_to_host(void* host, const void* device, std::int64_t bytes,
                             std::span<const Event> ready) {
  check_size(bytes, "HostLink::copy_to_host");
  Event done = impl_->to_host.issue(
      bytes, ready, [&](Stream& stream) { impl_->device.copy_to_host(stream, host, device, bytes); });
  impl_->counts.bytes_to_host += bytes;
  if (bytes > 0) ++impl_->counts.copies;
  return done;
}

Event HostLink::copy_from_host(void* device, const void* host, std::int64_t bytes,
                               std::span<const Event> ready) {
  check_size(bytes, "HostLink::copy_from_host");
  Event done = impl_->from_host.issue(
      bytes, ready, [&](Stream& stream) { impl_->device.copy_from_host(stream, device, host, bytes); });
  impl_->counts.bytes_from_host += bytes;
  if (bytes > 0) ++impl_->counts.copies;
  return done;
}

Stream& HostLink::to_host_stream() {
  return impl_->to_host.stream();
}

Stream& HostLink::from_host_stream() {
  return impl_->from_host.stream();
}

HostLinkCounts HostLink::counts() const {
  return impl_->counts;
}

HostLink::Busy HostLink::take_busy_seconds() {
  return {impl_->to_host.take_busy(), impl_->from_host.take_busy()};
}

}  // namespace tranche::detail
