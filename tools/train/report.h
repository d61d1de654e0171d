#pragma once
/// The report of a run; docs/reference/report.md documents its schema.

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

/// "tranche-report-1": changes when the meaning of a key changes, not when keys are added.
inline constexpr const char* report_schema = "tranche-report-1";

/// The digest's two words as 32 hexadecimal digits.
std::string format_digest(const kernels::Digest& digest);

/// The placement of ranks, from rank 0's view.
struct Placement {
  int ranks_on_node = 1;  ///< on rank 0's node
  int threads = 1;        ///< per rank, for kernels
  int cores = 1;          ///< on which rank 0 may run
  int node_cores = 1;     ///< of rank 0's host
};

/// A warning about fewer cores than threads of ranks, or about a rank that was bound to fewer cores than its
/// share; empty if there is no problem.
std::string note_on_cores(const Placement& placement);

/// A line if OMP_NUM_THREADS, whose text is `given` (null: not set), asks for another number of threads. A 1
/// is what launchers set for all programs.
std::string note_on_openmp(const char* given, int threads);

/// A line if a script of Slurm starts one rank in an allocation of several tasks, whose number is `tasks`
/// (null: not set), without a launcher.
std::string note_on_tasks(const char* tasks, bool launched);

/// Collects the run's report on rank 0. Without keep_for() there is no report, and steps, validations and
/// checkpoints are not kept; with it they are stored in files, so that memory does not grow with them.
class Report {
 public:
  Report();
  ~Report();
  Report(const Report&) = delete;
  Report& operator=(const Report&) = delete;

  /// Call before anything is added: write() will write to `path`. Throws ConfigurationError if the pending
  /// parts cannot be stored (tools/train/spool.h).
  void keep_for(const std::string& path);
  void set_start(int world, int stage, const std::string& config_json, const std::string& fingerprint,
                 const std::string& model_name, const std::string& data_path);
  /// The step is held in memory until add_processor_seconds() covers it.
  void add_step(const StepResult& result);
  /// Adds the digests after the latest step.
  void add_step_digest(const kernels::Digest& weights, const kernels::Digest& state);
  /// `set`: the held-out set's name; empty: the only one.
  void add_validation(std::int64_t step, const EvaluationResult& result, const std::string& set = {});
  void set_best(const training::BestCheckpoint& best);
  void set_ngrams(const NgramEntropies& entropies);
  /// Sets the JSON objects of the Engine's reports.
  void set_engine(const std::string& memory, const std::string& traffic, const std::string& model);
  void set_digests(const kernels::Digest& weights, const kernels::Digest& state);
  /// True if `path` is a report of the state that set_digests() was told.
  bool has_state_of(const std::string& path) const;
  void set_speed(const TokenRate& rate, double peak_flops, double peak_share);
  /// Sets the processor seconds of all ranks for the oldest steps without them, in order.
  void add_processor_seconds(const std::vector<double>& steps);
  void set_placement(const Placement& placement);
  /// Becomes part of the placement, so call it after set_placement().
  void set_nodes(const std::vector<RanksOfNode>& nodes);
  void set_mesh(const Mesh& mesh);
  /// Sets the times of a pipeline's stages, in order. The report has no such block if `stages` is empty.
  void set_stages(const std::vector<StageTime>& stages);
  void set_sample(const std::string& text);
  void add_checkpoint(const training::CompletedCheckpoint& record);
  /// `changes` has a line for each setting that changed.
  void set_resumed(const LoadResult& loaded, bool weights_only, const kernels::Digest& weights,
                   const kernels::Digest& state, const std::vector<std::string>& changes);
  /// Sets the signal that ended the run before its last step.
  void set_stopped(const std::string& signal);
  /// Writes the report as OutputFile does. Throws IoError. Does nothing without keep_for().
  void write();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tranche::tools
