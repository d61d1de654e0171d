#pragma once
/// Step memory that goes to host memory and comes back: activations that a model saves for backward.

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "tranche/device/step_arena.h"

namespace tranche {

class HostCopies;
class Stream;

namespace detail {
class HostLink;
}  // namespace detail

/// A buffer of step memory whose bytes are, or will be, in host memory. Move-only; made by
/// Engine::send_to_host and turned into a buffer again by Engine::fetch_from_host. Destroyed before that, it
/// lets go of both places behind what still uses them. Released, as all memory of the step, before step().
class HostCopy {
 public:
  HostCopy() = default;
  ~HostCopy() { release(); }
  HostCopy(HostCopy&& other) noexcept;
  HostCopy& operator=(HostCopy&& other) noexcept;
  HostCopy(const HostCopy&) = delete;
  HostCopy& operator=(const HostCopy&) = delete;

  explicit operator bool() const noexcept { return static_cast<bool>(device_) || static_cast<bool>(host_); }
  std::int64_t bytes() const noexcept { return bytes_; }
  /// Gives the device memory back, for reuse once the copy has left it and the compute stream has passed this
  /// point; until then kernels may read it. No-op where nothing was sent (see Engine::send_to_host).
  void leave_device() noexcept;
  void release() noexcept;

 private:
  friend class HostCopies;
  HostCopies* owner_ = nullptr;  ///< null: nothing was sent, the bytes stay on the device
  std::int64_t bytes_ = 0;
  std::string tag_;
  StepBuffer device_, host_;
  Event out_, in_;       ///< the copies' ends
  bool coming_ = false;  ///< the way back was issued: device_ is where it leads
};

/// Internal: the engine's part. One thread, the issuing thread; all order is by events.
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
