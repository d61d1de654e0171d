#include "engine/early_updates.h"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <utility>

namespace tranche::detail {

template <class Work>
void EarlyUpdates::ending_on_error(Work&& work) {
  try {
    work();
  } catch (...) {
    breakdown_.end(std::current_exception());
    throw;
  }
}

void EarlyUpdates::begin(const OptimizerStep& step) {
  updated_.assign(store_.units().size(), 0);
  ending_on_error([&] { boundary_.begin_update(step); });
  step_ = step;
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
    const FlatBuffer& flat = *one.flat;
    const bool too_early = flat.optimizer_tier == OffloadTier::none
                               ? submissions_ < one.submission + 2
                               : fetches_ && flat.parameters_tier == OffloadTier::none;
    if (too_early || gatherer_.holders(one.unit) > 0) {
      kept.push_back(one);
    } else {
      updated_[static_cast<std::size_t>(one.unit)] = 1;
      ending_on_error([&] { update(*one.flat); });
    }
  }
  waiting_ = std::move(kept);
}

void EarlyUpdates::finish() {
  if (!step_) return;
  ending_on_error([&] {
    for (const Waiting& one : std::exchange(waiting_, {})) update(*one.flat);
    boundary_.end_update();
  });
}

bool EarlyUpdates::updated(int unit) const {
  return step_ && updated_[static_cast<std::size_t>(unit)] != 0;
}

void EarlyUpdates::end_step() {
  step_.reset();
  waiting_.clear();
}

void EarlyUpdates::update(FlatBuffer& flat) {
  if (flat.optimizer_tier == OffloadTier::none) exposed_.wait_for(flat.reduce_done, Exposed::reduce);
  boundary_.update(flat, *step_);
}

}  // namespace tranche::detail
