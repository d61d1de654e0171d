#pragma once
/// The seconds of a step with a pipeline, derived from the seconds without one. Private to planner/.

#include <cstdint>
#include <vector>

#include "pipeline/schedule/pipeline_schedule.h"
#include "tranche/engine/model_spec.h"
#include "tranche/planner/planner.h"

namespace tranche::planner {

/// The share of each pipeline stage in the model.
struct StageShares {
  std::vector<double> operations;  ///< shares of forward's operations, which add up to 1
  double most_operations = 1;      ///< the largest of these shares
  double most_state = 1;           ///< the largest share of one stage in the elements of all buffers
};
/// The shares under the schedule of `config`, whose mesh has `stages` stages. `held`: the elements that each
/// stage holds. Throws ConfigurationError if the model or the schedule cannot be cut into so many stages.
StageShares stage_shares(const ModelSpec& spec, const Config& config, int stages,
                         const std::vector<double>& held);

/// The seconds of a step under the schedule. `alone` is the step of a rank that computes the whole model on a
/// mesh without the axis `pipeline`; each message takes `message` seconds. A stage computes its share of the
/// work. Its waiting is at most the waiting of `alone` times `most_state`.
StepCost pipelined(const StepCost& alone, const StageShares& shares,
                   const pipeline::PipelineSchedule& schedule, double message);
/// A lower bound for every schedule of as many stages: the work of the busiest stage and its share of the
/// waiting.
double least_pipelined(const StepCost& alone, const StageShares& shares);

/// The request with the ranks of one stage and without the axis `pipeline`. Every group of its mesh has as
/// many ranks on a node as in the original.
PlanRequest without_pipeline(const PlanRequest& request);

/// Seconds of a message between two stages. A rank sends its part of a micro-batch's residual, which
/// `ranks_of_sample` ranks share.
double message_seconds(const ModelSpec& spec, const Config& config, int ranks_of_sample,
                       const CostModel& rates);

}  // namespace tranche::planner
