#include "offload/disk_meter.h"

#include <cstddef>
#include <utility>

#include "core/clock.h"

namespace tranche::detail {

namespace {
constexpr std::array<const char*, 4> names{"busy", "waiting for the norm", "no buffer free",
                                           "nothing asked for"};
}

DiskMeter::DiskMeter(TraceRecorder* trace, Clock clock)
    : trace_(trace),
      clock_(clock ? std::move(clock) : Clock(seconds_now)),
      settled_(clock_()),
      entered_(settled_) {}

DiskMeter::State DiskMeter::present() const {
  if (in_flight_ > 0) return State::busy;
  if (wait_for_update_) return State::norm;
  return wait_for_buffer_ || asked_ > 0 ? State::no_buffer : State::nothing_asked;
}

void DiskMeter::settle(double now) {
  seconds_[static_cast<std::size_t>(state_)] += now - std::exchange(settled_, now);
}

void DiskMeter::update() {
  const State next = present();
  if (next == state_) return;
  const double now = clock_();
  settle(now);
  if (trace_ != nullptr && state_ != State::busy && now > entered_) {
    trace_->span("disk idle", names[static_cast<std::size_t>(state_)], entered_, now);
  }
  state_ = next;
  entered_ = now;
}

void DiskMeter::begin() {
  const std::lock_guard lock(mutex_);
  ++in_flight_;
  update();
}

void DiskMeter::end() noexcept {
  const std::lock_guard lock(mutex_);
  --in_flight_;
  update();
}

void DiskMeter::set_tiles(bool wait_for_update, bool wait_for_buffer) noexcept {
  const std::lock_guard lock(mutex_);
  wait_for_update_ = wait_for_update;
  wait_for_buffer_ = wait_for_buffer;
  update();
}

void DiskMeter::ask() {
  const std::lock_guard lock(mutex_);
  ++asked_;
  update();
}

DiskMeter::Transfer::Transfer(DiskMeter& meter, bool asked) : meter_(meter) {
  const std::lock_guard lock(meter_.mutex_);
  if (asked) --meter_.asked_;
  ++meter_.in_flight_;
  meter_.update();
}

DiskMeter::Seconds DiskMeter::take() {
  const std::lock_guard lock(mutex_);
  settle(clock_());
  const auto taken = std::exchange(seconds_, {});
  return {taken[0], taken[1], taken[2], taken[3]};
}

}  // namespace tranche::detail
