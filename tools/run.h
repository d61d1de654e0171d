#pragma once
/// What `tranche train` and `tranche evaluate` share: a job from its flags to an engine that is ready.

#include <iosfwd>
#include <memory>

#include "tranche/engine/engine.h"
#include "tranche/models/gpt.h"
#include "tranche/tools/evaluation.h"
#include "tranche/tools/launch.h"
#include "tranche/tools/report.h"
#include "tranche/tools/settings.h"

namespace tranche::tools {

/// Where a command writes: results for people, from rank 0, and errors.
struct Output {
  std::ostream& out;
  std::ostream& errors;
  bool terminal = false;  ///< `out` is one
};

/// The parts of a run; made by prepare() and start(), destroyed in the reverse order.
struct Run {
  const Options& options;
  const Output& output;
  Launch launch;
  Settings settings;
  Data data;
  std::unique_ptr<Runtime> runtime;
  std::unique_ptr<models::Gpt> model;
  double peak_flops = 0;  ///< of all ranks together
  std::unique_ptr<Engine> engine;
  std::unique_ptr<BatchFeeder> feeder;
  Report report;

  Run(const Options& run_options, const Output& run_output)
      : options(run_options), output(run_output), launch(run_output.errors) {}
  bool speaks() const { return launch.rank() == 0; }

  /// Collective. Reads configuration, model and data; returns the exit status.
  int prepare();
  /// Collective. Runtime, matmul's speed, engine; prints the table of the start. Throws.
  void start();
  /// Collective. Held-out loss now; said and reported.
  EvaluationResult validate(std::int64_t step);
  /// n-gram cross-entropies of the held-out text, on rank 0.
  NgramEntropies ngrams() const;
  /// Runs `work` after prepare() and start(), turning what is thrown into the end of the job.
  int execute(const std::function<void()>& work);
};

int run_train(const Options& options, const Output& output);
int run_evaluate(const Options& options, const Output& output);

}  // namespace tranche::tools
