#include "tranche/engine/exposed_time.h"

#include <utility>

#include "tranche/core/clock.h"

namespace tranche {

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
    if (waited > 0) seconds_[static_cast<std::size_t>(wait.what)] += waited;  // false where a time is unknown
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

}  // namespace tranche
