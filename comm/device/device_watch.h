#pragma once
/// Watches the operations of a device for time-outs and failures that no call would notice. Private to comm/.

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/device/guarded_event.h"

namespace tranche::comm {

/// An operation in flight.
struct WatchedOperation {
  std::shared_ptr<GuardedEvent> done;  ///< holds its start and the peers that it waits for
  bool sending = false;                ///< the peers have to receive our data
  int awaited = -1;                    ///< job rank of a peer whose point is unknown; -1: none
  std::function<void()> ask;           ///< called once if it takes long, to ask the peers; may be empty
};

/// A thread that sleeps while no operation is in flight and otherwise checks a hundred times a second.
class DeviceWatch {
 public:
  /// `check` throws when the group or the device's exchange has failed; `abort` makes the device's work end,
  /// once, after a failure. Both run on the watch's thread. With `timeout` <= 0, another component enforces
  /// the deadlines.
  DeviceWatch(std::shared_ptr<DeviceFailure> failure, double timeout, std::function<void()> check,
              std::function<void()> abort);
  /// Ends the thread; after a failure, only once `abort` has been called.
  ~DeviceWatch();
  DeviceWatch(const DeviceWatch&) = delete;
  DeviceWatch& operator=(const DeviceWatch&) = delete;

  void add(WatchedOperation operation);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tranche::comm
