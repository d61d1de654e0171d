#pragma once
/// The seconds of a step of a pipeline, from the seconds that its ranks would take without one. Private to
/// planner/.

#include <cstdint>
#include <vector>

#include "pipeline/schedule/pipeline_schedule.h"
#include "tranche/engine/model_spec.h"
#include "tranche/planner/planner.h"

namespace tranche::planner {

/// The parts of the model that the stages of a pipeline have.
struct StageShares {
  std::vector<double> operations;  ///< of forward; they add up to 1
  double most_operations = 1;      ///< the largest of them
  double most_state = 1;           ///< the largest share of a stage in the elements of all buffers
};
/// Under the schedule of `config`, whose mesh has so many stages. `held`: elements that each stage holds.
/// Throws ConfigurationError for a model or a schedule that cannot be cut so.
StageShares stage_shares(const ModelSpec& spec, const Config& config, int stages,
                         const std::vector<double>& held);

/// The seconds of a step under the schedule. `alone` is the step of a rank that computes the whole model on a
/// mesh without the axis `pipeline`; each message takes `message` seconds. A stage has its share of the work,
/// and of what is waited for at most the share of the stage that holds most.
StepCost pipelined(const StepCost& alone, const StageShares& shares,
                   const pipeline::PipelineSchedule& schedule, double message);
/// No schedule of so many stages takes less: the work of the busiest stage, and its share of the waiting.
double least_pipelined(const StepCost& alone, const StageShares& shares);

/// The request on as many ranks as one stage has, without the axis `pipeline`: every group of its mesh has as
/// many ranks on a node as it has on the request's.
PlanRequest without_pipeline(const PlanRequest& request);

/// Seconds of a message between two stages in which a rank sends its part of the residual of a micro-batch,
/// of which `ranks_of_sample` have a part each.
double message_seconds(const ModelSpec& spec, const Config& config, int ranks_of_sample,
                       const CostModel& rates);

}  // namespace tranche::planner
