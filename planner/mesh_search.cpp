// The search for a mesh. A case is a mesh under one schedule (mesh_case.h); a lever is a combination of all
// other settings but the micro-batch; a candidate is a case, a lever and a micro-batch (mesh_candidates.h). A
// trial plans a candidate on the meta device (mesh_trials.h), which takes far longer than a formula. So the
// search evaluates formulas for many candidates and plans few:
//
//   add_roots() ---> candidates_ ---> next() ---> judge() -- fits --> first_that_fit(): plan of the whole
//   step,
//       |              ^                             |                or with a machine choose(): simulation
//       |              +---------- expand() <--------+ does not fit: failures_; levers with less memory are
//       queued
//       +-> failures_: state alone exceeds the budget
//
// The queue yields candidates in ascending order of their seconds by formula, so the first candidate that
// fits is the fastest by formula. judge() excludes a candidate without a trial if a bound of MeshTrials
// exceeds the budget, or if the same candidate with the smallest micro-batch does not fit (least_fits_). With
// MeshSearchRequest::exhaustive every candidate is planned, and tests compare both results.
//
// With a machine the search goes on to the best candidate of each case and ZeRO stage that the formula calls
// less than `too_dear` times slower than the first, and choose() takes the one whose simulation
// (projection.cpp) is fastest.
#include "tranche/planner/mesh_search.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <queue>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "planner/mesh_trials.h"
#include "planner/planned_run.h"
#include "tranche/core/error.h"

namespace tranche::planner {

namespace {

/// If a machine's simulation decides, at most this many candidates are simulated, the fastest by formula.
constexpr std::size_t most_projected = 32;
/// Limits of plans: for the next best configuration, and for the least excess if nothing fits.
constexpr int most_alternatives = 64, most_failures = 400;

/// A configuration that does not fit, with the bytes that are missing.
struct Failure {
  Candidate candidate;
  std::int64_t missing = 0;
  bool resolved = false;  ///< planned on all ranks, so that `missing` is exact
};

enum class Verdict { fits, by_state, by_activations, by_micro_batch, refused, too_large };

class MeshSearch {
 public:
  explicit MeshSearch(const MeshSearchRequest& request)
      : request_(request),
        fit_(request.fit),
        spec_(planned_spec(fit_.plan)),
        candidates_(request, spec_),
        trials_(request, candidates_) {
    for (const std::string& mesh : all_meshes(fit_.plan.ranks, request.axes)) {
      result_.meshes.push_back({mesh, {}, {}});
    }
  }

  MeshSearchResult run() {
    for (int number = 0; number < static_cast<int>(candidates_.cases().size()); ++number) add_roots(number);
    std::vector<MeshTrial> fitting = request_.exhaustive ? all_that_fit() : first_that_fit();
    result_.counts.refused = candidates_.refused();
    result_.counts.planned = std::ssize(trials_.planned());
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
      const std::size_t planned = trials_.planned().size();
      find_less_memory(fitting);
      trials_.planned().resize(planned);
    }
    result_.planned = std::move(trials_.planned());
    result_.counts = counts;
    SearchCounts& all = result_.counts;
    all.projected = request_.machine ? std::ssize(fitting) : 0;
    all.by_time =
        all.all - all.by_state - all.by_activations - all.by_micro_batch - all.refused - all.planned;
    return std::move(result_);
  }

 private:
  /// Counts the configurations of a case and queues the simplest ones among those whose state fits.
  void add_roots(int number) {
    const MeshCase& one = candidates_.cases()[static_cast<std::size_t>(number)];
    const auto micro_batches = static_cast<std::int64_t>(one.micro_batches.size());
    if (!one.refused.empty()) return;
    result_.counts.all += micro_batches * static_cast<std::int64_t>(one.levers.size());
    using State = std::tuple<int, ReductionPolicy, OffloadTier, OffloadTier>;
    std::map<State, int> first_of;  // first lever with this state; -1 if the state does not fit
    std::map<std::pair<int, ReductionPolicy>, int> resident;
    for (int lever = 0; lever < static_cast<int>(one.levers.size()); ++lever) {
      const Levers& levers = one.levers[static_cast<std::size_t>(lever)];
      const State state(levers.stage, levers.reduction, levers.optimizer, levers.parameters);
      const auto [found, added] = first_of.try_emplace(state, lever);
      if (added && !request_.exhaustive) {
        const std::int64_t bound = trials_.state_bound(one, levers);
        if (bound > trials_.room()) {
          found->second = -1;
          for (const int of_state : std::set<int>{lever, smallest_of(one, lever)}) {
            failures_.push_back(
                {{0, false, number, of_state, one.micro_batches.front()}, bound - trials_.room(), false});
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
        candidates_.push_after(number, lever, before);
      } else {
        candidates_.push(number, lever);
      }
    }
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

  Verdict judge(const Candidate& one) {
    Config config = candidates_.config_of(one);
    try {
      validate_config(config, fit_.plan.ranks);
    } catch (const ConfigurationError& error) {
      candidates_.refuse(one, error.message());
      return Verdict::refused;
    }
    // A candidate may have a plan already, made to judge a larger micro-batch.
    if (!request_.exhaustive && !trials_.has_peaks(one)) {
      if (trials_.lacks_beside(one)) return Verdict::by_state;
      const std::int64_t bound = trials_.bound_of(one, config);
      if (bound > trials_.room()) {
        failures_.push_back({one, bound - trials_.room(), false});
        return Verdict::by_activations;
      }
      // Memory grows with the micro-batch, unless fewer of them are held at once. There is one more
      // exception: if one micro-batch makes the step, offloaded state takes the main gradient off the device.
      const std::int64_t smallest = candidates_.case_at(one).micro_batches.front();
      const bool takes_gradient =
          candidates_.levers_at(one).optimizer != OffloadTier::none && config.accumulation_steps == 1;
      Candidate least = one;
      least.micro_batch = smallest;
      if (one.micro_batch != smallest && !takes_gradient && holds_as_many(one, least)) {
        const auto [found, added] = least_fits_.try_emplace({one.place, one.lever, trials_.room()}, true);
        if (added) found->second = smallest_fits(least);
        if (!found->second) return Verdict::by_micro_batch;
      }
    }
    try {
      const PlannedPeaks peaks = trials_.peaks_of_trial(one, request_.exhaustive);
      if (trials_.excess(peaks) == 0) return Verdict::fits;
      failures_.push_back({one, trials_.excess(peaks), peaks.all_ranks});
      trials_.note_memory_beside(one, peaks);
      return Verdict::too_large;
    } catch (const ConfigurationError& error) {
      candidates_.refuse(one, error.message());
      return Verdict::refused;
    }
  }

  /// True if every stage of the pipeline holds as many micro-batches at once as with the smaller ones of
  /// `least`. A step of few micro-batches may hold fewer, and then take less memory.
  bool holds_as_many(const Candidate& one, const Candidate& least) {
    if (candidates_.case_at(one).stages() == 1) return true;
    try {
      const std::vector<std::int64_t> held = candidates_.held_at_once(one),
                                      of_least = candidates_.held_at_once(least);
      return std::equal(held.begin(), held.end(), of_least.begin(), std::greater_equal<>());
    } catch (const ConfigurationError&) {
      return false;  // the schedule does not allow the number of smaller ones
    }
  }

  /// False if the smallest micro-batch does not fit; then no larger one does of which as many are held. If
  /// the smallest one is refused the result is true, because a larger one may be allowed.
  bool smallest_fits(const Candidate& least) {
    Config config = candidates_.config_of(least);
    try {
      validate_config(config, fit_.plan.ranks);
      if (trials_.lacks_beside(least) || trials_.bound_of(least, config) > trials_.room()) return false;
      const PlannedPeaks peaks = trials_.peaks_of_trial(least, false);
      trials_.note_memory_beside(least, peaks);
      return trials_.excess(peaks) == 0;
    } catch (const ConfigurationError&) {
      return true;
    }
  }

  void count(Verdict verdict) {
    SearchCounts& counts = result_.counts;
    if (verdict == Verdict::by_state) ++counts.by_state;
    if (verdict == Verdict::by_activations) ++counts.by_activations;
    if (verdict == Verdict::by_micro_batch) ++counts.by_micro_batch;
  }

  std::vector<MeshTrial> first_that_fit() {
    std::vector<MeshTrial> fitting;
    std::set<std::tuple<int, int>> found;  // pairs of a case and a ZeRO stage
    double limit = std::numeric_limits<double>::infinity();
    for (Candidate one; candidates_.next(one, limit);) {
      if (found.count({one.place, candidates_.levers_at(one).stage}) > 0) continue;
      const Verdict verdict = judge(one);
      count(verdict);
      if (verdict == Verdict::refused) continue;
      if (verdict != Verdict::fits) {
        candidates_.expand(one);
        continue;
      }
      if (trials_.keep_in_host(one)) continue;
      if (!request_.machine && !whole_step_fits(one)) {
        candidates_.expand(one);
        continue;
      }
      fitting.push_back(described(one));
      chosen_from_.push_back(one);
      found.insert({one.place, candidates_.levers_at(one).stage});
      if (fitting.size() == 1) limit = request_.machine ? too_dear * one.seconds : one.seconds;
      if (!request_.machine || fitting.size() == most_projected) break;
    }
    return fitting;
  }

  /// Plans every configuration, and returns those that the pruned search finds if its bounds are correct.
  std::vector<MeshTrial> all_that_fit() {
    std::vector<Candidate> all;
    for (Candidate one; candidates_.next(one, std::numeric_limits<double>::infinity());) {
      const Verdict verdict = judge(one);
      count(verdict);
      if (verdict == Verdict::fits && !trials_.keep_in_host(one)) all.push_back(one);
    }
    std::vector<MeshTrial> fitting;
    std::set<std::tuple<int, int>> found;
    for (const Candidate& one : all) {
      if (request_.machine && !fitting.empty() && one.seconds >= too_dear * fitting.front().seconds) break;
      if (found.count({one.place, candidates_.levers_at(one).stage}) > 0) continue;
      if (!request_.machine && !whole_step_fits(one)) continue;
      fitting.push_back(described(one));
      chosen_from_.push_back(one);
      found.insert({one.place, candidates_.levers_at(one).stage});
      if (!request_.machine || fitting.size() == most_projected) break;
    }
    return fitting;
  }

  /// A plan of the whole step decides, because more micro-batches than those of a trial may need slightly
  /// more memory.
  bool whole_step_fits(const Candidate& one) {
    const PlannedPeaks peaks = trials_.peaks_of_step(one, result_.plan);
    const std::int64_t missing = trials_.excess(peaks);
    if (missing > 0) failures_.push_back({one, missing, true});
    result_.rank = peaks.rank;
    return missing == 0;
  }

  /// The newest plan of a candidate, as results report it.
  MeshTrial described(const Candidate& one) { return trials_.described(one, trials_.peaks(one)); }

  /// Chooses the fastest candidate, by the machine's simulation if there is a machine.
  void choose(std::vector<MeshTrial>& fitting) {
    std::optional<ConfigurationError> refusal;
    for (std::size_t i = 0; i < fitting.size() && request_.machine; ++i) {
      try {
        fitting[i].seconds = candidates_.projected(chosen_from_[i]).total();
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
      if (request_.machine && !whole_step_fits(chosen_from_[i])) continue;
      take_choice(chosen_from_[i], fitting[i].seconds);
      result_.fits = true;
      break;
    }
  }

  void take_choice(const Candidate& one, double seconds) {
    chosen_ = one;
    result_.chosen = described(one);
    result_.chosen.seconds = seconds;
    result_.config = candidates_.config_of(one);
    validate_config(result_.config, fit_.plan.ranks);
  }

  void find_less_memory(const std::vector<MeshTrial>& fitting) {
    trials_.set_room(result_.chosen.trial.peak / 10 * 9);
    const auto take = [&](MeshTrial trial) {
      std::optional<MeshTrial>& best = result_.less_memory;
      if (trial.trial.peak <= trials_.room() && (!best || trial.seconds < best->seconds))
        best = std::move(trial);
    };
    for (const MeshTrial& trial : fitting) take(trial);
    const std::size_t before = trials_.planned().size();
    for (Candidate one;
         !result_.less_memory && candidates_.next(one, std::numeric_limits<double>::infinity());) {
      if (trials_.planned().size() - before >= most_alternatives) break;
      const Verdict verdict = judge(one);
      if (verdict == Verdict::refused) continue;
      if (verdict != Verdict::fits) {
        candidates_.expand(one);
        continue;
      }
      if (trials_.keep_in_host(one)) continue;
      MeshTrial trial = described(one);
      try {
        if (request_.machine) trial.seconds = candidates_.projected(one).total();
      } catch (const ConfigurationError&) {
        continue;  // a figure is missing in the machine's file
      }
      take(std::move(trial));
    }
    trials_.set_room(fit_.budget);
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
        if (!one.candidate.exact) one.candidate.seconds = candidates_.formula_cost(one.candidate).total();
        one.candidate.exact = true;
        if (!wanted(one.candidate)) continue;
        if (!one.resolved) {
          Config config = candidates_.config_of(one.candidate);
          validate_config(config, fit_.plan.ranks);
          one.missing = trials_.excess(trials_.peaks_of_trial(one.candidate, true), fit_.budget);
          ++planned;
        }
        if (one.missing <= 0 || (best && one.missing >= best->missing)) continue;
        // Its seconds may be those of a bound; now they are those of what stays.
        trials_.resolve(one.candidate);
        one.candidate.seconds = candidates_.formula_cost(one.candidate).total();
        if (wanted(one.candidate)) best = one;
      } catch (const ConfigurationError&) {
        continue;  // a run would refuse it
      }
    }
    if (!best) return std::nullopt;
    chosen_ = best->candidate;
    MeshTrial trial = described(best->candidate);
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
                               " ranks can be used; " + candidates_.first_refusal());
    }
    // If state alone exceeded the budget, one configuration represented all with that state. They are
    // compared here.
    const Candidate nearest = chosen_;
    const auto state_of = [&](int lever) {
      const Levers& levers = candidates_.case_at(nearest).levers[static_cast<std::size_t>(lever)];
      return std::tuple(levers.stage, levers.reduction, levers.optimizer, levers.parameters);
    };
    failures_ = {{nearest, trials_.excess(trials_.peaks(nearest), fit_.budget), true}};
    for (int lever = 0; lever < static_cast<int>(candidates_.case_at(nearest).levers.size()); ++lever) {
      if (state_of(lever) != state_of(nearest.lever) || lever == nearest.lever) continue;
      failures_.push_back(
          {{0, false, nearest.place, lever, candidates_.case_at(nearest).micro_batches.front()}, 1, false});
    }
    const MeshTrial least = *least_missing(any, most_failures);
    whole_step_fits(chosen_);
    take_choice(chosen_, least.seconds);
  }

  void judge_meshes() {
    for (SearchedMesh& mesh : result_.meshes) {
      mesh.verdict = "slower";
      bool any = false;
      for (const MeshCase& one : candidates_.cases()) {
        if (one.mesh != mesh.mesh) continue;
        if (!one.refused.empty() && !any) mesh.verdict = one.refused;
        if (one.refused.empty() && !std::exchange(any, true)) mesh.verdict = "slower";
      }
      if (!any) continue;
      const auto of_mesh = [&](const Failure& one) {
        return candidates_.case_at(one.candidate).mesh == mesh.mesh;
      };
      const bool waits = request_.exhaustive || result_.fits;
      if (!waits || std::any_of(failures_.begin(), failures_.end(), of_mesh)) mesh.verdict = "does not fit";
      for (const MeshTrial& trial : trials_.planned()) {
        if (trial.mesh != mesh.mesh || !trial.trial.fits) continue;
        mesh.verdict = "fits";
        if (!mesh.best || trial.seconds < mesh.best->seconds) mesh.best = trial;
      }
      if (result_.fits && mesh.mesh == result_.chosen.mesh) mesh.verdict = "chosen";
    }
  }

  const MeshSearchRequest& request_;
  const FitRequest& fit_;
  ModelSpec spec_;
  MeshCandidates candidates_;
  MeshTrials trials_;
  std::map<std::tuple<int, int, std::int64_t>, bool> least_fits_;  ///< by case, lever and room: the smallest
                                                                   ///< micro-batch fits
  std::vector<Failure> failures_;
  std::vector<Candidate> chosen_from_;  ///< the candidates of what fits, in the order of `fitting`
  Candidate chosen_;
  MeshSearchResult result_;
};

}  // namespace

MeshSearchResult search_meshes(const MeshSearchRequest& request) {
  if (request.fit.budget < 1) {
    throw InvalidArgument("a budget of " + std::to_string(request.fit.budget) +
                          " bytes; it must be at least 1");
  }
  return MeshSearch(request).run();
}

}  // namespace tranche::planner
