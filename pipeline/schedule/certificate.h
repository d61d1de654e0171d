#pragma once
/// How short any schedule with the same chunks, micro-batches and times can be: two lower bounds from the
/// dependencies alone. A schedule as long as the larger of them is optimal.

#include <algorithm>

#include "pipeline/schedule/pipeline_schedule.h"
#include "pipeline/schedule/simulate.h"

namespace tranche::pipeline {

struct Certificate {
  /// The largest over ranks of: the earliest time at which anything reaches the rank, its work, and the least
  /// that is left to do behind it. The backward of a chunk has to go through all chunks in front of it; a
  /// weight gradient alone leaves nothing.
  double by_rank = 0;
  /// The largest over chunks of: one micro-batch's way there, the forward passes and input gradients of all
  /// micro-batches there, and the last one's way back. It decides where there are few micro-batches.
  double by_path = 0;
  double bound() const { return std::max(by_rank, by_path); }
};

/// The bounds for schedules that split the backward of the same chunks as `schedule` does. Its order has no
/// part in them. Throws InvalidArgument as StageTimes::require() does.
Certificate lower_bounds(const PipelineSchedule& schedule, const StageTimes& times);

}  // namespace tranche::pipeline
