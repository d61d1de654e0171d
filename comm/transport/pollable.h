#pragma once
/// The interface of the work that a communication thread drives. Private to comm/.

namespace tranche {
class HostEvent;
}

namespace tranche::comm {

class Pollable {
 public:
  virtual ~Pollable() = default;
  /// Moves everything that can move; returns whether anything did. Stops early once `wanted` (may be null)
  /// has passed. Never blocks. Called by one thread at a time.
  virtual bool poll(HostEvent* wanted) = 0;
  /// True while operations are pending, whose progress only polling finds.
  virtual bool busy() const = 0;
  /// True when it has to be polled now and then even while it is idle.
  virtual bool needs_polling() const = 0;
};

}  // namespace tranche::comm
