// The search for a mesh. A case is a mesh under one schedule; a lever is a combination of all other settings
// but the micro-batch; a candidate is a case, a lever and a micro-batch. A trial plans a candidate on the
// meta device (planned_run.h), which takes far longer than a formula. So the search evaluates formulas for
// many candidates and plans few:
//
//   add_roots() ---> queue_ ---> next() ---> judge() -- fits --> first_that_fit(): plan of the whole step,
//       |              ^                        |                or with a machine choose(): simulation
//       |              +------- expand() <------+ does not fit: failures_; levers with less memory are queued
//       +-> failures_: state alone exceeds the budget
//
// Order. The queue yields candidates in ascending order of their seconds by formula. For a pipeline the
// seconds are first a lower bound over all schedules (least_pipelined()); a candidate that reaches the front
// is put back with the seconds under its own schedule. The first candidate that fits is therefore the fastest
// by formula.
//
// Bounds. judge() excludes a candidate without a trial for one of these reasons, each of which is certain:
//  - state: least_state_bytes(), which no plan is below, exceeds the budget, or a plan of equal state
//    exceeded the budget of host memory or nvme (lacks_beside_);
//  - activations: state plus the activations that a trial of equal stages measured exceeds the budget
//    (activations_; they depend on neither the ZeRO stage nor the tier of state);
//  - micro-batch: the same candidate with the smallest micro-batch does not fit (least_fits_).
//
// State on nvme. As long as tranche.host_state is auto, the seconds of a candidate with state on nvme count
// all the host state that its budget could leave: a lower bound. Once such a candidate fits, keep_in_host()
// plans what its budget does leave, and the candidate goes back to the queue with the seconds of that.
//
// With MeshSearchRequest::exhaustive every candidate is planned, and tests compare both results.
//
// With a machine the search goes on to the best candidate of each case and ZeRO stage that the formula calls
// less than `too_dear` times slower than the first, and choose() takes the one whose simulation
// (projection.cpp) is fastest.
#include "tranche/planner/mesh_search.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <map>
#include <queue>
#include <set>
#include <tuple>
#include <utility>

#include "engine/pipeline_order.h"
#include "pipeline/schedule/generators.h"
#include "pipeline/schedule/simulate.h"
#include "planner/levers.h"
#include "planner/mesh_cost.h"
#include "planner/planned_run.h"
#include "planner/step_cost.h"
#include "tranche/core/error.h"
#include "tranche/partition/mesh.h"
#include "tranche/planner/host_state.h"

namespace tranche::planner {

namespace {

/// If a machine's simulation decides, at most this many candidates are simulated, the fastest by formula.
constexpr std::size_t most_projected = 32;
/// Limits of plans: for the next best configuration, and for the least excess if nothing fits.
constexpr int most_alternatives = 64, most_failures = 400;

/// A mesh under one schedule, with everything that does not depend on the other settings.
struct MeshCase {
  std::string mesh;
  Mesh axes{1};
  std::string schedule;         ///< empty if there is no pipeline
  Config base;                  ///< complete, with the smallest micro-batch
  std::string refused;          ///< the reason why every run refuses the mesh; empty if runs accept it
  std::vector<int> ranks;       ///< one rank of each class of equal plans, those of the first and last stage
                                ///< first
  std::vector<HeldState> held;  ///< sizes that each of `ranks` holds
  StageShares shares;           ///< used with a pipeline
  PlanRequest alone;            ///< the ranks of one stage, without the pipeline
  Sizes sizes;                  ///< sizes on the mesh of `alone`
  CostModel rates;
  std::vector<Levers> levers;               ///< simplest first
  std::vector<std::vector<int>> dearer;     ///< by lever: the levers with less memory and more time, tried
                                            ///< once this one does not fit
  std::vector<std::int64_t> micro_batches;  ///< ascending
  int stages() const { return axes.size(MeshAxis::pipeline); }
};

struct Candidate {
  double seconds = 0;  ///< by formula; a lower bound over all schedules if not `exact`
  bool exact = false;
  int place = 0, lever = 0;
  std::int64_t micro_batch = 1;
  /// The order of trial: at equal seconds the simplest first, with its largest micro-batch.
  auto key() const { return std::tuple(seconds, exact, place, lever, -micro_batch); }
  friend bool operator>(const Candidate& a, const Candidate& b) { return a.key() > b.key(); }
};

/// The peaks of a configuration on its worst rank: the one with the most bytes beyond the budgets, else with
/// the most device memory.
struct PlannedPeaks {
  std::int64_t device = 0, host = 0, nvme = 0;
  int rank = 0;
  bool all_ranks = false;  ///< false if planning stopped at the first rank that does not fit
};

/// A configuration that does not fit, with the bytes that are missing.
struct Failure {
  Candidate candidate;
  std::int64_t missing = 0;
  bool resolved = false;  ///< planned on all ranks, so that `missing` is exact
};

enum class Verdict { fits, by_state, by_activations, by_micro_batch, refused, too_large };

std::int64_t bytes_beyond(std::int64_t bytes, std::int64_t budget) {
  return budget == 0 ? 0 : std::max<std::int64_t>(0, bytes - budget);
}

class MeshSearch {
 public:
  explicit MeshSearch(const MeshSearchRequest& request)
      : request_(request), fit_(request.fit), room_(request.fit.budget), spec_(planned_spec(fit_.plan)) {
    Config given = fit_.plan.config;
    validate_config(given, fit_.plan.ranks);
    samples_ = given.train_batch_size;
    given_micro_batch_ = given.micro_batch_size;
    for (const std::string& mesh : all_meshes(fit_.plan.ranks, request.axes)) {
      result_.meshes.push_back({mesh, {}, {}});
      for (const std::string& schedule : schedules_of(mesh)) cases_.push_back(case_of(mesh, schedule));
    }
  }

  MeshSearchResult run() {
    for (int number = 0; number < static_cast<int>(cases_.size()); ++number) add_roots(number);
    std::vector<MeshTrial> fitting = request_.exhaustive ? all_that_fit() : first_that_fit();
    const SearchCounts counts = result_.counts;
    choose(fitting);
    if (result_.fits) {
      find_less_time();
    } else {
      find_least_missing();
    }
    judge_meshes();
    if (result_.fits) {
      // Plans against less room than the budget do not show whether a mesh fits the budget.
      const std::size_t planned = result_.planned.size();
      find_less_memory(fitting);
      result_.planned.resize(planned);
    }
    result_.counts = counts;
    SearchCounts& all = result_.counts;
    all.projected = request_.machine ? std::ssize(fitting) : 0;
    all.by_time =
        all.all - all.by_state - all.by_activations - all.by_micro_batch - all.refused - all.planned;
    return std::move(result_);
  }

 private:
  std::vector<std::string> schedules_of(const std::string& mesh) const {
    const Config& config = fit_.plan.config;
    if (Mesh::parse(mesh, fit_.plan.ranks).size(MeshAxis::pipeline) == 1) return {""};
    if (config.pipeline_schedule != "1f1b" || config.pipeline_chunks > 0) return {config.pipeline_schedule};
    std::vector<std::string> names;
    for (const pipeline::NamedSchedule& named : pipeline::named_schedules()) names.emplace_back(named.name);
    // The default schedule is first, so that it wins among equals.
    std::stable_partition(names.begin(), names.end(), [](const std::string& name) { return name == "1f1b"; });
    return names;
  }

  MeshCase case_of(const std::string& mesh, const std::string& schedule) const {
    MeshCase one;
    one.mesh = mesh;
    one.schedule = schedule;
    one.base = fit_.plan.config;
    one.base.mesh = mesh;
    if (!schedule.empty()) one.base.pipeline_schedule = schedule;
    try {
      one.axes = one.base.mesh_of(fit_.plan.ranks);
      require_sequence_parts(one.axes.size(MeshAxis::context));
      take_batch(one);
      one.levers = all_levers(fit_, one.base);
      if (one.stages() > 1) {
        // Each micro-batch would gather the weights of a stage again, and several micro-batches are active at
        // once.
        std::erase_if(one.levers, [&](const Levers& levers) {
          return levers.activations || (levers.parameters != OffloadTier::none && !fit_.keep_parameters_tier);
        });
      }
      if (one.levers.empty()) throw ConfigurationError("no tier that is given goes with a pipeline");
      one.micro_batches = all_micro_batches(fit_, one.base);
      take_ranks(one);
      PlanRequest whole = fit_.plan;
      whole.config = one.base;
      one.alone = without_pipeline(whole);
      one.sizes = sizes_of(spec_, fit_.plan.model.covers_activations(), one.alone.config, one.alone.ranks);
      one.rates = fit_.rates;
      if (request_.machine) take_links(one, whole);
    } catch (const ConfigurationError& error) {
      one.refused = error.message();
    } catch (const InvalidArgument& error) {
      one.refused = error.message();
    }
    return one;
  }

  /// Throws for sequences that a run would refuse to cut at its start.
  void require_sequence_parts(int ranks) const {
    if (ranks == 1 || (spec_.sequence_parts && spec_.tokens_per_sample >= 2 * ranks)) return;
    throw ConfigurationError(spec_.sequence_parts
                                 ? fmt::format("sequences of {} tokens cannot be cut into {} parts",
                                               spec_.tokens_per_sample, 2 * ranks)
                                 : fmt::format("{} computes no parts of sequences",
                                               spec_.name.empty() ? "the model" : spec_.name));
  }

  /// Divides the samples of a step into the smallest micro-batches.
  void take_batch(MeshCase& one) const {
    one.base.train_batch_size = samples_;
    one.base.micro_batch_size = given_micro_batch_;
    one.base.accumulation_steps = 0;
    if (one.base.world_size_invariant) return validate_config(one.base, fit_.plan.ranks);
    const std::int64_t data_ranks = one.axes.data_ranks();
    const std::int64_t micro = fit_.keep_micro_batch ? given_micro_batch_ : 1;
    if (samples_ % (data_ranks * micro) != 0) {
      throw ConfigurationError(
          fmt::format("the {} samples of a step cannot be shared by {} data ranks{}", samples_, data_ranks,
                      micro > 1 ? fmt::format(" in micro-batches of {}", micro) : std::string()));
    }
    one.base.micro_batch_size = micro;
    one.base.accumulation_steps = samples_ / data_ranks / micro;
  }

  void take_ranks(MeshCase& one) const {
    PlanRequest request = fit_.plan;
    request.config = with_levers(one.base, one.levers.front(), one.micro_batches.front());
    std::vector<int> stage_ranks = one.axes.group({MeshAxis::pipeline}, 0);
    if (stage_ranks.size() > 2) std::swap(stage_ranks[1], stage_ranks.back());
    std::vector<int> first;  // index of the first rank of each stage
    for (const int rank : stage_ranks) {
      const std::vector<int> parts = one.axes.group({MeshAxis::tensor}, rank);
      first.push_back(static_cast<int>(one.ranks.size()));
      for (const std::vector<int>& alike : equal_ranks(request, parts)) {
        one.ranks.push_back(parts[static_cast<std::size_t>(alike.front())]);
      }
    }
    one.held = held_by(spec_, request.config, fit_.plan.ranks, one.ranks);
    if (one.stages() == 1) return;
    std::vector<double> elements;
    for (const int index : first) elements.push_back(one.held[static_cast<std::size_t>(index)].whole);
    one.shares = stage_shares(spec_, request.config, one.stages(), elements);
  }

  void take_links(MeshCase& one, const PlanRequest& whole) const {
    ProjectionRequest at = *request_.machine;
    at.plan = whole;
    for (const auto& [axis, rate] : {std::pair(MeshAxis::shard, &one.rates.network),
                                     std::pair(MeshAxis::replicate, &one.rates.over_replicate),
                                     std::pair(MeshAxis::context, &one.rates.over_context),
                                     std::pair(MeshAxis::tensor, &one.rates.over_tensor),
                                     std::pair(MeshAxis::pipeline, &one.rates.over_pipeline)}) {
      const bool several = axis == MeshAxis::shard ? one.axes.state_ranks() > 1 : one.axes.size(axis) > 1;
      if (several) *rate = axis_rate(at, axis);
    }
  }

  const MeshCase& case_at(const Candidate& one) const { return cases_[static_cast<std::size_t>(one.place)]; }
  const Levers& levers_at(const Candidate& one) const {
    return case_at(one).levers[static_cast<std::size_t>(one.lever)];
  }
  using Key = std::tuple<int, int, std::int64_t>;
  static Key key_of(const Candidate& one) { return {one.place, one.lever, one.micro_batch}; }
  Config config_of(const Candidate& one) const {
    Config config = with_levers(case_at(one).base, levers_at(one), one.micro_batch);
    if (const auto found = kept_.find(key_of(one)); found != kept_.end()) {
      config.offload.host_state = found->second.bytes;
      config.offload.host_state_reason = found->second.reason;
    }
    return config;
  }

  /// Lower bound of the device memory in bytes of rank `rank` of the case (an index in `ranks`).
  std::int64_t state_bound(const MeshCase& one, const Config& config, std::size_t rank) const {
    return least_state_bytes(config, fit_.plan.ranks, one.held[rank]);
  }

  /// Counts the configurations of a case and queues the simplest ones among those whose state fits.
  void add_roots(int number) {
    MeshCase& one = cases_[static_cast<std::size_t>(number)];
    const auto micro_batches = static_cast<std::int64_t>(one.micro_batches.size());
    if (!one.refused.empty()) {
      if (first_refusal_.empty()) first_refusal_ = one.mesh + ": " + one.refused;
      return;
    }
    result_.counts.all += micro_batches * static_cast<std::int64_t>(one.levers.size());
    using State = std::tuple<int, ReductionPolicy, OffloadTier, OffloadTier>;
    std::map<State, int> first_of;  // first lever with this state; -1 if the state does not fit
    std::map<std::pair<int, ReductionPolicy>, int> resident;
    one.dearer.resize(one.levers.size());
    for (int lever = 0; lever < static_cast<int>(one.levers.size()); ++lever) {
      const Levers& levers = one.levers[static_cast<std::size_t>(lever)];
      const State state(levers.stage, levers.reduction, levers.optimizer, levers.parameters);
      const auto [found, added] = first_of.try_emplace(state, lever);
      if (added && !request_.exhaustive) {
        const std::int64_t bound = most_state(one, levers);
        if (bound > room_) {
          found->second = -1;
          for (const int of_state : std::set<int>{lever, smallest_of(one, lever)}) {
            failures_.push_back(
                {{0, false, number, of_state, one.micro_batches.front()}, bound - room_, false});
          }
        }
      }
      if (found->second < 0) {
        result_.counts.by_state += micro_batches;
        continue;
      }
      // Settings that save memory cost time, so they are queued only when the simpler setting does not fit.
      const bool all_on_device = levers.optimizer == one.levers.front().optimizer &&
                                 levers.parameters == one.levers.front().parameters;
      const std::pair kind(levers.stage, levers.reduction);
      if (added && all_on_device) resident[kind] = lever;
      const auto simplest = resident.find(kind);
      const int before = simplest != resident.end() ? simplest->second : found->second;
      if (before != lever && !request_.exhaustive) {
        one.dearer[static_cast<std::size_t>(before)].push_back(lever);
      } else {
        push_all(number, lever);
      }
    }
  }

  std::int64_t most_state(const MeshCase& one, const Levers& levers) const {
    const Config config = with_levers(one.base, levers, one.micro_batches.front());
    std::int64_t most = 0;
    for (std::size_t rank = 0; rank < one.held.size(); ++rank) {
      most = std::max(most, state_bound(one, config, rank));
    }
    return most;
  }

  /// The lever with the same state as `lever` that should take the least memory: checkpoints for every block,
  /// and the chunked head.
  static int smallest_of(const MeshCase& one, int lever) {
    const Levers& given = one.levers[static_cast<std::size_t>(lever)];
    int best = lever;
    for (int other = lever; other < static_cast<int>(one.levers.size()); ++other) {
      const Levers& levers = one.levers[static_cast<std::size_t>(other)];
      if (std::tie(levers.stage, levers.reduction, levers.optimizer, levers.parameters) !=
              std::tie(given.stage, given.reduction, given.optimizer, given.parameters) ||
          levers.activations) {
        continue;
      }
      if (levers.checkpoint_every <= 1) best = other;
    }
    return best;
  }

  /// Queues a lever with each micro-batch, except those that were refused for the simpler lever `before`.
  void push_all(int number, int lever, int before = -1) {
    for (const std::int64_t micro_batch : cases_[static_cast<std::size_t>(number)].micro_batches) {
      if (before >= 0 && refused_.count({number, before, micro_batch}) > 0) continue;
      Candidate one{0, false, number, lever, micro_batch};
      const MeshCase& place = case_at(one);
      const StepCost alone = alone_cost(one);
      one.exact = place.stages() == 1;
      one.seconds = one.exact ? alone.total() : least_pipelined(alone, place.shares);
      queue_.push(one);
    }
  }

  /// The configuration without a pipeline. With breadth-first, stage 3 gathers whole chunks, so that weights
  /// are gathered once a step.
  Config alone_config(const Candidate& one) const {
    Config config = config_of(one);
    config.mesh = case_at(one).alone.config.mesh;
    config.pipeline_stages = case_at(one).alone.config.pipeline_stages;
    const bool gathers_once = case_at(one).schedule == "breadth-first" && config.stage == 3;
    std::int64_t& host_state = config.offload.host_state;
    if (host_state < 0) host_state = most_host_state(fit_.plan.host_memory);
    if (case_at(one).stages() > 1) {
      config.pipeline_schedule = "1f1b";
      config.pipeline_chunks = 0;
      // The same share of the state of all stages stays as of the fullest one.
      host_state =
          static_cast<std::int64_t>(static_cast<double>(host_state) / case_at(one).shares.most_state);
    }
    if (gathers_once) config.gather_for = GatherFor::step;
    return config;
  }
  StepCost alone_cost(const Candidate& one) const {
    const MeshCase& place = case_at(one);
    return cost_of(place.alone, alone_config(one), spec_, place.sizes, place.rates);
  }

  /// The cost of a step under the case's schedule; `alone` is the step of one stage's ranks without the
  /// pipeline. Throws ConfigurationError if the schedule does not allow the number of micro-batches.
  StepCost with_schedule(const Candidate& one, const StepCost& alone) {
    const MeshCase& place = case_at(one);
    if (place.stages() == 1) return alone;
    const Config config = config_of(one);
    const double message = message_seconds(
        spec_, config, place.axes.size(MeshAxis::context) * place.axes.size(MeshAxis::tensor), place.rates);
    return pipelined(alone, place.shares, schedule_of(place, config.accumulation_steps), message);
  }
  StepCost formula_cost(const Candidate& one) { return with_schedule(one, alone_cost(one)); }

  const pipeline::PipelineSchedule& schedule_of(const MeshCase& place, std::int64_t micro_batches) {
    const std::tuple key(place.schedule, place.stages(), micro_batches);
    const auto found = schedules_.find(key);
    if (found != schedules_.end()) return found->second;
    Config config = place.base;
    config.stage = 0;
    config.accumulation_steps = micro_batches;
    return schedules_.emplace(key, detail::schedule_of(config, place.stages())).first->second;
  }

  /// Micro-batches of a trial: few enough to be quick, and with as many active at once as in the whole step.
  std::int64_t trial_of(const MeshCase& place, std::int64_t micro_batches) {
    const std::int64_t few = place.stages() == 1 ? trial_micro_batches : 2 * place.stages();
    if (micro_batches <= few || place.stages() == 1) return std::min(micro_batches, few);
    try {
      const bool alike = pipeline::peak_activations(schedule_of(place, few)) ==
                         pipeline::peak_activations(schedule_of(place, micro_batches));
      return alike ? few : micro_batches;
    } catch (const ConfigurationError&) {
      return micro_batches;  // the plan of the whole step will show whether it is refused
    }
  }

  std::int64_t excess(const PlannedPeaks& peaks, std::int64_t room) const {
    return bytes_beyond(peaks.device, room) + bytes_beyond(peaks.host, fit_.plan.host_memory.bytes) +
           bytes_beyond(peaks.nvme, fit_.nvme_budget);
  }

  // Key of activation memory, which depends on neither the ZeRO stage nor the tier of state.
  using Work = std::tuple<int, int, int, std::string, std::size_t, int, std::int64_t, bool, std::int64_t>;
  Work work_of(const Candidate& one) const {
    const MeshCase& place = case_at(one);
    const Levers& levers = levers_at(one);
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

  /// Lower bound of the configuration's device memory: its state, plus activations if a plan has measured
  /// them.
  std::int64_t bound_of(const Candidate& one, const Config& config) const {
    const MeshCase& place = case_at(one);
    const auto known = activations_.find(work_of(one));
    std::int64_t most = 0;
    for (std::size_t rank = 0; rank < place.ranks.size(); ++rank) {
      most = std::max(
          most, state_bound(place, config, rank) + (known == activations_.end() ? 0 : known->second[rank]));
    }
    return most;
  }

  /// Plans the ranks of a configuration: all of its micro-batches if `whole`, else those of a trial. With
  /// `stop` it ends at the first rank that exceeds the room. `plan` receives the plan of the rank whose peaks
  /// are returned; it may be null.
  PlannedPeaks plan_ranks(const Candidate& one, const Config& config, bool whole, bool stop,
                          PlanResult* plan = nullptr) {
    const MeshCase& place = case_at(one);
    PlanRequest request = fit_.plan;
    request.rates = fit_.rates;
    request.config = config;
    const std::int64_t micro_batches =
        whole ? config.accumulation_steps : trial_of(place, config.accumulation_steps);
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
      const auto key = [&](const PlannedPeaks& of) { return std::pair(excess(of, room_), of.device); };
      if (rank == 0 || key(most) < key(peaks)) {
        most = peaks;
        if (plan != nullptr) *plan = std::move(result);
      }
      most.all_ranks = rank + 1 == place.ranks.size();
      if (stop && excess(most, room_) > 0) break;
    }
    return most;
  }

  /// The peaks of a trial; each trial is planned at most once. Throws what a run would refuse.
  PlannedPeaks trial_peaks(const Candidate& one, bool all_ranks) {
    const auto found = peaks_.find(key_of(one));
    if (found != peaks_.end() &&
        (found->second.all_ranks || (!all_ranks && excess(found->second, room_) > 0))) {
      return found->second;
    }
    const Config config = config_of(one);
    const bool first = found == peaks_.end();
    const std::int64_t bound = first ? bound_of(one, config) : 0;
    const PlannedPeaks peaks = plan_ranks(one, config, false, !all_ranks);
    peaks_[key_of(one)] = peaks;
    if (first) {
      ++result_.counts.planned;
      planned_at_[key_of(one)] = result_.planned.size();
      MeshTrial trial = trial_of_peaks(one, peaks);
      trial.bound = bound;
      result_.planned.push_back(std::move(trial));
    }
    return peaks;
  }

  Verdict judge(const Candidate& one) {
    Config config = config_of(one);
    try {
      validate_config(config, fit_.plan.ranks);
    } catch (const ConfigurationError& error) {
      refuse(one, error.message());
      return Verdict::refused;
    }
    // A candidate may have a plan already, made to judge a larger micro-batch.
    if (!request_.exhaustive && peaks_.count(key_of(one)) == 0) {
      if (lacks_beside_.count(beside_of(one)) > 0) return Verdict::by_state;
      if (bound_of(one, config) > room_) {
        failures_.push_back({one, bound_of(one, config) - room_, false});
        return Verdict::by_activations;
      }
      // Memory grows with the micro-batch, with one exception: if one micro-batch makes the step, offloaded
      // state takes the main gradient off the device.
      const std::int64_t smallest = case_at(one).micro_batches.front();
      const bool takes_gradient =
          levers_at(one).optimizer != OffloadTier::none && config.accumulation_steps == 1;
      if (one.micro_batch != smallest && !takes_gradient) {
        Candidate least = one;
        least.micro_batch = smallest;
        const auto [found, added] = least_fits_.try_emplace({one.place, one.lever, room_}, true);
        if (added) found->second = smallest_fits(least);
        if (!found->second) return Verdict::by_micro_batch;
      }
    }
    try {
      const PlannedPeaks peaks = trial_peaks(one, request_.exhaustive);
      if (excess(peaks, room_) == 0) return Verdict::fits;
      failures_.push_back({one, excess(peaks, room_), peaks.all_ranks});
      note_memory_beside(one, peaks);
      return Verdict::too_large;
    } catch (const ConfigurationError& error) {
      refuse(one, error.message());
      return Verdict::refused;
    }
  }

  // Key of host memory and nvme. Micro-batch, checkpointing and head do not change them, nor does the mesh if
  // its ranks hold as much.
  using Beside = std::tuple<int, ReductionPolicy, OffloadTier, OffloadTier, bool, int, double, double>;
  Beside beside_of(const Candidate& one) const {
    const MeshCase& place = case_at(one);
    const Levers& levers = levers_at(one);
    const Config config = config_of(one);
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
  void note_memory_beside(const Candidate& one, const PlannedPeaks& peaks) {
    if (levers_at(one).activations || excess({0, peaks.host, peaks.nvme}, room_) == 0) return;
    lacks_beside_.insert(beside_of(one));
  }

  /// Counts a candidate as refused, together with the candidates that would be tried after it because they
  /// take less memory.
  void refuse(const Candidate& one, const std::string& reason) {
    if (first_refusal_.empty()) first_refusal_ = case_at(one).mesh + ": " + reason;
    result_.counts.refused += 1 + static_cast<std::int64_t>(dearer_than(one).size());
    if (!dearer_than(one).empty()) refused_.insert(key_of(one));
  }
  std::vector<int>& dearer_than(const Candidate& one) {
    return cases_[static_cast<std::size_t>(one.place)].dearer[static_cast<std::size_t>(one.lever)];
  }

  /// False if the smallest micro-batch does not fit; then no larger one does. If the smallest one is refused
  /// the result is true, because a larger one may be allowed.
  bool smallest_fits(const Candidate& least) {
    Config config = config_of(least);
    try {
      validate_config(config, fit_.plan.ranks);
      if (lacks_beside_.count(beside_of(least)) > 0 || bound_of(least, config) > room_) return false;
      const PlannedPeaks peaks = trial_peaks(least, false);
      note_memory_beside(least, peaks);
      return excess(peaks, room_) == 0;
    } catch (const ConfigurationError&) {
      return true;
    }
  }

  MeshTrial trial_of_peaks(const Candidate& one, const PlannedPeaks& peaks) {
    const Levers& levers = levers_at(one);
    const Config config = config_of(one);
    MeshTrial made;
    made.mesh = case_at(one).mesh;
    made.schedule = case_at(one).schedule;
    FitTrial& trial = made.trial;
    trial.stage = levers.stage;
    trial.reduction = levers.reduction;
    trial.checkpoint_every = levers.checkpoint_every;
    trial.vocabulary_chunk = levers.vocabulary_chunk;
    trial.optimizer = levers.optimizer;
    trial.parameters = levers.parameters;
    trial.activations = levers.activations;
    trial.micro_batch = one.micro_batch;
    trial.accumulation = config.accumulation_steps;
    trial.peak = peaks.device;
    trial.host = peaks.host;
    trial.nvme = peaks.nvme;
    trial.host_state = config.offload.host_state;
    trial.host_state_reason = config.offload.host_state_reason;
    made.missing = excess(peaks, fit_.budget);
    trial.fits = made.missing == 0;
    trial.cost = formula_cost(one);
    made.seconds = trial.cost.total();
    made.planned = true;
    return made;
  }

  /// Lets state of a candidate that fits and has state on nvme stay in the host memory that its budget
  /// leaves, once, where the configuration leaves that to `auto`. Returns true, with the candidate back in
  /// the queue, if it takes longer than the bound said.
  bool keep_in_host(Candidate one) {
    PlanRequest at = fit_.plan;
    at.config = config_of(one);
    if (!at.config.offload.uses_nvme() || at.config.offload.host_state >= 0) return false;
    resolve_host_state(at);
    kept_[key_of(one)] = {at.config.offload.host_state, at.config.offload.host_state_reason};
    peaks_[key_of(one)] = plan_ranks(one, config_of(one), false, false);
    MeshTrial& shown = result_.planned[planned_at_.at(key_of(one))];
    const std::int64_t bound = shown.bound;
    shown = trial_of_peaks(one, peaks_.at(key_of(one)));
    shown.bound = bound;
    if (shown.seconds <= one.seconds) return false;
    one.seconds = shown.seconds;
    queue_.push(one);
    return true;
  }

  void count(Verdict verdict) {
    SearchCounts& counts = result_.counts;
    if (verdict == Verdict::by_state) ++counts.by_state;
    if (verdict == Verdict::by_activations) ++counts.by_activations;
    if (verdict == Verdict::by_micro_batch) ++counts.by_micro_batch;
  }

  /// Takes the next candidate with exact seconds, in ascending order. Returns false if none is below `limit`.
  bool next(Candidate& one, double limit) {
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

  /// Queues, once, the levers that take less memory and more time than the candidate's, with each
  /// micro-batch.
  void expand(const Candidate& one) {
    const std::vector<int> levers = std::exchange(dearer_than(one), {});
    for (const int lever : levers) push_all(one.place, lever, one.lever);
  }

  std::vector<MeshTrial> first_that_fit() {
    std::vector<MeshTrial> fitting;
    std::set<std::tuple<int, int>> found;  // pairs of a case and a ZeRO stage
    double limit = std::numeric_limits<double>::infinity();
    for (Candidate one; next(one, limit);) {
      if (found.count({one.place, levers_at(one).stage}) > 0) continue;
      const Verdict verdict = judge(one);
      count(verdict);
      if (verdict == Verdict::refused) continue;
      if (verdict != Verdict::fits) {
        expand(one);
        continue;
      }
      if (keep_in_host(one)) continue;
      if (!request_.machine && !whole_step_fits(one)) {
        expand(one);
        continue;
      }
      fitting.push_back(trial_of_peaks(one, peaks_.at(key_of(one))));
      candidates_.push_back(one);
      found.insert({one.place, levers_at(one).stage});
      if (fitting.size() == 1) limit = request_.machine ? too_dear * one.seconds : one.seconds;
      if (!request_.machine || fitting.size() == most_projected) break;
    }
    return fitting;
  }

  /// Plans every configuration, and returns those that the pruned search finds if its bounds are correct.
  std::vector<MeshTrial> all_that_fit() {
    std::vector<Candidate> all;
    for (Candidate one; next(one, std::numeric_limits<double>::infinity());) {
      const Verdict verdict = judge(one);
      count(verdict);
      if (verdict == Verdict::fits && !keep_in_host(one)) all.push_back(one);
    }
    std::vector<MeshTrial> fitting;
    std::set<std::tuple<int, int>> found;
    for (const Candidate& one : all) {
      if (request_.machine && !fitting.empty() && one.seconds >= too_dear * fitting.front().seconds) break;
      if (!found.insert({one.place, levers_at(one).stage}).second) continue;
      if (!request_.machine && !whole_step_fits(one)) continue;
      fitting.push_back(trial_of_peaks(one, peaks_.at(key_of(one))));
      candidates_.push_back(one);
      if (!request_.machine || fitting.size() == most_projected) break;
    }
    return fitting;
  }

  /// A plan of the whole step decides, because more micro-batches than those of a trial may need slightly
  /// more memory.
  bool whole_step_fits(const Candidate& one) {
    const PlannedPeaks peaks = plan_ranks(one, config_of(one), true, false, &result_.plan);
    if (excess(peaks, room_) > 0) failures_.push_back({one, excess(peaks, room_), true});
    peaks_[key_of(one)] = peaks;
    result_.rank = peaks.rank;
    return excess(peaks, room_) == 0;
  }

  /// Seconds by the machine's simulation, split as in StepCost.
  StepCost projected(const Candidate& one) {
    ProjectionRequest at = *request_.machine;
    at.plan = case_at(one).alone;
    at.plan.config = alone_config(one);
    // The ranks of all stages share a node, so the number is that of the whole mesh.
    if (at.sharing == 0) {
      at.sharing = fit_.plan.ranks_per_node > 0 ? std::min(fit_.plan.ranks_per_node, fit_.plan.ranks)
                                                : fit_.plan.ranks;
    }
    return with_schedule(one, projected_cost(at));
  }

  /// Chooses the fastest candidate, by the machine's simulation if there is a machine.
  void choose(std::vector<MeshTrial>& fitting) {
    std::optional<ConfigurationError> refusal;
    for (std::size_t i = 0; i < fitting.size() && request_.machine; ++i) {
      try {
        fitting[i].seconds = projected(candidates_[i]).total();
      } catch (const ConfigurationError& error) {
        // A figure is missing in the machine's file, such as that of a disk.
        if (!refusal) refusal = error;
        fitting[i].seconds = std::numeric_limits<double>::infinity();
      }
    }
    if (refusal && std::none_of(fitting.begin(), fitting.end(),
                                [](const MeshTrial& one) { return std::isfinite(one.seconds); })) {
      throw *refusal;
    }
    std::vector<std::size_t> order(fitting.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return fitting[a].seconds < fitting[b].seconds; });
    for (const std::size_t i : order) {
      if (!std::isfinite(fitting[i].seconds)) break;
      if (request_.machine && !whole_step_fits(candidates_[i])) continue;
      take_choice(candidates_[i], fitting[i].seconds);
      result_.fits = true;
      break;
    }
  }

  void take_choice(const Candidate& one, double seconds) {
    chosen_ = one;
    result_.chosen = trial_of_peaks(one, peaks_.at(key_of(one)));
    result_.chosen.seconds = seconds;
    result_.config = config_of(one);
    validate_config(result_.config, fit_.plan.ranks);
  }

  void find_less_memory(const std::vector<MeshTrial>& fitting) {
    room_ = result_.chosen.trial.peak / 10 * 9;
    const auto take = [&](MeshTrial trial) {
      std::optional<MeshTrial>& best = result_.less_memory;
      if (trial.trial.peak <= room_ && (!best || trial.seconds < best->seconds)) best = std::move(trial);
    };
    for (const MeshTrial& trial : fitting) take(trial);
    const std::int64_t before = result_.counts.planned;
    for (Candidate one; !result_.less_memory && next(one, std::numeric_limits<double>::infinity());) {
      if (result_.counts.planned - before >= most_alternatives) break;
      const Verdict verdict = judge(one);
      if (verdict == Verdict::refused) continue;
      if (verdict != Verdict::fits) {
        expand(one);
        continue;
      }
      if (keep_in_host(one)) continue;
      MeshTrial trial = trial_of_peaks(one, peaks_.at(key_of(one)));
      try {
        if (request_.machine) trial.seconds = projected(one).total();
      } catch (const ConfigurationError&) {
        continue;  // a figure is missing in the machine's file
      }
      take(std::move(trial));
    }
    room_ = fit_.budget;
  }

  /// The failure with the fewest missing bytes among those that `wanted` accepts, planned on all ranks.
  template <typename Wanted>
  std::optional<MeshTrial> least_missing(const Wanted& wanted, int plans) {
    const auto more = [](const Failure& a, const Failure& b) {
      return std::tuple(a.missing, !a.resolved, a.candidate.key()) >
             std::tuple(b.missing, !b.resolved, b.candidate.key());
    };
    std::priority_queue<Failure, std::vector<Failure>, decltype(more)> nearest(more);
    for (const Failure& one : failures_) nearest.push(one);
    std::optional<Failure> best;
    for (int planned = 0; !nearest.empty() && planned < plans; nearest.pop()) {
      Failure one = nearest.top();
      if (best && one.missing >= best->missing) break;
      try {
        if (!one.candidate.exact) one.candidate.seconds = formula_cost(one.candidate).total();
        one.candidate.exact = true;
        if (!wanted(one.candidate)) continue;
        if (!one.resolved) {
          Config config = config_of(one.candidate);
          validate_config(config, fit_.plan.ranks);
          one.missing = excess(trial_peaks(one.candidate, true), fit_.budget);
          ++planned;
        }
      } catch (const ConfigurationError&) {
        continue;  // a run would refuse it
      }
      if (one.missing > 0 && (!best || one.missing < best->missing)) best = one;
    }
    if (!best) return std::nullopt;
    chosen_ = best->candidate;
    MeshTrial trial = trial_of_peaks(best->candidate, peaks_.at(key_of(best->candidate)));
    trial.missing = best->missing;
    return trial;
  }

  void find_less_time() {
    const double limit = result_.chosen.trial.cost.total();
    const Candidate chosen = chosen_;
    result_.less_time =
        least_missing([&](const Candidate& one) { return one.seconds < limit; }, most_alternatives);
    chosen_ = chosen;
  }

  void find_least_missing() {
    const auto any = [](const Candidate&) { return true; };
    if (!least_missing(any, most_failures)) {
      throw ConfigurationError("--mesh search: no mesh of " + std::to_string(fit_.plan.ranks) +
                               " ranks can be used; " + first_refusal_);
    }
    // If state alone exceeded the budget, one configuration represented all with that state. They are
    // compared here.
    const Candidate nearest = chosen_;
    const auto state_of = [&](int lever) {
      const Levers& levers = case_at(nearest).levers[static_cast<std::size_t>(lever)];
      return std::tuple(levers.stage, levers.reduction, levers.optimizer, levers.parameters);
    };
    failures_ = {{nearest, excess(peaks_.at(key_of(nearest)), fit_.budget), true}};
    for (int lever = 0; lever < static_cast<int>(case_at(nearest).levers.size()); ++lever) {
      if (state_of(lever) != state_of(nearest.lever) || lever == nearest.lever) continue;
      failures_.push_back(
          {{0, false, nearest.place, lever, case_at(nearest).micro_batches.front()}, 1, false});
    }
    const MeshTrial least = *least_missing(any, most_failures);
    whole_step_fits(chosen_);
    take_choice(chosen_, least.seconds);
  }

  void judge_meshes() {
    for (SearchedMesh& mesh : result_.meshes) {
      mesh.verdict = "slower";
      bool any = false;
      for (const MeshCase& one : cases_) {
        if (one.mesh != mesh.mesh) continue;
        if (!one.refused.empty() && !any) mesh.verdict = one.refused;
        if (one.refused.empty() && !std::exchange(any, true)) mesh.verdict = "slower";
      }
      if (!any) continue;
      const auto of_mesh = [&](const Failure& one) { return case_at(one.candidate).mesh == mesh.mesh; };
      const bool waits = request_.exhaustive || result_.fits;
      if (!waits || std::any_of(failures_.begin(), failures_.end(), of_mesh)) mesh.verdict = "does not fit";
      for (const MeshTrial& trial : result_.planned) {
        if (trial.mesh != mesh.mesh || !trial.trial.fits) continue;
        mesh.verdict = "fits";
        if (!mesh.best || trial.seconds < mesh.best->seconds) mesh.best = trial;
      }
      if (result_.fits && mesh.mesh == result_.chosen.mesh) mesh.verdict = "chosen";
    }
  }

  const MeshSearchRequest& request_;
  const FitRequest& fit_;
  std::int64_t room_ = 0;  ///< bytes of device memory that a candidate may take
  ModelSpec spec_;
  std::int64_t samples_ = 0, given_micro_batch_ = 1;
  std::vector<MeshCase> cases_;
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue_;
  std::map<std::tuple<std::string, int, std::int64_t>, pipeline::PipelineSchedule> schedules_;
  std::map<Work, std::vector<std::int64_t>> activations_;  ///< peak bytes of each rank of the case
  std::map<Key, PlannedPeaks> peaks_;
  std::map<Key, std::size_t> planned_at_;  ///< index in MeshSearchResult::planned
  struct HostStateOf {
    std::int64_t bytes = 0;
    std::string reason;
  };
  std::map<Key, HostStateOf> kept_;  ///< of candidates with state on nvme that fit, where it is `auto`
  std::map<std::tuple<int, int, std::int64_t>, bool> least_fits_;  ///< by case, lever and room: the smallest
                                                                   ///< micro-batch fits
  std::set<Key> refused_;
  std::set<Beside> lacks_beside_;  ///< states whose host memory or nvme exceeds the budget
  std::vector<Failure> failures_;
  std::vector<Candidate> candidates_;  ///< the candidates of what fits, in the order of `fitting`
  Candidate chosen_;
  std::string first_refusal_;
  MeshSearchResult result_;
};

}  // namespace

MeshSearchResult search_meshes(const MeshSearchRequest& request) {
  if (request.fit.budget < 1) {
    throw InvalidArgument("a budget of " + std::to_string(request.fit.budget) + " bytes");
  }
  return MeshSearch(request).run();
}

}  // namespace tranche::planner
