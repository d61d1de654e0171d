#pragma once
/// `tranche schedule check`: the verdict on a schedule.

#include "tools/train/run.h"

namespace tranche::tools {

inline constexpr const char* schedule_check_schema = "tranche-schedule-check-1";

/// Collective under mpirun; rank 0 prints. Returns status 2 for a refused schedule, with its text on
/// output.errors or in the JSON.
int run_schedule_check(const Options& options, const Output& output);

}  // namespace tranche::tools
