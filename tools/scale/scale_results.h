#pragma once
/// The results of a scaling study's runs, and figures that follow from them. Seconds and bytes unless a name
/// says otherwise.

#include <array>
#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tools/node.h"
#include "tranche/config/config.h"
#include "tranche/device/ledger.h"
#include "tranche/planner/planner.h"

namespace tranche::tools {

/// "tranche-scale-1": changes with any key's meaning, not with keys that are added.
inline constexpr const char* scale_schema = "tranche-scale-1";

/// The parts of a step's time, on rank 0, mean over the timed steps of a run; adds up to `seconds`.
struct StepParts {
  double compute = 0;   ///< the rest of the step
  double gather = 0;    ///< exposed
  double reduce = 0;    ///< exposed
  double messages = 0;  ///< exposed: waits for other stages of a pipeline, and for rows of the axis `tensor`
  double update = 0;    ///< norm, agreement, optimizer
  double other = 0;     ///< exposed offload, and between steps
  double seconds() const { return compute + gather + reduce + messages + update + other; }
  double exposed() const { return gather + reduce + messages; }
};

/// The runs of a study that differ in the repeat alone.
struct PointKey {
  int ranks = 1, stage = 0;
  std::string mesh = {}, schedule = {};  ///< as ScaleOptions has them
  auto operator<=>(const PointKey&) const = default;
  std::string text() const;  ///< "4 ranks, stage 3, mesh pipeline=2, schedule zb-h1"
};

/// One run, from its report.
struct RunFigures {
  int ranks = 1, stage = 0, repeat = 1;
  std::string mesh;      ///< as the study has it; of a report alone, in full, or empty where it says none
  std::string schedule;  ///< as the study has it; of a report alone, the configuration's
  double tokens_per_second = 0;  ///< of positions, learned or not, as all figures of tokens here
  StepParts step;
  double tokens_per_step = 0;
  double cpu_seconds_per_token = 0;
  std::int64_t elements = 0, formula_elements = 0;  ///< on the wire, of rank 0 in a step
  std::int64_t bytes = 0, formula_bytes = 0;
  std::array<std::int64_t, tier_count> peak{};  ///< highest of all ranks, by tier
  std::int64_t state = 0;  ///< parameters, gradients and optimizer on the device, from start to end
  double peak_flops = 0, flops_per_token = 0;
  int ranks_on_node = 1, threads = 1, cores = 1, node_cores = 1;
  std::string weights_digest, fingerprint;
  PointKey key() const { return {ranks, stage, mesh, schedule}; }
  /// The share of a peak of so many operations a second.
  double peak_share(double peak) const;
};

/// Reads a report (docs/reference/report.md) without its first `warmup` steps. Throws Error naming what it
/// lacks.
RunFigures figures_of(const std::string& report, std::int64_t warmup);

/// The facts that are known of a point before it runs.
struct PointPlan {
  int ranks = 1, stage = 0;
  std::string mesh, schedule;
  std::int64_t micro_batch = 1, accumulation = 1, batch = 1;
  int ranks_per_node = 1;  ///< of this number of ranks
  bool placed = true;      ///< false: where ranks go is not known, and they are planned as on one node
  std::int64_t bytes = 0;  ///< that rank 0 sends in a step
  std::array<std::int64_t, tier_count> peak{};  ///< highest of all ranks, by tier
  std::int64_t state = 0;                       ///< of rank 0 on the device, as the plan says
  std::int64_t formula_state = 0;               ///< by formula_state()
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
  double load_average = 0;  ///< of the node then, over a minute
  NodeDescription node;
  std::vector<int> ranks, stages;
  std::vector<std::string> meshes{""}, schedules{""};  ///< as ScaleOptions has them
  std::map<PointKey, PointPlan> plans;
  /// The curves of the plots, also between the ranks that run.
  std::map<CurveKey, std::vector<PointPlan>> curves;
  std::vector<std::string> notes;  ///< what a study changes of what it was given
  /// What runs beside each other at a stage, in order: "pipeline=2, zb-h1"; one text where nothing does.
  std::vector<std::string> variants() const;
  /// The text of a point's mesh and schedule among them.
  std::string variant(const std::string& mesh, const std::string& schedule) const;
  /// Plans by ranks, then stage, mesh and schedule, each as the study names them.
  std::vector<std::pair<PointKey, PointPlan>> plans_in_order() const;
};

/// The table of docs/internals/design.md: bytes of model state a parameter takes on a rank, for a compute
/// dtype and an accumulation dtype of so many bytes, `master` bytes of master weights beside the weights (4,
/// none in fp32 training) and `moments` bytes of moments.
double state_bytes_per_parameter(int stage, bool boundary, int ranks, int compute, int accumulation,
                                 double master, double moments);

/// Bytes of model state that the planned rank keeps, by state_bytes_per_parameter() and the number of ranks
/// that share each buffer. `config` is the plan's, validated, without offload.
std::int64_t formula_state(const planner::PlanResult& plan, const Config& config);

/// A run that did not end well.
struct RunFailure {
  int ranks = 1, stage = 0, repeat = 1, status = 1;
  std::string what, command, tail;
  std::string mesh = {}, schedule = {};
  PointKey key() const { return {ranks, stage, mesh, schedule}; }
};

struct Spread {
  double middle = 0, low = 0, high = 0;
};
/// Median, least and most; of nothing, zeros.
Spread spread_of(std::vector<double> values);

/// A point over its repeats.
struct PointResult {
  PointPlan plan;
  std::vector<RunFigures> runs;  ///< by repeat
  RunFigures shown;              ///< the run of median speed (the slower of two)
  double peak_flops = 0;         ///< the highest that a run of as many ranks measured
  bool oversubscribed = false;   ///< more threads of ranks than cores: its seconds are not claimed
  Spread tokens_per_second;
  /// Speed of a rank against that of a rank in the smallest number of ranks of the stage, within repeats; not
  /// where either is oversubscribed.
  std::optional<Spread> efficiency;
  /// Processor time of a token against that in the smallest number of ranks, within repeats.
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

/// Puts runs together. `runs` in any order.
StudyResults results_of(const StudyFacts& facts, const std::vector<RunFigures>& runs);

/// Ranks that all stages' efficiencies are against: the smallest that ran.
int base_ranks(const StudyResults& results);

/// docs/guides/scaling.md has the keys and columns. `settings`: the study's, as JSON.
std::string results_json(const StudyFacts& facts, const StudyResults& results, const std::string& settings);
std::string results_csv(const StudyFacts& facts, const StudyResults& results);
/// The page: what ran where, the table, the points with more ranks than cores apart, what differs.
std::string results_table(const StudyFacts& facts, const StudyResults& results);
/// File name and content.
std::vector<std::pair<std::string, std::string>> results_plots(const StudyFacts& facts,
                                                               const StudyResults& results);

}  // namespace tranche::tools
