#pragma once
/// What the executor has to know of a schedule beside the actions of its own rank.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pipeline/schedule/pipeline_schedule.h"

namespace tranche::pipeline {

/// Where a rank ends its micro-batches, in which order others send it messages, and when they have taken its
/// own.
struct RunOrder {
  /// By action: the micro-batches that end behind it, ascending. That is behind a rank's last action of the
  /// micro-batch. But the ranks of the first and of the last chunk add tied gradients up there, and the
  /// memory of such a sum comes back once both have come to it. So each of them ends a micro-batch no sooner
  /// than behind the last action of its own which the other one needs to come to its end: whoever waits for
  /// the memory then keeps nobody from the sum. A wait for the memory of a gradient that was sent counts as
  /// need.
  std::vector<std::vector<std::int64_t>> ends;
  /// By action: the rank's own actions that sent a gradient which its receiver has taken when this action, a
  /// receive, is done. Empty with one chunk on each rank, where memory of a gradient may be asked for again
  /// at once: the rank before takes it whatever this one waits for.
  std::vector<std::vector<std::size_t>> taken;
  /// By sending rank: the receives of this rank, in the order in which that rank sends.
  std::vector<std::vector<Action>> incoming;
};
RunOrder run_order(const PipelineSchedule& schedule, int rank);

/// The rank that a message's other half is on.
int peer_of(const PipelineSchedule& schedule, const Action& message);

}  // namespace tranche::pipeline
