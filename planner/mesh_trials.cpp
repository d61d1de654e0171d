#include "planner/mesh_trials.h"

#include <algorithm>
#include <cstddef>

#include "pipeline/schedule/simulate.h"
#include "planner/planned_run.h"
#include "tranche/core/error.h"
#include "tranche/planner/host_state.h"

namespace tranche::planner {

namespace {

std::int64_t bytes_beyond(std::int64_t bytes, std::int64_t budget) {
  return budget == 0 ? 0 : std::max<std::int64_t>(0, bytes - budget);
}

}  // namespace

MeshTrials::MeshTrials(const MeshSearchRequest& request, MeshCandidates& candidates)
    : fit_(request.fit), candidates_(candidates), room_(request.fit.budget) {}

std::int64_t MeshTrials::state_bound(const MeshCase& one, const Levers& levers) const {
  const Config config = with_levers(one.base, levers, one.micro_batches.front());
  std::int64_t most = 0;
  for (const HeldState& held : one.held) {
    most = std::max(most, least_state_bytes(config, fit_.plan.ranks, held));
  }
  return most;
}

std::int64_t MeshTrials::bound_of(const Candidate& one, const Config& config) const {
  const MeshCase& place = candidates_.case_at(one);
  const auto known = activations_.find(work_of(one));
  std::int64_t most = 0;
  for (std::size_t rank = 0; rank < place.ranks.size(); ++rank) {
    most = std::max(most, least_state_bytes(config, fit_.plan.ranks, place.held[rank]) +
                              (known == activations_.end() ? 0 : known->second[rank]));
  }
  return most;
}

MeshTrials::Work MeshTrials::work_of(const Candidate& one) const {
  const MeshCase& place = candidates_.case_at(one);
  const Levers& levers = candidates_.levers_at(one);
  return {place.stages(),
          place.axes.size(MeshAxis::context),
          place.axes.size(MeshAxis::tensor),
          place.schedule,
          place.ranks.size(),
          levers.checkpoint_every,
          levers.vocabulary_chunk,
          levers.activations,
          one.micro_batch};
}

MeshTrials::Beside MeshTrials::beside_of(const Candidate& one) const {
  const MeshCase& place = candidates_.case_at(one);
  const Levers& levers = candidates_.levers_at(one);
  const Config config = candidates_.config_of(one);
  const int owners = owners_of(config, fit_.plan.ranks) / shards_of(config, fit_.plan.ranks);
  double shard = 0, trained = 0;
  for (const HeldState& held : place.held) {
    shard = std::max(shard, held.shard);
    trained = std::max(trained, held.trained_shard);
  }
  return {levers.stage,
          levers.reduction,
          levers.optimizer,
          levers.parameters,
          config.accumulation_steps == 1,
          owners,
          shard,
          trained};
}

void MeshTrials::note_memory_beside(const Candidate& one, const PlannedPeaks& peaks) {
  // A CPU's device memory is this machine's too, so that a setting that takes less of it leaves more for
  // state.
  const bool stays_by_lever =
      takes_auto(one) && fit_.plan.device == DeviceKind::cpu && fit_.plan.host_memory.found_here();
  const std::int64_t nvme = stays_by_lever ? 0 : peaks.nvme;
  if (candidates_.levers_at(one).activations || excess({0, peaks.host, nvme}) == 0) return;
  lacks_beside_.insert(beside_of(one));
}

/// Micro-batches of a trial: few enough to be quick, and with as many active at once as in the whole step.
std::int64_t MeshTrials::trial_micro_batches_of(const MeshCase& place, std::int64_t micro_batches) {
  const std::int64_t few = place.stages() == 1 ? trial_micro_batches : 2 * place.stages();
  if (micro_batches <= few || place.stages() == 1) return std::min(micro_batches, few);
  try {
    const bool alike = pipeline::peak_activations(candidates_.schedule_of(place, few)) ==
                       pipeline::peak_activations(candidates_.schedule_of(place, micro_batches));
    return alike ? few : micro_batches;
  } catch (const ConfigurationError&) {
    return micro_batches;  // the plan of the whole step will show whether it is refused
  }
}

/// Plans the ranks of a configuration: all of its micro-batches if `whole`, else those of a trial. With
/// `stop` it ends at the first rank that exceeds the room. `plan` receives the plan of the rank whose peaks
/// are returned; it may be null.
PlannedPeaks MeshTrials::plan_ranks(const Candidate& one, const Config& config, bool whole, bool stop,
                                    PlanResult* plan) {
  const MeshCase& place = candidates_.case_at(one);
  PlanRequest request = fit_.plan;
  request.rates = fit_.rates;
  request.config = config;
  const std::int64_t micro_batches =
      whole ? config.accumulation_steps : trial_micro_batches_of(place, config.accumulation_steps);
  if (micro_batches < config.accumulation_steps && !config.world_size_invariant) {
    request.config.accumulation_steps = micro_batches;
    request.config.train_batch_size = config.micro_batch_size * micro_batches * place.axes.data_ranks();
  }
  std::vector<std::int64_t>& activations = activations_[work_of(one)];
  activations.resize(place.ranks.size(), 0);
  PlannedPeaks most;
  for (std::size_t rank = 0; rank < place.ranks.size(); ++rank) {
    if (fit_.give_up && fit_.give_up()) throw Error("the search was given up");
    request.rank = place.ranks[rank];
    PlanResult result = plan_run(request);
    activations[rank] =
        std::max(activations[rank], result.tier(Tier::device).category_peak[Category::activations]);
    const PlannedPeaks peaks{result.tier(Tier::device).peak, result.tier(Tier::host).peak,
                             result.tier(Tier::nvme).peak, request.rank, false};
    const auto key = [&](const PlannedPeaks& of) { return std::pair(excess(of), of.device); };
    if (rank == 0 || key(most) < key(peaks)) {
      most = peaks;
      if (plan != nullptr) *plan = std::move(result);
    }
    most.all_ranks = rank + 1 == place.ranks.size();
    if (stop && excess(most) > 0) break;
  }
  return most;
}

PlannedPeaks MeshTrials::peaks_of_trial(const Candidate& one, bool all_ranks) {
  const auto found = peaks_.find(one.settings());
  if (found != peaks_.end() && (found->second.all_ranks || (!all_ranks && excess(found->second) > 0))) {
    return found->second;
  }
  const Config config = candidates_.config_of(one);
  const bool first = found == peaks_.end();
  const std::int64_t bound = first ? bound_of(one, config) : 0;
  PlannedPeaks peaks = plan_ranks(one, config, false, !all_ranks, nullptr);
  if (bytes_beyond(peaks.nvme, fit_.nvme_budget) > 0) resolve(one, !all_ranks, peaks);
  peaks_[one.settings()] = peaks;
  if (first) {
    planned_at_[one.settings()] = planned_.size();
    MeshTrial trial = described(one, peaks);
    trial.bound = bound;
    planned_.push_back(std::move(trial));
  }
  return peaks;
}

PlannedPeaks MeshTrials::peaks_of_step(const Candidate& one, PlanResult& plan) {
  return peaks_[one.settings()] = plan_ranks(one, candidates_.config_of(one), true, false, &plan);
}

bool MeshTrials::takes_auto(const Candidate& one) const {
  return candidates_.case_at(one).base.offload.host_state < 0 &&
         candidates_.config_of(one).offload.uses_nvme();
}

/// Replaces `auto` in the configuration from now on. Returns false if that was done before.
bool MeshTrials::resolve(const Candidate& one, bool stop, PlannedPeaks& peaks) {
  PlanRequest at = fit_.plan;
  at.config = candidates_.config_of(one);
  const OffloadConfig& offload = at.config.offload;
  if (!takes_auto(one) || offload.host_state >= 0) return false;
  resolve_host_state(at);
  candidates_.keep_in_host(one, offload.host_state, offload.host_state_reason);
  if (offload.host_state > 0) peaks = plan_ranks(one, at.config, false, stop, nullptr);
  return true;
}

void MeshTrials::resolve(const Candidate& one) {
  PlannedPeaks& peaks = peaks_.at(one.settings());
  if (!resolve(one, false, peaks)) return;
  MeshTrial& shown = planned_[planned_at_.at(one.settings())];
  const std::int64_t bound = shown.bound;
  shown = described(one, peaks);
  shown.bound = bound;
}

bool MeshTrials::keep_in_host(Candidate one) {
  if (!takes_auto(one)) return false;
  resolve(one);
  const double seconds = candidates_.formula_cost(one).total();
  if (seconds <= one.seconds) return false;
  one.seconds = seconds;
  candidates_.put_back(one);
  return true;
}

std::int64_t MeshTrials::excess(const PlannedPeaks& peaks, std::int64_t room) const {
  return bytes_beyond(peaks.device, room) + bytes_beyond(peaks.host, fit_.plan.host_memory.bytes) +
         bytes_beyond(peaks.nvme, fit_.nvme_budget);
}

MeshTrial MeshTrials::described(const Candidate& one, const PlannedPeaks& peaks) {
  const Config config = candidates_.config_of(one);
  MeshTrial made;
  made.mesh = candidates_.case_at(one).mesh;
  made.schedule = candidates_.case_at(one).schedule;
  FitTrial& trial = made.trial = trial_of(candidates_.levers_at(one));
  trial.micro_batch = one.micro_batch;
  trial.accumulation = config.accumulation_steps;
  trial.peak = peaks.device;
  trial.host = peaks.host;
  trial.nvme = peaks.nvme;
  trial.host_state = config.offload.host_state;
  trial.host_state_reason = config.offload.host_state_reason;
  made.missing = excess(peaks, fit_.budget);
  trial.fits = made.missing == 0;
  trial.cost = candidates_.planned_cost(one);
  made.seconds = trial.cost.total();
  made.planned = true;
  return made;
}

}  // namespace tranche::planner
