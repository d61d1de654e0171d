#pragma once
#include <optional>

#include "tools/arguments.h"
#include "tools/train/run.h"
#include "tranche/planner/planner.h"
#include "tranche/planner/projection.h"

namespace tranche::tools {

/// The plan that a command line requests. Throws ConfigurationError.
planner::PlanRequest plan_request(const Options& options);

/// The search of --fit, with the settings that the command line fixes. Throws ConfigurationError.
planner::FitRequest fit_request(const Options& options, const planner::PlanRequest& plan);
/// The projection that --machine requests beside the plan; empty: none.
std::optional<planner::ProjectionRequest> projection_request(const Options& options,
                                                             const planner::PlanRequest& plan);

/// `tranche plan`: starts no ranks and accesses no device. Returns the exit status: 3 when a budget (--fit,
/// or --device-memory) is not enough. Throws ConfigurationError.
int run_plan(const Options& options, const Output& output);

/// For example " within 512.00 MiB this fits: ...", found by find_fit() for the configuration's
/// device_memory_limit; empty if it has none. If the search would take longer than `seconds`, or is refused,
/// the text only mentions how to search.
std::string what_would_have_fitted(const planner::PlanRequest& request, double seconds);

}  // namespace tranche::tools
