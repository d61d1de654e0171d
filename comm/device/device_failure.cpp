#include "comm/device/device_failure.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include <fmt/format.h>

#include "comm/transport/transport.h"
#include "core/clock.h"
#include "tranche/core/error.h"

namespace tranche::comm {

namespace {
/// How long a wait sleeps before it checks for failures again.
constexpr double slice_seconds = 0.02;
/// Seconds that the device is given, after a failure, to end work that still touches memory.
constexpr double grace_of_done = 1.0;

/// True when the work before an event has ended, and badly.
bool has_failed(const Event& event) noexcept {
  try {
    return event.query() && !event.wait_for(0);
  } catch (...) {
    return true;
  }
}
}  // namespace

void DeviceFailure::set(std::string cause, std::optional<ExitStatus> peer) noexcept {
  const std::lock_guard lock(mutex_);
  if (failed_.load(std::memory_order_relaxed)) return;
  cause_ = std::move(cause);
  peer_status_ = peer;
  when_ = seconds_now();
  failed_.store(true, std::memory_order_release);
}

void DeviceFailure::fail(const std::string& what, const std::exception_ptr& error) noexcept {
  try {
    std::string cause = message_of(error);
    std::optional<ExitStatus> peer;
    try {
      std::rethrow_exception(error);
    } catch (const PeerFailure& echo) {
      peer = echo.exit_status();
      // "<operation>: rank 2 failed: ..." without the operation, for it will be said of others.
      if (!what.empty() && cause.rfind(what + ": ", 0) == 0) cause.erase(0, what.size() + 2);
    } catch (...) {
      const std::string prefix = "ended by the failure of ";
      if (cause.rfind(prefix, 0) != 0) {
        if (!what.empty() && cause.rfind(what, 0) != 0) cause = what + ": " + cause;
        cause = prefix + cause;
      }
    }
    set(std::move(cause), peer);
  } catch (...) {
    set("ended by a failure that memory did not suffice to tell", std::nullopt);
  }
}

void DeviceFailure::end(const std::string& cause) noexcept {
  set(cause, std::nullopt);
}

double DeviceFailure::failed_for() const {
  if (!failed()) return -1;
  const std::lock_guard lock(mutex_);
  return std::max(0.0, seconds_now() - when_);
}

bool DeviceFailure::well_at(double when) const {
  if (!failed()) return true;
  const std::lock_guard lock(mutex_);
  return when < when_;  // false for a time that is not known
}

void DeviceFailure::check(const std::string& what) const {
  if (!failed()) return;
  const std::lock_guard lock(mutex_);
  const std::string own = "ended by the failure of " + what + ": ";
  std::string text = what.empty() ? cause_ : what + ": " + cause_;
  if (!what.empty() && cause_.rfind(own, 0) == 0) text = what + ": " + cause_.substr(own.size());
  const auto raise = [&](auto error) {
    error.attach_rank(rank_);
    throw error;
  };
  if (peer_status_) raise(PeerFailure(text, *peer_status_));
  raise(CommunicationError(text));
}

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
    // Of several failures behind one event a device tells any: this rank's own comes first.
    if (peer_ < 0 && started_.query()) started_.wait_for(0);
    const int rank = culprit();
    if (rank < 0) throw;
    const std::exception_ptr cause = std::current_exception();
    PeerFailure error(fmt::format("{}: rank {} failed: {}", what_, rank, message_of(cause)),
                      exit_status_of(cause));
    error.attach_rank(failure_->rank());
    throw error;
  }
}

void GuardedEvent::prefer_cause() const {
  // The peer's device is heard of at once, the cause that the peer posts by the next check of the watch.
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
      // Behind an abort the device has come this far without having done the work.
      if (abortable_ && !failure_->well_at(inner_.passed_at())) failure_->check(what_);
      return true;
    }
    if (failure_->failed_for() >= grace_seconds_) failure_->check(what_);
    if (seconds_now() >= limit) return false;
  }
}

}  // namespace tranche::comm
