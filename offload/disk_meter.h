#pragma once
/// How long one rank's disk was busy, and why it was idle. For offload/ and engine/.

#include <array>
#include <cstdint>
#include <functional>
#include <mutex>

#include "tranche/core/trace.h"

namespace tranche::detail {

/// The disk is busy while at least one transfer is in flight. At any other moment it is idle for one reason,
/// the first of these that holds:
///     norm:           a tile is in memory, but its update waits for the ranks' agreement or for its gradient
///     no buffer:      a read was requested, and the memory or the bytes that it needs are still in use
///     nothing asked:  no transfer is requested
/// Thread-safe. With a trace, idle times are spans of the track "disk idle".
class DiskMeter {
 public:
  using Clock = std::function<double()>;
  /// `trace` may be null and outlives it. `clock` gives seconds; empty: those of the steady clock.
  explicit DiskMeter(TraceRecorder* trace = nullptr, Clock clock = {});

  TraceRecorder* trace() const { return trace_; }
  double now() const { return clock_(); }

  /// A transfer is in flight from begin() to end().
  void begin();
  void end() noexcept;
  /// The state of a ring's tiles: one waits for its update to be issued, a read waits for its buffer.
  void set_tiles(bool wait_for_update, bool wait_for_buffer) noexcept;
  /// A read outside the ring was requested; its transfer has not begun.
  void ask();
  /// A transfer outside the ring, in flight during this object's lifetime. `asked`: ask() announced it.
  class Transfer {
   public:
    explicit Transfer(DiskMeter& meter, bool asked = false);
    ~Transfer() { meter_.end(); }
    Transfer(const Transfer&) = delete;
    Transfer& operator=(const Transfer&) = delete;

   private:
    DiskMeter& meter_;
  };

  struct Seconds {
    double busy = 0, norm = 0, no_buffer = 0, nothing_asked = 0;
  };
  /// Seconds since the last call, or since the start; the four add up to the time that has passed.
  Seconds take();

 private:
  enum class State : std::uint8_t { busy, norm, no_buffer, nothing_asked };
  State present() const;
  /// The state may have changed. Called with the mutex held.
  void update();
  /// Gives the time up to `now` to the state that it was spent in.
  void settle(double now);

  TraceRecorder* const trace_;
  const Clock clock_;
  std::mutex mutex_;
  std::int64_t in_flight_ = 0, asked_ = 0;
  bool wait_for_update_ = false, wait_for_buffer_ = false;
  State state_ = State::nothing_asked;
  double settled_, entered_;         ///< times up to which seconds are counted, and at which the state began
  std::array<double, 4> seconds_{};  ///< by State
};

}  // namespace tranche::detail
