#pragma once
/// The common part of `tranche train` and `tranche evaluate`: a job from its flags to an engine that is
/// ready.

#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/run_lease.h"
#include "tools/launch.h"
#include "tools/nodes.h"
#include "tools/train/progress.h"
#include "tools/train/report.h"
#include "tools/train/resume_source.h"
#include "tools/train/settings.h"
#include "tranche/engine/engine.h"
#include "tranche/planner/planner.h"
#include "tranche/report/memory_profile.h"
#include "tranche/training/checkpoint_schedule.h"
#include "tranche/training/evaluation.h"

namespace tranche::tools {

/// The streams of a command: results for people, from rank 0, and errors. The program's streams escape
/// control characters (core/printable.h), so commands write names unchanged.
struct Output {
  std::ostream& out;
  std::ostream& errors;
  bool terminal = false;  ///< `out` is a terminal
  bool exits = false;     ///< the process exits after the command
};

/// The parts of a run, which prepare() and start() create; they are destroyed in the reverse order.
struct Run {
  Options options;
  const Output& output;
  Launch launch;
  Settings settings;
  Data data;
  std::optional<checkpoint::RunLease> lease;  ///< of --checkpoint-dir, on rank 0
  std::unique_ptr<Runtime> runtime;
  std::unique_ptr<MemoryProfile> profile;  ///< with --memory-profile
  std::vector<RanksOfNode> nodes;          ///< from start() on, on all ranks
  Buffer withheld_memory;                  ///< allocated by --debug-out-of-memory
  double peak_flops = 0;                   ///< of all ranks together
  std::unique_ptr<Engine> engine;
  std::unique_ptr<training::BatchFeeder> feeder;
  Report report;
  ResumeSource resume_source;           ///< on rank 0
  bool begins_from_checkpoint = false;  ///< on all ranks
  bool takes_weights_only = false;      ///< on all ranks
  bool validation_due = false;          ///< on all ranks: the resumed run was to validate its last step
  std::string identity;                 ///< this run's description in its checkpoints

  Run(const Options& run_options, const Output& run_output)
      : options(run_options), output(run_output), launch(run_output.errors, run_options.flags) {}
  bool is_root() const { return launch.rank() == 0; }
  /// Prints a row of the table at the start, on rank 0.
  void print_row(std::string_view name, std::string_view value) const;

  /// Collective. Reads configuration, model and data; returns the exit status.
  int prepare();
  /// Collective. Creates the Runtime, measures matmul's speed, creates the engine, and prints the table at
  /// the start. Throws.
  void start();
  void show_start();
  /// Collective. Loads the checkpoint that the run resumes from into the engine; prints and reports the
  /// differences from the run that saved it.
  void load_resume_source();
  /// --debug-out-of-memory: allocates the memory that --device-memory leaves, on the flag's rank and at its
  /// step.
  void withhold_memory(std::int64_t step);
  /// Collective. The present loss on each held-out set, reported; rank 0 shows its progress. Empty, and not
  /// reported, if `stop` ended it.
  std::vector<training::Evaluation> validate(std::int64_t step, Progress& progress,
                                             const training::EvaluationStop& stop = {});
  /// The n-gram cross-entropies of the held-out text, on rank 0.
  NgramEntropies ngrams() const;
  /// Collective. If the configuration leaves out keys whose default has changed, keeps the values with which
  /// a resumed run was saved. Returns the exit status.
  int keep_earlier_defaults();
  /// Collective. `evaluate --from` without --sequence uses the length from the training. Returns 0, or the
  /// exit status.
  int take_sequence();
  bool took_sequence = false;  ///< set by take_sequence()
  /// Throws ConfigurationError if a file to write is one that the run reads, or two flags write one file.
  void require_files_apart() const;
  /// Throws ConfigurationError unless the files of --report, --trace and --metrics can be written. The run
  /// makes the folder of --checkpoint-dir first, because they may lie there.
  void require_output_files();
  /// Collective. Uses the adapters of the checkpoint from which the run starts if the configuration has none;
  /// refuses different ones. Returns the exit status.
  int take_adapters();
  /// Collective. Checks that all ranks can write checkpoints to one folder, and that no other run does.
  /// Returns the exit status.
  int require_folder();
  /// The request for a plan of this run, with tranche.host_state as it was asked for.
  planner::PlanRequest plan_request(int ranks_per_node) const;
  /// Collective. Replaces tranche.host_state auto by bytes, the same on all ranks. Returns the exit status.
  int resolve_host_state();
  bool host_state_is_auto = false;  ///< set by resolve_host_state()
  /// The advice below an error: for OutOfMemory, a configuration that would have fitted the budget.
  std::string advice_on(const std::exception_ptr& error, int ranks_per_node) const;
  /// Runs `work` after prepare() and start(); an exception ends the job.
  int execute(const std::function<void()>& work);
};

int run_train(const Options& options, const Output& output);
int run_evaluate(const Options& options, const Output& output);

}  // namespace tranche::tools
