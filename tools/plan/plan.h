#pragma once
#include "tools/arguments.h"
#include "tools/train/run.h"
#include "tranche/planner/planner.h"

namespace tranche::tools {

/// The plan that a command line asks for. Throws ConfigurationError.
planner::PlanRequest plan_request(const Options& options);

/// `tranche plan`: starts no ranks and touches no device. Returns the exit status: 3 when a budget (--fit, or
/// --device-memory) is not enough. Throws ConfigurationError.
int run_plan(const Options& options, const Output& output);

/// "\nwithin 512.00 MiB this fits: ...", by find_fit() under the configuration's device_memory_limit; empty
/// where there is none. A search that would take longer than `seconds`, or is refused, is only pointed to.
std::string what_would_have_fitted(const planner::PlanRequest& request, double seconds);

}  // namespace tranche::tools
