#pragma once
/// Watches operations that a device carries out: time-outs and failures that no call would notice.
/// Private to comm/.

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/device/guarded_event.h"

namespace tranche::comm {

/// An operation under way.
struct WatchedOperation {
  std::shared_ptr<GuardedEvent> done;  ///< with its start and the peers it waits for
  bool sending = false;                ///< the peers have to take our data
  int awaited = -1;                    ///< a peer, of the job, whose point is not known; -1: none
  std::function<void()> ask;           ///< called once where it takes long: tells the peers; may be empty
};

/// A thread that sleeps while nothing is under way and checks a hundred times a second otherwise.
class DeviceWatch {
 public:
  /// `check` throws when the group or the device's exchange has failed; `abort` makes the device's work end,
  /// once, after a failure. Both are called on the watch's thread. `timeout` <= 0: somebody else keeps
  /// deadlines.
  DeviceWatch(std::shared_ptr<DeviceFailure> failure, double timeout, std::function<void()> check,
              std::function<void()> abort);
  /// Ends the thread; after a failure, once `abort` has been called.
  ~DeviceWatch();
  DeviceWatch(const DeviceWatch&) = delete;
  DeviceWatch& operator=(const DeviceWatch&) = delete;

  void add(WatchedOperation operation);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tranche::comm
