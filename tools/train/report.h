#pragma once
/// The report of a run; docs/reference/report.md is its schema.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tools/nodes.h"
#include "tools/train/ngrams.h"
#include "tools/train/progress.h"
#include "tools/train/stage_times.h"
#include "tranche/engine/saved_state.h"
#include "tranche/engine/step_result.h"
#include "tranche/kernels/reduction.h"
#include "tranche/partition/mesh.h"
#include "tranche/training/checkpoint_schedule.h"

namespace tranche::tools {

/// "tranche-report-1": changes with any key's meaning, not with keys that are added.
inline constexpr const char* report_schema = "tranche-report-1";

/// Two lanes as 32 hexadecimal digits.
std::string format_digest(const kernels::Digest& digest);

/// The placement of ranks, as rank 0 sees it.
struct Placement {
  int ranks_on_node = 1;  ///< of its node
  int threads = 1;        ///< of a rank's kernels
  int cores = 1;          ///< that rank 0 may run on
  int node_cores = 1;     ///< that its host has
};

/// A warning of too few cores for the threads of ranks, or of a rank that was bound to fewer than its
/// share; empty where all is well.
std::string note_on_cores(const Placement& placement);

/// Collects on rank 0 what a run says of itself. Without keep_for() there is no report, and nothing is kept
/// of steps, validations and checkpoints; with it they wait in files, so that memory does not grow with them.
class Report {
 public:
  Report();
  ~Report();
  Report(const Report&) = delete;
  Report& operator=(const Report&) = delete;

  /// Before anything is added: write() will write to `path`. Throws ConfigurationError where nothing can wait
  /// for that (tools/train/spool.h).
  void keep_for(const std::string& path);
  void set_start(int world, int stage, const std::string& config_json, const std::string& fingerprint,
                 const std::string& model_name, const std::string& data_path);
  /// The step is held in memory until add_processor_seconds() names it.
  void add_step(const StepResult& result);
  /// Digests after the step that was added last.
  void add_step_digest(const kernels::Digest& weights, const kernels::Digest& state);
  /// `set`: the held-out set's name; empty: the only one.
  void add_validation(std::int64_t step, const EvaluationResult& result, const std::string& set = {});
  void set_best(const training::BestCheckpoint& best);
  void set_ngrams(const NgramEntropies& entropies);
  /// JSON objects of the Engine's reports.
  void set_engine(const std::string& memory, const std::string& traffic, const std::string& model);
  void set_digests(const kernels::Digest& weights, const kernels::Digest& state);
  void set_speed(const TokenRate& rate, double peak_flops, double peak_share);
  /// Processor seconds of all ranks in each of the oldest steps that have none yet, in their order.
  void add_processor_seconds(const std::vector<double>& steps);
  void set_placement(const Placement& placement);
  /// Goes into the placement: after set_placement().
  void set_nodes(const std::vector<RanksOfNode>& nodes);
  void set_mesh(const Mesh& mesh);
  /// Sets the times of a pipeline's stages, in order. The report has no such block if `stages` is empty.
  void set_stages(const std::vector<StageTime>& stages);
  void set_sample(const std::string& text);
  void add_checkpoint(const training::CompletedCheckpoint& record);
  /// `changes` has a line for each setting that is not as it was.
  void set_resumed(const LoadResult& loaded, bool weights_only, const kernels::Digest& weights,
                   const kernels::Digest& state, const std::vector<std::string>& changes);
  /// The signal that ended the run before its last step.
  void set_stopped(const std::string& signal);
  /// Writes the report as OutputFile does. Throws IoError. Does nothing without keep_for().
  void write();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tranche::tools
