#pragma once
/// The facts that the executor needs of a schedule beside the actions of its own rank.

#include <cstddef>
#include <cstdint>
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
  /// The index is the action: the rank's own actions that sent a gradient which its receiver has taken when this action, a
  /// receive, is done. Empty with one chunk on each rank, where memory of a gradient may be asked for again
  /// at once: the rank before takes it whatever this one waits for.
  std::vector<std::vector<std::size_t>> taken;
  /// The receives of this rank in the order in which a rank sends; the index is the sending rank.
  std::vector<std::vector<Action>> incoming;
};
RunOrder run_order(const PipelineSchedule& schedule, int rank);

/// The rank that a message's other half is on.
int peer_of(const PipelineSchedule& schedule, const Action& message);

}  // namespace tranche::pipeline
