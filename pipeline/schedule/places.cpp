#include "pipeline/schedule/places.h"

#include <algorithm>

namespace tranche::pipeline {

Places::Places(const PipelineSchedule& schedule) : schedule_(schedule) {
  std::size_t actions = 0;
  for (const std::vector<Action>& line : schedule.ranks) actions += line.size();
  // A complete schedule has more actions than pairs. If a file uses larger numbers, one of the first pairs
  // has no forward, so that the schedule is refused without the positions of the others.
  const auto chunks = static_cast<std::size_t>(schedule.chunks());
  const auto micro_batches = static_cast<std::size_t>(schedule.micro_batches);
  all_ = micro_batches <= (actions + 1) / chunks;
  pairs_ = all_ ? chunks * micro_batches : actions + 1;
  for (std::vector<std::int32_t>& of_kind : places_) of_kind.assign(pairs_, -1);
}

bool Places::add(const Action& action, std::size_t place) {
  const std::size_t at = pair(action);
  if (at >= pairs_) return true;
  std::int32_t& own = places_[static_cast<std::size_t>(action.kind)][at];
  return std::exchange(own, static_cast<std::int32_t>(place)) < 0;
}

Action Places::action(ActionKind kind, std::size_t pair) const {
  const auto micro_batches = static_cast<std::size_t>(schedule_.micro_batches);
  return {kind, static_cast<int>(pair / micro_batches), static_cast<std::int64_t>(pair % micro_batches)};
}

std::size_t Places::pair(const Action& action) const {
  const auto chunk = static_cast<std::size_t>(action.chunk);
  const auto micro_batches = static_cast<std::size_t>(schedule_.micro_batches);
  if (!all_ && chunk > pairs_ / micro_batches) return pairs_;
  return std::min(chunk * micro_batches + static_cast<std::size_t>(action.micro_batch), pairs_);
}

}  // namespace tranche::pipeline
