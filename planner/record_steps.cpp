#include "planner/record_steps.h"

#include "planner/planned_run.h"

namespace tranche::planner {

std::shared_ptr<detail::WorkRecorder> record_steps(const PlanRequest& request, int steps) {
  Config config = checked_config(request);
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
