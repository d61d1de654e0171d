#include "tools/train/profiling.h"

#include "tools/train/run.h"
#include "tranche/planner/planner.h"

namespace tranche::tools {

namespace {

MemoryFigures predict(const Run& run) {
  const Communicator& ranks = run.runtime->all();
  planner::PlanRequest request;
  request.model.name = run.options.model;
  request.model.language = run.settings.model;
  request.config = run.settings.config;
  request.sequence = run.settings.sequence;
  request.ranks = ranks.size();
  request.ranks_per_node = ranks.local_size();
  request.rank = ranks.rank();
  request.device = run.runtime->device().kind();
  return MemoryFigures::of(planner::plan_run(request).tiers);
}

}  // namespace

std::string write_profile(const Run& run) {
  const MemoryFigures predicted = predict(run);
  return run.profile->write(run.options.memory_profile, &predicted);
}

}  // namespace tranche::tools
