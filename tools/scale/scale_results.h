#pragma once
/// The results of a scaling study's runs, and derived figures, in seconds and bytes unless a name says
/// otherwise.

#include <array>
#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tools/node.h"
#include "tranche/config/config.h"
#include "tranche/device/ledger.h"
#include "tranche/planner/planner.h"

namespace tranche::tools {

/// "tranche-scale-1": changes when the meaning of a key changes, not when keys are added.
inline constexpr const char* scale_schema = "tranche-scale-1";

/// The parts of a step's time, on rank 0, averaged over the timed steps of a run; they add up to `seconds`.
struct StepParts {
  double compute = 0;   ///< the rest of the step
  double gather = 0;    ///< exposed
  double reduce = 0;    ///< exposed
  double messages = 0;  ///< exposed: waits for other stages of a pipeline, and for rows of the axis `tensor`
  double update = 0;    ///< norm, agreement, optimizer
  double other = 0;     ///< exposed offload, and time between steps
  double seconds() const { return compute + gather + reduce + messages + update + other; }
  double exposed() const { return gather + reduce + messages; }
};

/// Identifies the runs of a study that differ only in the repeat.
struct PointKey {
  int ranks = 1, stage = 0;
  std::string mesh = {}, schedule = {};  ///< as in ScaleOptions
  auto operator<=>(const PointKey&) const = default;
  std::string text() const;  ///< "4 ranks, stage 3, mesh pipeline=2, schedule zb-h1"
};

/// The figures of one run, from its report.
struct RunFigures {
  int ranks = 1, stage = 0, repeat = 1;
  std::string mesh;              ///< as in the study; if read from a report alone, the full mesh, or empty if
                                 ///< it has none
  std::string schedule;          ///< as in the study; if read from a report alone, the configuration's
  double tokens_per_second = 0;  ///< counts positions, learned or not, as do all token figures here
  StepParts step;
  double tokens_per_step = 0;
  double cpu_seconds_per_token = 0;
  std::int64_t elements = 0, bytes = 0;                         ///< sent by rank 0 in a step
  std::optional<std::int64_t> formula_elements, formula_bytes;  ///< not set for chains, which have none
  std::array<std::int64_t, tier_count> peak{};                  ///< highest over all ranks, by tier
  std::int64_t state = 0;  ///< parameters, gradients and optimizer on the device, throughout
  double peak_flops = 0, flops_per_token = 0;
  int ranks_on_node = 1, threads = 1, cores = 1, node_cores = 1;
  std::string weights_digest, fingerprint;
  PointKey key() const { return {ranks, stage, mesh, schedule}; }
  /// The fraction of a peak, in operations per second, that the run reached.
  double peak_share(double peak) const;
};

/// Reads a report (docs/reference/report.md) without its first `warmup` steps. Throws Error naming missing
/// keys.
RunFigures figures_of(const std::string& report, std::int64_t warmup);

/// The facts about a point that are known before it runs.
struct PointPlan {
  int ranks = 1, stage = 0;
  std::string mesh, schedule;
  std::int64_t micro_batch = 1, accumulation = 1, batch = 1;
  int ranks_per_node = 1;                       ///< for this number of ranks
  bool placed = true;                           ///< false: placement is unknown, so the plan assumes one node
  std::int64_t bytes = 0;                       ///< sent by rank 0 in a step
  std::array<std::int64_t, tier_count> peak{};  ///< highest over all ranks, by tier
  std::int64_t state = 0;                       ///< of rank 0 on the device, according to the plan
  std::int64_t formula_state = 0;               ///< according to formula_state()
  PointKey key() const { return {ranks, stage, mesh, schedule}; }
};

/// A curve of the plots: a stage, a mesh and a schedule over the number of ranks.
struct CurveKey {
  int stage = 0;
  std::string mesh = {}, schedule = {};
  auto operator<=>(const CurveKey&) const = default;
};

struct StudyFacts {
  bool strong = false, any_offload = false, launcher_binds = false;
  std::string model, version, commit, program;
  std::int64_t parameters = 0, sequence = 0, repeats = 1, warmup = 3, steps = 10, threads = 1;
  std::string dtype;        ///< of compute
  std::string begun;        ///< "2026-11-22 05:10 UTC"
  double load_average = 0;  ///< of the node at that time, over a minute
  NodeDescription node;
  std::vector<int> ranks, stages;
  std::vector<std::string> meshes{""}, schedules{""};  ///< as in ScaleOptions
  /// The ranks and meshes that have no pipeline, if the study compares schedules: one run with an empty
  /// schedule stands for all of them there.
  std::set<std::pair<int, std::string>> without_pipeline;
  std::map<PointKey, PointPlan> plans;
  /// The curves of the plots, including points between the runs.
  std::map<CurveKey, std::vector<PointPlan>> curves;
  std::vector<std::string> notes;  ///< changes to the given settings
  /// The schedules to run on so many ranks of a mesh.
  std::vector<std::string> schedules_at(int of_ranks, const std::string& mesh) const;
  /// The combinations compared at a stage, in order: "pipeline=2, zb-h1"; a single text if there is only one.
  std::vector<std::string> variants() const;
  /// The text in variants() for a point's mesh and schedule.
  std::string variant(const std::string& mesh, const std::string& schedule) const;
  /// Plans sorted by ranks, then stage, mesh and schedule, with the study's names.
  std::vector<std::pair<PointKey, PointPlan>> plans_in_order() const;
};

/// The table of docs/internals/arithmetic.md: bytes of model state per parameter on a rank, for a compute
/// dtype and an accumulation dtype of so many bytes, `master` bytes of master weights beside the weights (4,
/// none in fp32 training) and `moments` bytes of moments.
double state_bytes_per_parameter(int stage, bool boundary, int ranks, int compute, int accumulation,
                                 double master, double moments);

/// The bytes of model state on the planned rank, from state_bytes_per_parameter() and the number of ranks
/// that share each buffer. `config` is the plan's, validated, without offload.
std::int64_t formula_state(const planner::PlanResult& plan, const Config& config);

/// A run that failed.
struct RunFailure {
  int ranks = 1, stage = 0, repeat = 1, status = 1;
  std::string what, command, tail;
  std::string mesh = {}, schedule = {};
  PointKey key() const { return {ranks, stage, mesh, schedule}; }
};

struct Spread {
  double middle = 0, low = 0, high = 0;
};
/// The median, minimum and maximum; zeros for an empty list.
Spread spread_of(std::vector<double> values);

/// The result of a point over its repeats.
struct PointResult {
  PointPlan plan;
  std::vector<RunFigures> runs;  ///< for each repeat
  RunFigures shown;              ///< the run of median speed (the slower of two)
  double peak_flops = 0;         ///< the highest peak measured by a run with equally many ranks
  bool oversubscribed = false;   ///< more threads than cores: times are not evaluated
  Spread tokens_per_second;
  /// The speed per rank relative to that with the stage's smallest number of ranks, within repeats; nullopt
  /// if either is oversubscribed.
  std::optional<Spread> efficiency;
  /// The processor time per token relative to that with the stage's smallest number of ranks, within repeats.
  std::optional<Spread> work_inflation;
};

struct StudyResults {
  std::vector<PointResult> points;  ///< by ranks, then stage, mesh, schedule; only those with a run
  std::vector<RunFailure> failures;
  std::vector<std::string> differences;  ///< measured values that differ from the prediction
  std::int64_t runs_wanted = 0, runs_done = 0;
  int stopped_by = 0;
  bool whole() const { return runs_done == runs_wanted; }
};

/// Combines the runs, given in any order.
StudyResults results_of(const StudyFacts& facts, const std::vector<RunFigures>& runs);

/// The number of ranks to which all stages' efficiencies are relative: the smallest that ran.
int base_ranks(const StudyResults& results);

/// docs/guides/scaling.md documents the keys and columns. `settings`: the study's, as JSON.
std::string results_json(const StudyFacts& facts, const StudyResults& results, const std::string& settings);
std::string results_csv(const StudyFacts& facts, const StudyResults& results);
/// The page: the runs' environment, the table, a separate table for points with more ranks than cores,
/// differences.
std::string results_table(const StudyFacts& facts, const StudyResults& results);
/// Pairs of file name and content.
std::vector<std::pair<std::string, std::string>> results_plots(const StudyFacts& facts,
                                                               const StudyResults& results);

}  // namespace tranche::tools
