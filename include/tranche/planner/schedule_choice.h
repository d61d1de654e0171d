#pragma once
/// Comparison of a pipeline's schedules: the time of a step under each, and the memory that it needs.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tranche/planner/planner.h"
#include "tranche/planner/stage_plans.h"

namespace tranche::planner {

struct ScheduleChoice {
  std::string name;  ///< the value of Config::pipeline_schedule
  int chunks = 1;    ///< chunks of one rank
  /// Length of an idealised step in forward passes of a mean stage. A stage's time is proportional to its
  /// operations; input gradients and weight gradients each take as long as a forward, and recomputation takes
  /// one more. Messages take no time.
  double length = 0;
  double idle = 0;                               ///< idle share of all ranks' time
  std::optional<double> seconds = std::nullopt;  ///< seconds of a step, if they were asked for
  std::int64_t peak = 0;                         ///< device memory of the stage that needs most
  bool fits = true;                              ///< true if every stage fits
  /// The reason why the request does not allow the schedule; empty if it allows it. The figures are
  /// meaningless if there is a reason.
  std::string refused = {};
};

/// Compares the named schedules and the request's own, to which `plans` belong, and plans the stages under
/// each other schedule. Schedules that fit come first, then the order is by time, then by memory. `seconds`
/// returns the time of a step (project_step() on a machine); if it is empty, `length` is the time. Schedules
/// that the request's batch and model do not allow are last. A `budget` of 0 means that there is no budget.
/// Returns nothing without a pipeline.
std::vector<ScheduleChoice> schedule_choices(const PlanRequest& request, const std::vector<StagePlan>& plans,
                                             std::int64_t budget,
                                             const std::function<double(const PlanRequest&)>& seconds = {});
/// A table of the choices; empty if there are none.
std::string schedule_choices_text(const std::vector<ScheduleChoice>& choices);
/// The object of stage_plans_json() with the choices as `schedules`.
std::string with_schedules(const std::string& stage_plans_json, const std::vector<ScheduleChoice>& choices);

}  // namespace tranche::planner
