#pragma once
/// Events: points in the order of work. The only things that order streams, collectives and memory reuse.

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
  /// Blocks the calling thread until passed or `seconds` elapsed (negative: no limit); returns whether it
  /// was passed. Rethrows the failure when the work before the event failed.
  virtual bool wait(double seconds) = 0;
  /// When the point was passed, in seconds of std::chrono::steady_clock; NaN while it is not, or unknown.
  virtual double passed_at() { return std::numeric_limits<double>::quiet_NaN(); }
  /// The device's own event that this state stands in front of (a collective's done event adds a time-out and
  /// the names of those who failed): what a stream of that device waits for. Null: this state itself.
  virtual std::shared_ptr<EventState> underlying() { return nullptr; }
};

/// Copyable handle. A default-constructed event is a point already passed.
class Event {
 public:
  Event() = default;
  explicit Event(std::shared_ptr<EventState> state) : state_(std::move(state)) {}

  bool query() const { return !state_ || state_->query(); }
  /// Blocks the host. Throws what made the work fail (CommunicationError, InvalidArgument ...).
  void wait() const {
    if (state_) state_->wait(-1.0);
  }
  /// Blocks the host at most `seconds`; returns whether the event was passed.
  bool wait_for(double seconds) const { return !state_ || state_->wait(seconds); }
  /// See EventState; NaN for a default-constructed event.
  double passed_at() const { return state_ ? state_->passed_at() : std::numeric_limits<double>::quiet_NaN(); }
  const std::shared_ptr<EventState>& state() const noexcept { return state_; }

 private:
  std::shared_ptr<EventState> state_;
};

/// Wakes a thread that waits and moves the work itself: whatever brings it something to move notifies it.
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
  /// A function that moves the work forward when a waiter has nothing else to do (progress of communication);
  /// returns after one attempt whether anything moved. `attend` is called when a thread begins to wait; the
  /// object that it returns is destroyed when that wait ends. With a wake event a waiter pauses on it, and
  /// completion from another thread has to notify it. Set before the event is shared.
  void set_progress(std::function<bool()> progress, std::function<std::shared_ptr<void>()> attend = {},
                    std::shared_ptr<WakeEvent> wake_event = nullptr);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tranche
