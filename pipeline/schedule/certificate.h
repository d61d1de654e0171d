#pragma once
/// Two lower bounds for the length of any schedule with the same chunks, micro-batches and times, computed
/// only from dependencies. A schedule whose length equals the larger bound is optimal.

#include <algorithm>

#include "pipeline/schedule/pipeline_schedule.h"
#include "pipeline/schedule/simulate.h"

namespace tranche::pipeline {

struct Certificate {
  /// The maximum over ranks of three terms added up: the earliest time at which work reaches the rank, the
  /// rank's work, and the least time that must follow its last action. The backward of a chunk must pass
  /// through all earlier chunks; a weight gradient need not be followed by anything.
  double by_rank = 0;
  /// The maximum over chunks of: the forward passes of one micro-batch up to the chunk, the chunk's forward
  /// passes and input gradients of all micro-batches, and the rest of the last micro-batch's backward. It is
  /// the larger bound if there are few micro-batches.
  double by_path = 0;
  double bound() const { return std::max(by_rank, by_path); }
};

/// The bounds for schedules that split the backward of the same chunks as `schedule` does; they do not depend
/// on its order. Throws InvalidArgument like StageTimes::require().
Certificate lower_bounds(const PipelineSchedule& schedule, const StageTimes& times);

}  // namespace tranche::pipeline
