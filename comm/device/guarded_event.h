#pragma once
/// Events of device work that also report failures of the group. Private to comm/.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/device/device_failure.h"
#include "tranche/device/event.h"

namespace tranche::comm {

/// An event whose waits notice failures: they end with CommunicationError once the group has failed and the
/// work before `inner` has ended, or has not ended within a second. Streams of a device wait for `inner`
/// itself (EventState::underlying).
class GuardedEvent : public EventState {
 public:
  /// A done event of the operation `what`. After a failure, the work before `inner`, which accesses the
  /// caller's buffers, has a second to end. When the work failed although `started` did not, the error names
  /// the rank among `peers` (job ranks) whose point failed.
  GuardedEvent(Event inner, std::shared_ptr<DeviceFailure> failure, std::string what, Event started,
               std::vector<std::pair<int, Event>> peers, bool abortable);
  /// An event that the operation waits for. With `peer` >= 0 it belongs to that rank, and any failure before
  /// it is reported as that rank's.
  GuardedEvent(Event inner, std::shared_ptr<DeviceFailure> failure, std::string what, int peer);
  bool query() override;
  bool wait(double seconds) override;
  double passed_at() override { return inner_.passed_at(); }
  std::shared_ptr<EventState> underlying() override;

  const Event& inner() const noexcept { return inner_; }
  /// The point at which this rank's earlier work is done.
  const Event& started() const noexcept { return started_; }
  const std::vector<std::pair<int, Event>>& peers() const noexcept { return peers_; }
  /// Waits for `inner` alone; throws its failure, naming the peer that caused it.
  bool wait_inner(double seconds);
  const std::string& what() const noexcept { return what_; }

 private:
  /// After a peer's failure: throws the cause that the peer posted, if it arrives soon.
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
