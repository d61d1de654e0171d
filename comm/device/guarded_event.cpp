#include "comm/device/guarded_event.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <thread>

#include <fmt/format.h>

#include "comm/peer_failure.h"
#include "core/clock.h"

namespace tranche::comm {

using detail::seconds_now;

namespace {
/// The interval at which a waiter checks for failures.
constexpr double slice_seconds = 0.02;
/// The seconds that the device has, after a failure, to end work that still accesses memory.
constexpr double grace_of_done = 1.0;

/// True when the work before an event has ended with a failure.
bool has_failed(const Event& event) noexcept {
  try {
    return event.query() && !event.wait_for(0);
  } catch (...) {
    return true;
  }
}
}  // namespace

GuardedEvent::GuardedEvent(Event inner, std::shared_ptr<DeviceFailure> failure, std::string what,
                           Event started, std::vector<std::pair<int, Event>> peers, bool abortable)
    : inner_(std::move(inner)),
      failure_(std::move(failure)),
      what_(std::move(what)),
      started_(std::move(started)),
      peers_(std::move(peers)),
      grace_seconds_(grace_of_done),
      abortable_(abortable) {}

GuardedEvent::GuardedEvent(Event inner, std::shared_ptr<DeviceFailure> failure, std::string what, int peer)
    : inner_(std::move(inner)), failure_(std::move(failure)), what_(std::move(what)), peer_(peer) {}

std::shared_ptr<EventState> GuardedEvent::underlying() {
  const std::shared_ptr<EventState>& state = inner_.state();
  if (!state) return nullptr;
  const std::shared_ptr<EventState> deeper = state->underlying();
  return deeper ? deeper : state;
}

bool GuardedEvent::query() {
  return inner_.query() || failure_->failed_for() >= grace_seconds_;
}

int GuardedEvent::culprit() const {
  if (peer_ >= 0) return peer_;
  for (const auto& [rank, event] : peers_) {
    if (has_failed(event)) return rank;
  }
  return -1;
}

bool GuardedEvent::wait_inner(double seconds) {
  try {
    return inner_.wait_for(seconds);
  } catch (const PeerFailure&) {
    throw;
  } catch (...) {
    // A device may report any of several failures behind one event, so this rank's own failure is checked
    // first.
    if (peer_ < 0 && started_.query()) started_.wait_for(0);
    const int rank = culprit();
    if (rank < 0) throw;
    const std::exception_ptr cause = std::current_exception();
    PeerFailure error(
        fmt::format("{}: {} failed: {}", what_, failure_->rank_names().of(rank), message_of(cause)),
        exit_status_of(cause));
    error.attach_rank(failure_->rank());
    throw error;
  }
}

void GuardedEvent::prefer_cause() const {
  // The failure of the peer's device is visible at once; the cause that the peer posts arrives with the
  // watch's next check.
  const double limit = seconds_now() + 5 * slice_seconds;
  while (!failure_->failed() && seconds_now() < limit) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  failure_->check(what_);
}

bool GuardedEvent::wait(double seconds) {
  const double limit = seconds < 0 ? std::numeric_limits<double>::infinity() : seconds_now() + seconds;
  for (;;) {
    bool passed = false;
    try {
      passed = wait_inner(std::clamp(limit - seconds_now(), 0.0, slice_seconds));
    } catch (const PeerFailure&) {
      if (!peers_.empty()) prefer_cause();
      throw;
    }
    if (passed) {
      // After an abort the device passes this point without having done the work.
      if (abortable_ && !failure_->well_at(inner_.passed_at())) failure_->check(what_);
      return true;
    }
    if (failure_->failed_for() >= grace_seconds_) failure_->check(what_);
    if (seconds_now() >= limit) return false;
  }
}

}  // namespace tranche::comm
