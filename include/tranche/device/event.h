#pragma once
/// Events: points in the order of work. They alone order streams, collectives and memory reuse.

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <utility>

namespace tranche {

/// Backend side of an event.
class EventState {
 public:
  virtual ~EventState() = default;
  /// True when the point has been passed (also when it failed). Never blocks.
  virtual bool query() = 0;
  /// Blocks the calling thread until the point is passed or `seconds` elapsed (negative: no limit); returns
  /// whether it was passed. Rethrows the failure when the work before the event failed.
  virtual bool wait(double seconds) = 0;
  /// The time at which the point was passed, in seconds of std::chrono::steady_clock; NaN while it is pending
  /// or when the time is unknown.
  virtual double passed_at() { return std::numeric_limits<double>::quiet_NaN(); }
  /// The device's own event behind this state, on which a stream of that device waits; null: this state
  /// itself. A collective's done event, for example, adds a time-out and the names of failed ranks to a
  /// device event.
  virtual std::shared_ptr<EventState> underlying() { return nullptr; }
};

/// Copyable handle. A default-constructed event is a point already passed.
class Event {
 public:
  Event() = default;
  explicit Event(std::shared_ptr<EventState> state) : state_(std::move(state)) {}

  bool query() const { return !state_ || state_->query(); }
  /// Blocks the host. Throws the error with which the work failed (CommunicationError, InvalidArgument ...).
  void wait() const {
    if (state_) state_->wait(-1.0);
  }
  /// Blocks the host for at most `seconds`; returns whether the event was passed.
  bool wait_for(double seconds) const { return !state_ || state_->wait(seconds); }
  /// See EventState; NaN for a default-constructed event.
  double passed_at() const { return state_ ? state_->passed_at() : std::numeric_limits<double>::quiet_NaN(); }
  const std::shared_ptr<EventState>& state() const noexcept { return state_; }

 private:
  std::shared_ptr<EventState> state_;
};

/// Wakes a thread that waits and makes progress itself: every source of new work notifies it.
class WakeEvent {
 public:
  virtual ~WakeEvent() = default;
  /// The number of notifications so far, wrapping.
  virtual std::uint32_t count() const = 0;
  /// Sleeps until there are more notifications than `seen`, or for `longest`; may return early.
  virtual void wait(std::uint32_t seen, std::chrono::microseconds longest) = 0;
};

/// An event completed by hand from the host: worker threads, communication threads, tests.
class HostEvent : public EventState {
 public:
  HostEvent();
  ~HostEvent() override;
  bool query() override;
  bool wait(double seconds) override;
  double passed_at() override;
  /// Marks the point passed; wakes waiters. Calling twice is harmless.
  void complete();
  /// Marks the point failed; waiters rethrow `error`.
  void fail(std::exception_ptr error);
  /// Sets a function that makes progress (of communication) while a waiter has nothing else to do; it returns
  /// after one attempt, true if anything moved. `attend` is called when a thread begins to wait, and the
  /// object that it returns is destroyed when that wait ends. With a wake event, a waiter sleeps on it, and a
  /// completion from another thread must notify it. Call this before the event is shared.
  void set_progress(std::function<bool()> progress, std::function<std::shared_ptr<void>()> attend = {},
                    std::shared_ptr<WakeEvent> wake_event = nullptr);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tranche
