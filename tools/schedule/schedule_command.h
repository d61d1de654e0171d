#pragma once
/// `tranche schedule`: analyses a schedule without running it.

#include "tools/train/run.h"

namespace tranche::tools {

inline constexpr const char* schedule_schema = "tranche-schedule-1";

/// Collective under mpirun; rank 0 prints.
int run_schedule(const Options& options, const Output& output);

}  // namespace tranche::tools
