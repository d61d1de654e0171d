#include "engine/exposed_time.h"

#include <utility>

#include "core/clock.h"

namespace tranche::detail {

PassTimes::Mark PassTimes::mark() {
  return {compute_.record(), seconds_now(), true};
}

double PassTimes::Mark::seconds() const {
  return passed.state() ? passed.passed_at() : issued;
}

std::pair<double, double> PassTimes::take() {
  double forward = 0, backward = 0;
  for (const MicroBatch& one : std::exchange(marks_, {})) {
    if (!one.turned.taken || !one.ended.taken) continue;
    const double before = one.turned.seconds() - one.begun.seconds();
    const double after = one.ended.seconds() - one.turned.seconds();
    if (before > 0) forward += before;  // false if a time is unknown
    if (after > 0) backward += after;
  }
  return {forward, backward};
}

void ExposedTime::wait_for(const Event& event, Exposed what) {
  if (event.query()) {
    compute_.wait(event);  // rethrows a failure
    return;
  }
  Wait wait{compute_.record(), seconds_now(), event, what};
  compute_.wait(event);
  waits_.push_back(std::move(wait));
}

void ExposedTime::settle() {
  for (const Wait& wait : waits_) {
    const double arrived = wait.arrived.state() ? wait.arrived.passed_at() : wait.issued;
    const double waited = wait.awaited.passed_at() - arrived;
    if (waited > 0) seconds_[static_cast<std::size_t>(wait.what)] += waited;  // false if a time is unknown
  }
  waits_.clear();
}

double ExposedTime::take(Exposed what) {
  return std::exchange(seconds_[static_cast<std::size_t>(what)], 0.0);
}

void ExposedTime::clear() {
  waits_.clear();
  seconds_ = {};
}

}  // namespace tranche::detail
