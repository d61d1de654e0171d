#include "planner/record_steps.h"

#include "planner/planned_run.h"
#include "tranche/core/error.h"

namespace tranche::planner {

std::shared_ptr<detail::WorkRecorder> record_steps(const PlanRequest& request, int steps) {
  Config config = checked_config(request);
  if (config.mesh_of(request.ranks).size(MeshAxis::pipeline) > 1) {
    throw ConfigurationError("--machine projects meshes of replicate, shard and tensor; tranche.mesh \"" +
                             config.mesh +
                             "\" has a pipeline, whose messages it does not know: leave --machine out");
  }
  config.debug.poison_memory = false;
  const std::shared_ptr<detail::WorkRecorder> recorder =
      detail::WorkRecorder::make(request.device != DeviceKind::cuda);
  RuntimeOptions options = meta_options(config, request.device);
  options.recorder = recorder;
  Runtime runtime = planned_runtime(request, options);
  PlannedRun run(runtime, request, config);
  for (int step = 0; step < settling_steps + steps; ++step) {
    const bool settled = step >= settling_steps;
    if (settled) recorder->mark(step_mark);
    run.micro_batches();
    if (settled) recorder->mark(boundary_mark);
    (void)run.engine().step();
    if (settled) recorder->mark(end_mark);
  }
  return recorder;
}

}  // namespace tranche::planner
