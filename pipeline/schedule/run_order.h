#pragma once
/// Facts that a rank's executor needs in addition to its actions (see the note in pipeline/executor.cpp).
/// They cost more than linear time, so they are computed once and stored with the schedule.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "pipeline/schedule/pipeline_schedule.h"

namespace tranche::pipeline {

/// The actions of a rank after which its micro-batches end and its sent gradients are known to be received,
/// and the order in which other ranks send to it.
struct RunOrder {
  /// The micro-batches that end after each action, ascending; the index is the action. A micro-batch normally
  /// ends after the rank's last action of it. The ranks of the first and of the last chunk differ: at the end
  /// they sum tied gradients, and the memory of this sum is released once both ranks have reached it. Each of
  /// them therefore ends a micro-batch only after the last of its own actions that the other rank needs to
  /// reach its end; otherwise a wait for that memory could keep the other rank from the sum. Waiting for the
  /// memory of a sent gradient counts as such a need.
  std::vector<std::vector<std::int64_t>> ends;
  /// The index is an action of this rank that receives. The entry lists the rank's earlier sends of gradients
  /// whose receiver is known to have the gradient when this receive completes. Empty if each rank has one
  /// chunk: then the memory of a gradient can be reused at once, because the rank before always receives it.
  std::vector<std::vector<std::size_t>> taken;
  /// The receives of this rank in the order in which each other rank sends; the index is the sending rank.
  std::vector<std::vector<Action>> incoming;
  /// Weight gradients of a chunk that precede those of the same micro-batch on a later chunk of the rank.
  struct EarlyWeights {
    Action action;  ///< the action on the earlier of the two chunks
    int later_chunk = 0;
  };
  std::vector<EarlyWeights> early_weights;
};
RunOrder run_order(const PipelineSchedule& schedule, int rank);

/// A schedule from the view of one of its ranks.
struct RankSchedule {
  RankSchedule(std::shared_ptr<const PipelineSchedule> of_all, int rank)
      : schedule(std::move(of_all)), order(run_order(*schedule, rank)) {}
  std::shared_ptr<const PipelineSchedule> schedule;
  RunOrder order;
};

/// The rank of the other side of a message.
int peer_of(const PipelineSchedule& schedule, const Action& message);

}  // namespace tranche::pipeline
