#pragma once
/// The position of each action of a schedule in the list of its rank.

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "pipeline/schedule/pipeline_schedule.h"

namespace tranche::pipeline {

/// Holds the position of each F, B, I, W and message. Its memory suffices for as many pairs of chunk and
/// micro-batch as a complete schedule of so many actions can have. The schedule must outlive it, and have at
/// least one chunk.
class Places {
 public:
  /// Constructs it without positions.
  explicit Places(const PipelineSchedule& schedule);
  /// Records the action's position; returns false if it already has one.
  bool add(const Action& action, std::size_t place);

  /// False: the schedule names more pairs than its actions could fill, so that some have no position here.
  bool all() const { return all_; }
  /// The number of pairs of chunk and micro-batch that can have a position.
  std::size_t pairs() const { return pairs_; }
  Action action(ActionKind kind, std::size_t pair) const;
  /// The position in its rank's list; negative if there is none. For actions on pairs below pairs().
  std::int32_t of(const Action& action) const {
    return places_[static_cast<std::size_t>(action.kind)][pair(action)];
  }
  bool has(const Action& action) const { return of(action) >= 0; }
  /// The rank and the position of an action.
  using Step = std::pair<std::size_t, std::size_t>;
  Step step(const Action& action) const {
    return {static_cast<std::size_t>(schedule_.rank_of_chunk[static_cast<std::size_t>(action.chunk)]),
            static_cast<std::size_t>(of(action))};
  }

 private:
  std::size_t pair(const Action& action) const;

  const PipelineSchedule& schedule_;
  bool all_ = true;
  std::size_t pairs_ = 0;
  std::array<std::vector<std::int32_t>, 8> places_;  ///< for each kind that has a micro-batch
};

}  // namespace tranche::pipeline
