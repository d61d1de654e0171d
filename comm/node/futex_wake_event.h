#pragma once
/// Lets a rank's threads sleep until another process notifies them. Private to comm/.

#include <chrono>
#include <cstdint>

#include "comm/node/control_segment.h"
#include "tranche/device/event.h"

namespace tranche::comm {

/// The wake event of a rank's own control segment.
class FutexWakeEvent : public WakeEvent {
 public:
  explicit FutexWakeEvent(ControlSegment& segment) : segment_(segment) {}
  std::uint32_t count() const override { return segment_.notifications.load(); }
  void wait(std::uint32_t seen, std::chrono::microseconds longest) override;

 private:
  ControlSegment& segment_;
};

}  // namespace tranche::comm
