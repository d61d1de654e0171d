#include "planner/mesh_candidates.h"

#include <algorithm>
#include <utility>

#include "engine/pipeline_order.h"
#include "pipeline/schedule/simulate.h"
#include "tranche/core/error.h"
#include "tranche/planner/host_state.h"

namespace tranche::planner {

MeshCandidates::MeshCandidates(const MeshSearchRequest& request, const ModelSpec& spec)
    : request_(request), fit_(request.fit), spec_(spec), cases_(mesh_cases(request, spec)) {
  for (const MeshCase& one : cases_) {
    kept_back_.emplace_back(one.levers.size());
    if (!one.refused.empty() && first_refusal_.empty()) first_refusal_ = one.mesh + ": " + one.refused;
  }
}

Config MeshCandidates::config_of(const Candidate& one) const {
  Config config = with_levers(case_at(one).base, levers_at(one), one.micro_batch);
  if (const auto found = kept_.find(one.settings()); found != kept_.end()) {
    config.offload.host_state = found->second.bytes;
    config.offload.host_state_reason = found->second.reason;
  }
  return config;
}

void MeshCandidates::keep_in_host(const Candidate& one, std::int64_t bytes, const std::string& reason) {
  kept_[one.settings()] = {bytes, reason};
}

void MeshCandidates::push_all(int number, int lever, int before) {
  for (const std::int64_t micro_batch : cases_[static_cast<std::size_t>(number)].micro_batches) {
    if (before >= 0 && refused_.count({number, before, micro_batch}) > 0) continue;
    Candidate one{0, false, number, lever, micro_batch};
    const MeshCase& place = case_at(one);
    const StepCost alone = alone_cost(one, true);
    one.exact = place.stages() == 1;
    one.seconds = one.exact ? alone.total() : least_pipelined(alone, place.shares);
    queue_.push(one);
  }
}

void MeshCandidates::push_after(int number, int lever, int before) {
  kept_back(number, before).push_back(lever);
}

void MeshCandidates::expand(const Candidate& one) {
  const std::vector<int> levers = std::exchange(kept_back(one.place, one.lever), {});
  for (const int lever : levers) push_all(one.place, lever, one.lever);
}

bool MeshCandidates::next(Candidate& one, double limit) {
  while (!queue_.empty()) {
    one = queue_.top();
    if (one.seconds >= limit) return false;
    queue_.pop();
    if (one.exact) return true;
    try {
      one.seconds = formula_cost(one).total();
      one.exact = true;
      queue_.push(one);
    } catch (const ConfigurationError& error) {
      refuse(one, error.message());
    }
  }
  return false;
}

void MeshCandidates::refuse(const Candidate& one, const std::string& reason) {
  if (first_refusal_.empty()) first_refusal_ = case_at(one).mesh + ": " + reason;
  const std::vector<int>& after = kept_back(one.place, one.lever);
  refusals_ += 1 + static_cast<std::int64_t>(after.size());
  if (!after.empty()) refused_.insert(one.settings());
}

/// The configuration without a pipeline. With breadth-first, stage 3 gathers whole chunks, so that weights
/// are gathered once a step. Where `auto` is not resolved, no state stays, or for a `bound` as much as could.
Config MeshCandidates::alone_config(const Candidate& one, bool bound) const {
  Config config = config_of(one);
  config.mesh = case_at(one).alone.config.mesh;
  config.pipeline_stages = case_at(one).alone.config.pipeline_stages;
  const bool gathers_once = case_at(one).schedule == "breadth-first" && config.stage == 3;
  std::int64_t& host_state = config.offload.host_state;
  if (host_state < 0) host_state = bound ? most_host_state(fit_.plan.host_memory) : 0;
  if (case_at(one).stages() > 1) {
    config.pipeline_schedule = "1f1b";
    config.pipeline_chunks = 0;
    // The same share of the state of all stages stays in host memory as of the fullest one.
    host_state = static_cast<std::int64_t>(static_cast<double>(host_state) / case_at(one).shares.most_state);
  }
  if (gathers_once) config.gather_for = GatherFor::step;
  return config;
}

StepCost MeshCandidates::alone_cost(const Candidate& one, bool bound) const {
  const MeshCase& place = case_at(one);
  return cost_of(place.alone, alone_config(one, bound), spec_, place.sizes, place.rates);
}

/// The cost of a step under the case's schedule; `alone` is the step of one stage's ranks without the
/// pipeline. Throws ConfigurationError if the schedule does not allow the number of micro-batches.
StepCost MeshCandidates::with_schedule(const Candidate& one, const StepCost& alone) {
  const MeshCase& place = case_at(one);
  if (place.stages() == 1) return alone;
  const Config config = config_of(one);
  const double message = message_seconds(
      spec_, config, place.axes.size(MeshAxis::context) * place.axes.size(MeshAxis::tensor), place.rates);
  return pipelined(alone, place.shares, schedule_of(place, config.accumulation_steps), message);
}

const pipeline::PipelineSchedule& MeshCandidates::schedule_of(const MeshCase& place,
                                                              std::int64_t micro_batches) {
  const std::tuple key(place.schedule, place.stages(), micro_batches);
  const auto found = schedules_.find(key);
  if (found != schedules_.end()) return found->second;
  Config config = place.base;
  config.stage = 0;
  config.accumulation_steps = micro_batches;
  return schedules_.emplace(key, detail::schedule_of(config, place.stages())).first->second;
}

std::vector<std::int64_t> MeshCandidates::held_at_once(const Candidate& one) {
  return pipeline::peak_activations(schedule_of(case_at(one), config_of(one).accumulation_steps));
}

StepCost MeshCandidates::projected(const Candidate& one) {
  ProjectionRequest at = *request_.machine;
  at.plan = case_at(one).alone;
  at.plan.config = alone_config(one, false);
  // The ranks of all stages share a node, so the number is that of the whole mesh.
  if (at.sharing == 0) {
    at.sharing =
        fit_.plan.ranks_per_node > 0 ? std::min(fit_.plan.ranks_per_node, fit_.plan.ranks) : fit_.plan.ranks;
  }
  return with_schedule(one, projected_cost(at));
}

}  // namespace tranche::planner
