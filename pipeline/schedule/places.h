#pragma once
/// The place of each action of a schedule in the list of its rank.

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "pipeline/schedule/pipeline_schedule.h"

namespace tranche::pipeline {

/// Holds the place of each F, B, I, W and message, in memory for as many pairs of chunk and micro-batch as a
/// complete schedule of so many actions can have. The schedule outlives it, and has a chunk at least.
class Places {
 public:
  /// Empty.
  explicit Places(const PipelineSchedule& schedule);
  /// Takes the place down. False: the action has one already.
  bool add(const Action& action, std::size_t place);

  /// False: the schedule names more pairs than its actions could fill, and some have no place here.
  bool all() const { return all_; }
  /// Pairs of chunk and micro-batch that can have a place, and an action on one of them.
  std::size_t pairs() const { return pairs_; }
  Action action(ActionKind kind, std::size_t pair) const;
  /// The place in the list of its rank; below 0 when there is none. For actions on pairs below pairs().
  std::int32_t of(const Action& action) const {
    return places_[static_cast<std::size_t>(action.kind)][pair(action)];
  }
  bool has(const Action& action) const { return of(action) >= 0; }
  /// The rank and the place of an action that has one.
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
  std::array<std::vector<std::int32_t>, 8> places_;  ///< for each kind that names a micro-batch
};

}  // namespace tranche::pipeline
