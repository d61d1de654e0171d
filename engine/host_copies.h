#pragma once
/// The engine's side of HostCopy: step memory goes to host memory and comes back on the host link.

#include <functional>
#include <string_view>

#include "offload/host_link.h"
#include "tranche/engine/host_copy.h"

namespace tranche {

class Ledger;
class MemoryResource;
class Stream;

/// The copies of an engine. One thread, the issuing thread, uses it; all order is by events.
class HostCopies {
 public:
  /// `wait` has the compute stream wait for an event. `host` is the resource of Tier::host. All outlive this.
  HostCopies(detail::HostLink& link, Stream& compute, StepArena& device, MemoryResource& host, Ledger& ledger,
             std::function<void(const Event&)> wait);

  /// The host's step arena goes through the same passes as the device's. end_pass() throws LogicError naming
  /// copies that are held; no-op between passes.
  void begin_pass(std::string_view program, bool record, const Shape& shape);
  void next_micro_batch(const Shape& shape) { arena_.also(shape); }
  void end_pass();
  /// The layout of passes changes.
  void forget() { arena_.forget(); }
  /// The pass was given up after an error; copies stay valid.
  void abandon_pass() noexcept { arena_.abandon(); }
  void set_poison(bool poison) noexcept { arena_.set_poison(poison); }

  HostCopy send(StepBuffer buffer, std::string_view tag);
  /// A copy that sends nothing: fetch() returns `buffer` as it is.
  static HostCopy keep(StepBuffer buffer);
  /// Issues the copy back, into device memory taken now. No-op for a buffer on the device or on its way.
  static void prefetch(HostCopy& copy);
  /// Throws LogicError for an empty copy.
  static StepBuffer fetch(HostCopy copy);

  const StepArena& arena() const noexcept { return arena_; }

 private:
  friend class HostCopy;
  detail::HostLink& link_;
  Stream& compute_;
  StepArena& device_;
  StepArena arena_;
  std::function<void(const Event&)> wait_;
};

}  // namespace tranche
