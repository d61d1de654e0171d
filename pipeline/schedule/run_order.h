#pragma once
/// The facts that the executor of a rank needs of a schedule beside the rank's actions. They cost more than
/// linear time, so they are found once and kept with the schedule.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "pipeline/schedule/pipeline_schedule.h"

namespace tranche::pipeline {

/// The places in a rank's actions where its micro-batches end and where its sent gradients are known to be
/// received, and the order in which other ranks send to it.
struct RunOrder {
  /// The micro-batches that end behind each action, ascending; the index is the action. A micro-batch ends
  /// behind the rank's last action of it. The ranks of the first and of the last chunk are an exception: they
  /// add tied gradients there, and the memory of such a sum comes back once both have reached it. Each of
  /// them ends a micro-batch no sooner than behind the last of its own actions that the other one needs in
  /// order to reach its end, so that a wait for the memory never keeps the other from the sum. Waiting for
  /// the memory of a gradient that was sent counts as such a need.
  std::vector<std::vector<std::int64_t>> ends;
  /// The rank's own actions that sent a gradient which its receiver has taken when this action, a receive, is
  /// done; the index is this action. Empty with one chunk on each rank, where memory of a gradient may be
  /// asked for again at once: the rank before takes it whatever this one waits for.
  std::vector<std::vector<std::size_t>> taken;
  /// The receives of this rank in the order in which a rank sends; the index is the sending rank.
  std::vector<std::vector<Action>> incoming;
  /// Weight gradients of a chunk that stand before those of the same micro-batch on a later chunk of the
  /// rank.
  struct EarlyWeights {
    Action action;  ///< the first of the two chunks
    int later_chunk = 0;
  };
  std::vector<EarlyWeights> early_weights;
};
RunOrder run_order(const PipelineSchedule& schedule, int rank);

/// A schedule as one of its ranks runs it.
struct RankSchedule {
  RankSchedule(std::shared_ptr<const PipelineSchedule> of_all, int rank)
      : schedule(std::move(of_all)), order(run_order(*schedule, rank)) {}
  std::shared_ptr<const PipelineSchedule> schedule;
  RunOrder order;
};

/// The rank that a message's other half is on.
int peer_of(const PipelineSchedule& schedule, const Action& message);

}  // namespace tranche::pipeline
