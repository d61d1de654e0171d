#include "engine/early_updates.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace tranche::detail {

void EarlyUpdates::begin(const OptimizerStep& step) {
  step_ = step;
  updated_.assign(store_.units().size(), 0);
  boundary_.begin_update(step);
}

void EarlyUpdates::complete(FlatBuffer& flat) {
  if (!step_) return;
  waiting_.push_back(
      {&flat, store_.tensors()[static_cast<std::size_t>(flat.tensors.front())].unit, submissions_});
}

void EarlyUpdates::issue(bool submitted) {
  submissions_ += submitted ? 1 : 0;
  std::vector<Waiting> kept;
  for (const Waiting& one : std::exchange(waiting_, {})) {
    const bool too_early = one.flat->optimizer_tier == OffloadTier::none && submissions_ < one.submission + 2;
    if (too_early || gatherer_.holders(one.unit) > 0) {
      kept.push_back(one);
    } else {
      updated_[static_cast<std::size_t>(one.unit)] = 1;
      update(*one.flat);
    }
  }
  waiting_ = std::move(kept);
}

void EarlyUpdates::finish() {
  if (!step_) return;
  for (const Waiting& one : std::exchange(waiting_, {})) update(*one.flat);
  boundary_.end_update();
}

bool EarlyUpdates::updated(int unit) const {
  return step_ && updated_[static_cast<std::size_t>(unit)] != 0;
}

void EarlyUpdates::end_step() {
  step_.reset();
}

void EarlyUpdates::update(FlatBuffer& flat) {
  if (flat.optimizer_tier == OffloadTier::none) exposed_.wait_for(flat.reduce_done, Exposed::reduce);
  boundary_.update(flat, *step_);
}

}  // namespace tranche::detail
