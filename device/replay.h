#pragma once
/// Work that is issued the same way again and again, so that a device may record it once and replay it.

#include <functional>

namespace tranche {

class Stream;

/// Made by Device::create_replay; used by the issuing thread. cpu and meta issue anew every time. cuda issues
/// the first run as it comes (libraries set themselves up), captures the second into a CUDA graph, and from
/// then on launches that graph. What `issue` gives the stream may therefore not change between runs: same
/// kernels, shapes and addresses; numbers that change are read from device memory. It may use no other stream
/// and record no event; Stream::work() counts a replayed run like an issued one.
class Replay {
 public:
  virtual ~Replay() = default;
  virtual void run(Stream& stream, const std::function<void()>& issue) = 0;
  /// The next run starts over (addresses or shapes have changed).
  virtual void forget() = 0;
};

/// Issues every time; for devices without graphs.
class DirectReplay : public Replay {
 public:
  void run(Stream&, const std::function<void()>& issue) override { issue(); }
  void forget() override {}
};

}  // namespace tranche
