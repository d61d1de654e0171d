#pragma once
/// Schedules with damage, for tests that compare what the checker says with what happens.

#include <cstdint>
#include <string>

#include "pipeline/schedule/pipeline_schedule.h"

namespace tranche::test {

struct MutatedSchedule {
  std::string origin;  ///< "zb-v, 3 stages, 4 micro-batches, 2 chunks on a rank; 2 changes"
  pipeline::PipelineSchedule schedule;
};

/// A named schedule of 2 to 4 stages with its messages, and one in four with gathers and frees, in which up
/// to four actions were moved, exchanged, left out, doubled, or made others. A function of `seed` alone. Some
/// are as good as before: actions may change places where nothing depends on it.
MutatedSchedule mutated_schedule(std::uint64_t seed);

}  // namespace tranche::test
