#pragma once
/// Damaged schedules, for tests that compare the checker's verdict with an execution.

#include <cstdint>
#include <string>

#include "pipeline/schedule/pipeline_schedule.h"

namespace tranche::test {

struct MutatedSchedule {
  std::string origin;  ///< "zb-v, 3 stages, 4 micro-batches, 2 chunks on a rank; 2 changes"
  pipeline::PipelineSchedule schedule;
};

/// A named schedule of 2 to 4 stages with its messages, one in four with gathers and frees, in which up to
/// four actions were moved, exchanged, removed, doubled or replaced. Determined by `seed` alone. Some are
/// still correct, because actions without dependencies may change places.
MutatedSchedule mutated_schedule(std::uint64_t seed);

}  // namespace tranche::test
