#pragma once
/// The implementation of HostCopy: copies step memory to host memory and back over the host link.

#include <functional>
#include <string_view>

#include "offload/host_link.h"
#include "tranche/engine/host_copy.h"

namespace tranche {

class Ledger;
class MemoryResource;
class Stream;

/// The copies of an engine. Only the issuing thread uses it; events order all work.
class HostCopies {
 public:
  /// `wait` makes the compute stream wait for an event. `host` is the resource of Tier::host. All must
  /// outlive this.
  HostCopies(detail::HostLink& link, Stream& compute, StepArena& device, MemoryResource& host, Ledger& ledger,
             std::function<void(const Event&)> wait);

  /// Begins a pass of the host's step arena, which has the same passes as the device's. end_pass() throws
  /// LogicError naming copies that are still held; outside a pass it has no effect.
  void begin_pass(std::string_view program, bool record, const Shape& shape);
  void next_micro_batch(const Shape& shape) { arena_.also(shape); }
  void end_pass();
  /// Must be called when the memory layout of passes changes.
  void forget() { arena_.forget(); }
  /// Abandons the pass after an error; copies stay valid.
  void abandon_pass() noexcept { arena_.abandon(); }
  void set_poison(bool poison) noexcept { arena_.set_poison(poison); }

  HostCopy send(StepBuffer buffer, std::string_view tag);
  /// Makes a copy that transfers nothing: fetch() returns `buffer` unchanged.
  static HostCopy keep(StepBuffer buffer);
  /// Issues the copy back, into newly acquired device memory. No-op if the buffer is on the device or already
  /// being copied there.
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
