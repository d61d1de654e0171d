#pragma once
/// Steps of a planned run as the work that they ask of streams and communicators.

#include <memory>

#include "device/work_recorder.h"
#include "tranche/planner/planner.h"

namespace tranche::planner {

/// The places that record_steps() marks: a step's first micro-batch, Engine::step(), and its return.
inline constexpr const char* step_mark = "step";
inline constexpr const char* boundary_mark = "boundary";
inline constexpr const char* end_mark = "end";

/// Records what `steps` steps of the run ask of streams and communicators, as one rank on meta issues it,
/// behind two steps that settle memory and order. A model of which only sizes are known computes what its
/// formula says, in kernels named "units". Throws ConfigurationError for what a run would refuse.
std::shared_ptr<detail::WorkRecorder> record_steps(const PlanRequest& request, int steps);

}  // namespace tranche::planner
