#include "tools/profiling.h"

#include "tools/run.h"
#include "tranche/planner/planner.h"

namespace tranche::tools {

namespace {

MemoryFigures predict(const Run& run) {
  const Communicator& ranks = run.runtime->all();
  planner::PlanRequest request;
  request.model.name = run.options.model;
  request.model.gpt = run.settings.model;
  request.config = run.settings.config;
  request.sequence = run.settings.sequence;
  request.ranks = ranks.size();
  request.ranks_per_node = ranks.local_size();
  request.rank = ranks.rank();
  request.device = run.runtime->device().kind();
  const planner::PlanResult plan = planner::plan_run(request);
  MemoryFigures figures;
  for (const Tier tier : all_tiers) {
    const TierAccount& account = plan.tier(tier);
    const auto t = static_cast<std::size_t>(tier);
    figures.peak[t] = account.peak;
    figures.at_peak[t] = account.at_peak;
    figures.highest[t] = account.category_peak;
  }
  return figures;
}

}  // namespace

std::string write_profile(const Run& run) {
  const MemoryFigures predicted = predict(run);
  return run.profile->write(run.options.memory_profile, &predicted);
}

}  // namespace tranche::tools
