#pragma once
/// Work that is issued the same way again and again, so that a device may record it once and replay it.

#include <functional>
#include <string>

namespace tranche {

class Stream;

/// Made by Device::create_replay; used by the issuing thread. cpu and meta issue the work anew every time.
/// cuda issues the first run normally (libraries initialise themselves), captures the second into a CUDA
/// graph, and then launches that graph. Therefore the work that `issue` gives to the stream must not change
/// between runs: same kernels, shapes and addresses; numbers that change are read from device memory. It may
/// use no other stream, record no event, copy nothing to or from memory outside Tier::host, and enqueue no
/// host work. Stream::work() counts a replayed run like an issued one. Where the capture turns out
/// impossible, the replay issues from then on and problem() gives the reason; that run calls `issue` twice.
class Replay {
 public:
  virtual ~Replay() = default;
  virtual void run(Stream& stream, const std::function<void()>& issue) = 0;
  /// Discards the recording, because addresses or shapes have changed; the next run starts over.
  virtual void forget() = 0;
  /// The reason why this replay issues anew although the device has graphs; empty when it uses them. For one
  /// line of the log.
  virtual const std::string& problem() const noexcept {
    static const std::string none;
    return none;
  }
};

/// Issues the work every time; for devices without graphs.
class DirectReplay : public Replay {
 public:
  void run(Stream&, const std::function<void()>& issue) override { issue(); }
  void forget() override {}
};

}  // namespace tranche
