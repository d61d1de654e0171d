#pragma once
/// The interface of work that a communication thread drives. Private to comm/.

namespace tranche {
class HostEvent;
}

namespace tranche::comm {

class Pollable {
 public:
  virtual ~Pollable() = default;
  /// Makes all possible progress; returns whether anything moved. Stops early once `wanted` (may be null) has
  /// passed. Never blocks. Called by one thread at a time.
  virtual bool poll(HostEvent* wanted) = 0;
  /// True while operations are pending that only progress by polling.
  virtual bool busy() const = 0;
  /// True when it must be polled now and then even while it is idle.
  virtual bool needs_polling() const = 0;
};

}  // namespace tranche::comm
