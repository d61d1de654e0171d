#pragma once
/// Events of device work that report the failure of the group. Private to comm/.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/device/device_failure.h"
#include "tranche/device/event.h"

namespace tranche::comm {

/// An event behind which a failure is noticed: waits end with CommunicationError once the group has failed
/// and the work before `inner` has come to its end too, or has not within a second. Streams of a device wait
/// for `inner` itself (EventState::underlying).
class GuardedEvent : public EventState {
 public:
  /// `what` names the operation. A done event: after a failure the work before `inner`, which touches the
  /// caller's buffers, is given a second to end.
  /// When the work failed although `started` did not, the one of `peers` (ranks of the job) whose point
  /// failed is named.
  GuardedEvent(Event inner, std::shared_ptr<DeviceFailure> failure, std::string what, Event started,
               std::vector<std::pair<int, Event>> peers, bool abortable);
  /// An event that the operation waits for. `peer` >= 0: it is that rank's, and whatever failed before it is
  /// told as that rank's failure.
  GuardedEvent(Event inner, std::shared_ptr<DeviceFailure> failure, std::string what, int peer);
  bool query() override;
  bool wait(double seconds) override;
  double passed_at() override { return inner_.passed_at(); }
  std::shared_ptr<EventState> underlying() override;

  const Event& inner() const noexcept { return inner_; }
  /// The point at which this rank's earlier work is done.
  const Event& started() const noexcept { return started_; }
  const std::vector<std::pair<int, Event>>& peers() const noexcept { return peers_; }
  /// Waits for `inner` alone; throws what made it fail, with the peer to blame.
  bool wait_inner(double seconds);
  const std::string& what() const noexcept { return what_; }

 private:
  /// After a peer's failure: throws what that peer posted, if it is known soon.
  void prefer_cause() const;
  /// The rank whose work failed, or -1 for this rank's own.
  int culprit() const;
  Event inner_;
  std::shared_ptr<DeviceFailure> failure_;
  std::string what_;
  int peer_ = -1;
  Event started_;
  std::vector<std::pair<int, Event>> peers_;
  double grace_seconds_ = 0;
  bool abortable_ = false;
};

}  // namespace tranche::comm
