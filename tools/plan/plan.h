#pragma once
#include <optional>

#include "tools/arguments.h"
#include "tools/train/run.h"
#include "tranche/planner/planner.h"
#include "tranche/planner/projection.h"

namespace tranche::tools {

/// The plan that a command line asks for. Throws ConfigurationError.
planner::PlanRequest plan_request(const Options& options);

/// The search of --fit for it, with what the command line keeps. Throws ConfigurationError.
planner::FitRequest fit_request(const Options& options, const planner::PlanRequest& plan);
/// The projection that --machine asks for beside the plan; empty: none.
std::optional<planner::ProjectionRequest> projection_request(const Options& options,
                                                             const planner::PlanRequest& plan);

/// `tranche plan`: starts no ranks and touches no device. Returns the exit status: 3 when a budget (--fit, or
/// --device-memory) is not enough. Throws ConfigurationError.
int run_plan(const Options& options, const Output& output);

/// "\nwithin 512.00 MiB this fits: ...", by find_fit() under the configuration's device_memory_limit; empty
/// where there is none. A search that would take longer than `seconds`, or is refused, is only pointed to.
std::string what_would_have_fitted(const planner::PlanRequest& request, double seconds);

}  // namespace tranche::tools
