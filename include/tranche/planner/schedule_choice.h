#pragma once
/// The schedules of a pipeline beside each other: how long a step takes under each, and what it holds.

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
  int chunks = 1;    ///< on a rank
  /// A step on paper, in forward passes of a mean stage: a stage takes as long as its operations say, and
  /// input and weight gradients as long as a forward each, beside a forward more for recomputation. Messages
  /// take no time.
  double length = 0;
  double idle = 0;                               ///< share of all ranks' time
  std::optional<double> seconds = std::nullopt;  ///< of a step, where they were asked for
  std::int64_t peak = 0;                         ///< device memory of the stage with most
  bool fits = true;                              ///< every stage does
  /// Why the request does not allow the schedule; empty for one that it allows. Then the figures say nothing.
  std::string refused = {};
};

/// The named schedules, and the request's own, of which `plans` are the plans; those that fit first, then the
/// shortest, then what takes least. `seconds` gives the time of a step (project_step() on a machine), by
/// which they are ordered then; empty: by `length`. Behind them are those that the request's batch and model
/// do not allow. Plans the stages under each other schedule. A `budget` of 0 means that there is no budget.
/// Empty without a pipeline.
std::vector<ScheduleChoice> schedule_choices(const PlanRequest& request, const std::vector<StagePlan>& plans,
                                             std::int64_t budget,
                                             const std::function<double(const PlanRequest&)>& seconds = {});
/// A table of them; empty where there are none.
std::string schedule_choices_text(const std::vector<ScheduleChoice>& choices);
/// The object of stage_plans_json() with the choices as `schedules`.
std::string with_schedules(const std::string& stage_plans_json, const std::vector<ScheduleChoice>& choices);

}  // namespace tranche::planner
