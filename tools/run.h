#pragma once
/// The common part of `tranche train` and `tranche evaluate`: a job from its flags to an engine that is
/// ready.

#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "checkpoint/run_lease.h"
#include "tools/evaluation.h"
#include "tools/launch.h"
#include "tools/report.h"
#include "tools/resume_source.h"
#include "tools/settings.h"
#include "tranche/engine/engine.h"
#include "tranche/models/gpt.h"
#include "tranche/report/memory_profile.h"

namespace tranche::tools {

/// The streams of a command: results for people, from rank 0, and errors. The program's streams make visible
/// what a terminal would obey (core/printable.h), so commands write names as they are in files.
struct Output {
  std::ostream& out;
  std::ostream& errors;
  bool terminal = false;  ///< `out` is one
};

/// The parts of a run; made by prepare() and start(), destroyed in the reverse order.
struct Run {
  Options options;
  const Output& output;
  Launch launch;
  Settings settings;
  Data data;
  std::optional<checkpoint::RunLease> lease;  ///< of --checkpoint-dir, on rank 0
  std::unique_ptr<Runtime> runtime;
  std::unique_ptr<MemoryProfile> profile;  ///< with --memory-profile
  Buffer taken_away;                       ///< by --debug-out-of-memory
  std::unique_ptr<models::Gpt> model;
  double peak_flops = 0;  ///< of all ranks together
  std::unique_ptr<Engine> engine;
  std::unique_ptr<BatchFeeder> feeder;
  Report report;
  ResumeSource resume_source;           ///< on rank 0
  bool begins_from_checkpoint = false;  ///< on all ranks
  bool takes_weights_only = false;      ///< on all ranks
  std::string identity;                 ///< what checkpoints say of this run

  Run(const Options& run_options, const Output& run_output)
      : options(run_options), output(run_output), launch(run_output.errors, run_options.flags) {}
  bool speaks() const { return launch.rank() == 0; }
  /// A row of the table of the start, on rank 0.
  void row(std::string_view name, std::string_view value) const;

  /// Collective. Reads configuration, model and data; returns the exit status.
  int prepare();
  /// Collective. Runtime, matmul's speed, engine; prints the table of the start. Throws.
  void start();
  void show_start();
  /// Collective. From a checkpoint to the engine; says what is not as it was.
  void take_over();
  /// --debug-out-of-memory, on the rank and at the step that it names.
  void take_memory_away(std::int64_t step);
  /// Collective. Held-out loss now; said and reported.
  EvaluationResult validate(std::int64_t step);
  /// n-gram cross-entropies of the held-out text, on rank 0.
  NgramEntropies ngrams() const;
  /// Collective. Where a run goes on whose configuration leaves out what earlier versions had another default
  /// for, it keeps what it was saved with.
  int keep_earlier_defaults();
  /// Collective. Whether checkpoints can be written where they are to go, by all ranks to one folder, and by
  /// no other run.
  int require_folder();
  /// The advice below an error: of OutOfMemory, the configuration that would have fitted the budget.
  std::string advice_on(const std::exception_ptr& error, int ranks_per_node) const;
  /// Runs `work` after prepare() and start(), turning what is thrown into the end of the job.
  int execute(const std::function<void()>& work);
};

int run_train(const Options& options, const Output& output);
int run_evaluate(const Options& options, const Output& output);

}  // namespace tranche::tools
