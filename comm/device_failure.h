#pragma once
/// What ends a rank's exchanges of device memory, and events that know of it. Private to comm/.

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <string>

#include "tranche/device/event.h"

namespace tranche::comm {

/// The first failure of a device communicator. Thread-safe.
class DeviceFailure {
 public:
  explicit DeviceFailure(int rank) : rank_(rank) {}

  /// `error` ended `what`; the first wins. An echo of a peer's failure stays one.
  void fail(const std::string& what, const std::exception_ptr& error) noexcept;
  /// Ends everything with `cause`, a sentence of its own.
  void end(const std::string& cause) noexcept;
  bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }
  /// Seconds since the failure; negative when there is none.
  double failed_for() const;
  /// Throws CommunicationError "<what>: <cause>" if anything failed; PeerFailure when a peer was first.
  void check(const std::string& what) const;
  int rank() const noexcept { return rank_; }

 private:
  void set(std::string cause, bool echo) noexcept;
  const int rank_;
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  std::string cause_;
  bool echo_ = false;
  double when_ = 0;
};

/// An event behind which a failure is noticed: waits end with CommunicationError once the group has failed
/// and the work before `inner` has come to its end too, or has not within a second. Streams of a device wait
/// for `inner` itself (EventState::underlying).
class GuardedEvent : public EventState {
 public:
  /// `what` names the operation. A done event: after a failure the work before `inner`, which touches the
  /// caller's buffers, is given a second to end.
  GuardedEvent(Event inner, std::shared_ptr<DeviceFailure> failure, std::string what);
  /// An event that the operation waits for. `peer` >= 0: it is that rank's, and whatever failed before it is
  /// told as that rank's failure.
  GuardedEvent(Event inner, std::shared_ptr<DeviceFailure> failure, std::string what, int peer);
  bool query() override;
  bool wait(double seconds) override;
  double passed_at() override { return inner_.passed_at(); }
  std::shared_ptr<EventState> underlying() override;

  const Event& inner() const noexcept { return inner_; }
  const std::string& what() const noexcept { return what_; }
  /// Says that the work was well done before anything failed.
  void settle() noexcept { settled_.store(true, std::memory_order_release); }

 private:
  bool wait_inner(double seconds);
  Event inner_;
  std::shared_ptr<DeviceFailure> failure_;
  std::string what_;
  int peer_ = -1;
  double grace_seconds_ = 0;
  std::atomic<bool> settled_{false};
};

/// Text of any exception, without rank and position.
std::string message_of(const std::exception_ptr& error);

}  // namespace tranche::comm
