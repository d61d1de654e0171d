#pragma once
/// Records the work that steps of a planned run ask of streams and communicators.

#include <memory>

#include "device/work_recorder.h"
#include "tranche/planner/planner.h"

namespace tranche::planner {

/// Names of the marks that record_steps() sets: before a step's first micro-batch, before Engine::step(), and
/// after it.
inline constexpr const char* step_mark = "step";
inline constexpr const char* boundary_mark = "boundary";
inline constexpr const char* end_mark = "end";

/// Runs one rank on the meta device and records what `steps` steps ask of streams and communicators, after
/// two steps that settle memory and order. Only the sizes are known of a list of units, so its computation is
/// recorded as kernels named "units" with the operations of its formula. Throws ConfigurationError for what a
/// run would refuse.
std::shared_ptr<detail::WorkRecorder> record_steps(const PlanRequest& request, int steps);

}  // namespace tranche::planner
