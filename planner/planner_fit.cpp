// The search for the cheapest configuration that fits, on a given mesh.

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "planner/levers.h"
#include "planner/planned_run.h"
#include "planner/step_cost.h"
#include "tranche/core/error.h"
#include "tranche/core/shape.h"
#include "tranche/partition/mesh.h"
#include "tranche/planner/host_state.h"
#include "tranche/planner/planner.h"

namespace tranche::planner {

namespace {

/// A configuration that fits is planned again with up to this many micro-batches before it is compared, since
/// they may need slightly more memory.
constexpr std::int64_t most_run_micro_batches = 32;

/// Peak bytes of one rank.
struct Peaks {
  std::int64_t device = 0, host = 0, nvme = 0;
};

/// A configuration, whose host state may have been resolved, and its peaks.
struct Tried {
  Config config;
  Peaks peaks;
};

class Search {
 public:
  explicit Search(const FitRequest& request)
      : request_(request), base_(request.plan.config), spec_(planned_spec(request.plan)) {
    validate_config(base_, request.plan.ranks);
    base_.notes = request.plan.config.notes;  // those of this stage need not hold for another
    // Ranks of the axis `tensor` may hold parts of different sizes, and each of them has to fit.
    const std::vector<int> parts =
        base_.mesh_of(request.plan.ranks).group({MeshAxis::tensor}, request.plan.rank);
    for (const std::vector<int>& alike : equal_ranks(request.plan, parts)) {
      ranks_.push_back(parts[static_cast<std::size_t>(alike.front())]);
    }
    sizes_ = sizes_of(spec_, request.plan.model.covers_activations(), base_, request.plan.ranks);
    held_ = held_by(spec_, base_, request.plan.ranks, {ranks_.front()}).front();
    micro_batches_ = all_micro_batches(request, base_);
  }

  FitResult run() {
    std::vector<std::pair<double, Levers>> candidates;
    for (const Levers& levers : all_levers(request_, base_)) {
      candidates.emplace_back(cost(with_most_host_state(levers)).total(), levers);
    }
    // Candidates of equal cost keep their order, simplest first.
    std::stable_sort(candidates.begin(), candidates.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    FitResult result;
    double least_found = std::numeric_limits<double>::infinity();
    std::set<std::tuple<int, ReductionPolicy, OffloadTier, OffloadTier>> hopeless;
    for (const auto& [least_cost, levers] : candidates) {
      if (least_cost >= (request_.seconds ? too_dear : 1) * least_found) break;
      const std::tuple key(levers.stage, levers.reduction, levers.optimizer, levers.parameters);
      if (hopeless.count(key) > 0) continue;
      // If the formula only orders the trials, the search ends when no remaining candidate can be faster by
      // it.
      if (request_.seconds && std::isfinite(least_found) && !may_take_less(levers, least_found)) continue;
      result.ladder.push_back(attempt(levers));
      FitTrial& trial = result.ladder.back();
      // Micro-batch, checkpointing and head do not change the memory of state in host memory or on nvme.
      const Peaks beside{0, trial.host, stays_by_lever(levers) ? 0 : trial.nvme};
      if (trial.state_alone || (!levers.activations && !within(beside))) hopeless.insert(key);
      if (trial.fits) take_host_state(levers, trial);
      if (request_.seconds) trial.cost = trial.fits ? seconds_of(config_of(trial)) : StepCost{};
      if (trial.fits) least_found = std::min(least_found, trial.cost.total());
    }
    // A plan of the whole step decides whether the chosen configuration fits. This repeats until one does.
    for (;;) {
      result.chosen = best_of(result.ladder);
      FitTrial& chosen = result.ladder[result.chosen];
      result.config = config_of(chosen);
      std::tie(result.plan, result.rank) = plan(result.config, std::numeric_limits<std::int64_t>::max());
      const Peaks peaks = peaks_of(result.plan);
      result.fits = chosen.fits && within(peaks);
      result.missing = std::max<std::int64_t>(0, peaks.device - request_.budget);
      chosen.host = peaks.host;
      chosen.nvme = peaks.nvme;
      if (result.fits == chosen.fits) return result;
      chosen.fits = false;
      chosen.peak = peaks.device;
    }
  }

 private:
  /// The configuration with its largest micro-batch and all the host state that a budget could leave, so that
  /// no other has fewer bytes on disk. Its seconds are taken as a lower bound, which is not proven: buffers
  /// stay in the order of their units, and with more room other ones may stay.
  Config with_most_host_state(const Levers& levers) const {
    Config config = config_of(levers, micro_batches_.back());
    if (config.offload.host_state < 0) {
      config.offload.host_state = most_host_state(request_.plan.host_memory);
    }
    return config;
  }

  /// Lets state of a trial that is requested on nvme stay in the host memory that the budget leaves, where
  /// the configuration leaves that to `auto`.
  void take_host_state(const Levers& levers, FitTrial& trial) const {
    PlanRequest at = request_.plan;
    at.config = config_of(levers, trial.micro_batch);
    const OffloadConfig& offload = at.config.offload;
    if (!offload.uses_nvme() || trial.host_state >= 0) return;
    resolve_host_state(at);
    const Peaks peaks = offload.host_state == 0 ? Peaks{trial.peak, trial.host, trial.nvme}
                                                : peaks_of(plan(at.config, most_run_micro_batches).first);
    if (!within(peaks)) return;
    trial.peak = peaks.device;
    trial.host = peaks.host;
    trial.nvme = peaks.nvme;
    trial.host_state = offload.host_state;
    trial.host_state_reason = offload.host_state_reason;
    trial.cost = cost(at.config);
  }

  /// True if what stays in host memory depends on the device memory: a CPU's is this machine's too.
  bool stays_by_lever(const Levers& levers) const {
    const OffloadConfig& offload = config_of(levers, micro_batches_.front()).offload;
    return offload.uses_nvme() && offload.host_state < 0 && request_.plan.device == DeviceKind::cpu &&
           request_.plan.host_memory.found_here();
  }

  /// Plans a configuration. Where it exceeds the budget of nvme, `auto` is resolved first, as a run
  /// resolves it.
  Tried tried(const Config& config, std::int64_t micro_batches) const {
    PlanRequest at = request_.plan;
    at.config = config;
    Peaks peaks = peaks_of(plan(config, micro_batches).first);
    if (config.offload.host_state < 0 && !within({0, 0, peaks.nvme})) {
      resolve_host_state(at);
      if (at.config.offload.host_state > 0) peaks = peaks_of(plan(at.config, micro_batches).first);
    }
    return {std::move(at.config), peaks};
  }

  /// Bytes beyond the budgets.
  std::int64_t excess(const Peaks& peaks) const {
    const auto over = [](std::int64_t bytes, std::int64_t budget) {
      return budget == 0 ? 0 : std::max<std::int64_t>(0, bytes - budget);
    };
    return over(peaks.device, request_.budget) + over(peaks.host, request_.plan.host_memory.bytes) +
           over(peaks.nvme, request_.nvme_budget);
  }

  /// The cheapest that fits, the first among equals; if none fits, the planned one that exceeds the budget
  /// least.
  std::size_t best_of(const std::vector<FitTrial>& ladder) const {
    const auto rank = [this](const FitTrial& trial) {
      const auto beyond_all = static_cast<double>(excess({trial.peak, trial.host, trial.nvme}));
      const double order = trial.fits ? trial.cost.total() : beyond_all;
      return std::tuple(!trial.fits, trial.state_alone, order);
    };
    const auto best = std::min_element(ladder.begin(), ladder.end(),
                                       [&](const auto& a, const auto& b) { return rank(a) < rank(b); });
    return static_cast<std::size_t>(best - ladder.begin());
  }

  static Levers levers_of(const FitTrial& trial) {
    return {trial.stage,     trial.reduction,  trial.checkpoint_every, trial.vocabulary_chunk,
            trial.optimizer, trial.parameters, trial.activations};
  }
  static Peaks peaks_of(const PlanResult& plan) {
    return {plan.tier(Tier::device).peak, plan.tier(Tier::host).peak, plan.tier(Tier::nvme).peak};
  }
  bool within(const Peaks& peaks) const { return excess(peaks) == 0; }

  Config config_of(const Levers& levers, std::int64_t micro_batch) const {
    return with_levers(base_, levers, micro_batch);
  }
  Config config_of(const FitTrial& trial) const {
    Config config = config_of(levers_of(trial), trial.micro_batch);
    config.offload.host_state = trial.host_state;
    config.offload.host_state_reason = trial.host_state_reason;
    return config;
  }

  StepCost cost(const Config& config) const {
    return cost_of(request_.plan, config, spec_, sizes_, request_.rates);
  }

  /// Seconds by FitRequest::seconds.
  StepCost seconds_of(const Config& config) const {
    PlanRequest candidate = request_.plan;
    candidate.config = config;
    return request_.seconds(candidate);
  }

  /// True if a configuration takes less than `seconds` with its largest micro-batch. Offload hides neither
  /// computation nor the waiting that exists without it; that bound excludes most offloaded configurations
  /// without a simulation.
  bool may_take_less(const Levers& levers, double seconds) {
    const std::int64_t largest = micro_batches_.back();
    Levers resident = levers;
    resident.optimizer = resident.parameters = OffloadTier::none;
    resident.activations = false;
    const bool one = config_of(levers, largest).accumulation_steps == 1;  // then both policies are the same
    if (one) resident.reduction = all_policies(request_, base_).front();
    const auto [found, added] = resident_seconds_.try_emplace(
        {resident.stage, resident.reduction, resident.checkpoint_every, resident.vocabulary_chunk});
    if (added) found->second = seconds_of(config_of(resident, largest));
    const StepCost& least = found->second;
    if (least.total() - least.other >= seconds) return false;
    const bool offloads =
        levers.optimizer != OffloadTier::none || levers.parameters != OffloadTier::none || levers.activations;
    return (offloads ? seconds_of(with_most_host_state(levers)) : least).total() < seconds;
  }

  /// The plan of the worst rank (the most bytes beyond the budgets, else the most device memory) and that
  /// rank. A step has at most `micro_batches` micro-batches.
  std::pair<PlanResult, int> plan(const Config& config, std::int64_t micro_batches) const {
    std::pair<PlanResult, int> most;
    for (const int rank : ranks_) {
      PlanResult plan = plan_of(rank, config, micro_batches);
      const auto key = [&](const PlanResult& of) {
        return std::pair(excess(peaks_of(of)), of.tier(Tier::device).peak);
      };
      if (rank == ranks_.front() || key(most.first) < key(plan)) most = {std::move(plan), rank};
    }
    return most;
  }

  PlanResult plan_of(int rank, const Config& config, std::int64_t micro_batches) const {
    if (request_.give_up && request_.give_up()) throw Error("the search was given up");
    PlanRequest request = request_.plan;
    request.rank = rank;
    request.rates = request_.rates;
    request.config = config;
    if (config.accumulation_steps > micro_batches) {
      request.config.accumulation_steps = micro_batches;
      request.config.train_batch_size =
          config.micro_batch_size * micro_batches * config.data_ranks(request.ranks);
    }
    return plan_run(request);
  }

  FitTrial attempt(const Levers& levers) const {
    FitTrial trial = trial_of(levers);
    const auto set = [&](const Tried& of) {
      const auto& [config, peaks] = of;
      trial.micro_batch = config.micro_batch_size;
      trial.accumulation = config.accumulation_steps;
      trial.peak = peaks.device;
      trial.host = peaks.host;
      trial.nvme = peaks.nvme;
      trial.host_state = config.offload.host_state;
      trial.host_state_reason = config.offload.host_state_reason;
      trial.fits = !trial.state_alone && within(peaks);
      trial.cost = cost(config);
    };
    const auto tried_at = [&](std::int64_t micro_batch, std::int64_t micro_batches) {
      return tried(config_of(levers, micro_batch), micro_batches);
    };
    if (const std::int64_t least = least_state_bytes(config_of(levers, 1), request_.plan.ranks, held_);
        least > request_.budget) {
      trial.state_alone = true;
      set({config_of(levers, micro_batches_.front()), {least, 0, 0}});
      return trial;
    }
    set(tried_at(micro_batches_.front(), trial_micro_batches));
    if (!trial.fits) {
      // If one micro-batch makes the step, offloaded state takes the main gradient off the device.
      const std::int64_t largest = micro_batches_.back();
      if (levers.optimizer == OffloadTier::none || micro_batches_.size() == 1 ||
          config_of(levers, largest).accumulation_steps > 1) {
        return trial;
      }
      const FitTrial smallest = trial;
      set(tried_at(largest, trial_micro_batches));
      return trial.fits ? trial : smallest;
    }
    // Memory grows with the micro-batch.
    std::size_t fitting = 0, beyond_budget = micro_batches_.size();
    while (beyond_budget - fitting > 1) {
      // The search begins with the largest, which is often the answer.
      const std::size_t middle =
          beyond_budget == micro_batches_.size() ? beyond_budget - 1 : (fitting + beyond_budget) / 2;
      const Tried of = tried_at(micro_batches_[middle], trial_micro_batches);
      if (!within(of.peaks)) {
        beyond_budget = middle;
      } else {
        fitting = middle;
        set(of);
      }
    }
    // More micro-batches than those of the trial may need slightly more memory.
    for (bool smaller = false;; smaller = true, --fitting) {
      const std::int64_t micro_batch = micro_batches_[fitting];
      if (smaller || config_of(levers, micro_batch).accumulation_steps > trial_micro_batches) {
        set(tried_at(micro_batch, most_run_micro_batches));
      }
      if (trial.fits || fitting == 0) return trial;
    }
  }

  const FitRequest& request_;
  Config base_;
  ModelSpec spec_;
  std::vector<int> ranks_;  ///< one rank of each class with equal plans
  Sizes sizes_;
  HeldState held_;
  std::vector<std::int64_t> micro_batches_;  ///< ascending
  /// FitRequest::seconds of configurations without offload, by stage, policy, checkpointing and head.
  std::map<std::tuple<int, ReductionPolicy, int, std::int64_t>, StepCost> resident_seconds_;
};

}  // namespace

FitResult find_fit(const FitRequest& request) {
  if (const Mesh mesh = request.plan.config.mesh_of(request.plan.ranks); mesh.size(MeshAxis::pipeline) > 1) {
    throw ConfigurationError(
        "--fit searches on replicate, shard, context and tensor; tranche.mesh \"" + request.plan.config.mesh +
        "\" has a pipeline: plan its stages with --rank, or search with --mesh 'search, pipeline=" +
        std::to_string(mesh.size(MeshAxis::pipeline)) + "'");
  }
  if (request.budget < 1)
    throw InvalidArgument("a budget of " + std::to_string(request.budget) + " bytes; it must be at least 1");
  return Search(request).run();
}

}  // namespace tranche::planner
