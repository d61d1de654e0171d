#pragma once
/// The progress of a run, and whether its weights are sound. Private to engine/.

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "checkpoint/format.h"
#include "engine/checkpoint_session.h"
#include "engine/step_boundary.h"
#include "tranche/config/config.h"
#include "tranche/engine/step_result.h"

namespace tranche::detail {

class RunProgress {
 public:
  /// Both must outlive it. Notifies `session` when weights have proved good.
  RunProgress(const Config& config, CheckpointSession& session) : config_(config), session_(session) {}

  std::int64_t steps() const { return steps_; }
  std::int64_t applied() const { return applied_; }
  std::int64_t samples() const { return samples_; }
  /// Consecutive skipped steps, without those skipped by the hook; includes those before a load().
  std::int64_t skipped_at_end() const { return skipped_at_end_; }
  /// True when the last loss or gradient of the present weights was not finite.
  bool in_doubt() const { return in_doubt_; }
  /// True when the present weights gave a finite loss, and no step was skipped since.
  bool proven() const { return proven_; }

  /// Counts a step, and records its result as evidence about the weights with which it began.
  void take_step(const StepResult& result, bool skipped_by_hook);
  /// The NumericalError to throw if too many consecutive steps, up to `last`, were skipped; null otherwise.
  std::exception_ptr too_many_skips(const StepResult& last) const;
  /// Records an evaluation's result as evidence about the weights.
  void take_evaluation(const EvaluationResult& result);
  /// Called after the program has written weights.
  void weights_written();
  /// Called after all weights were loaded.
  void weights_loaded();
  /// The noise of a step's gradient, averaged over steps, also over those before a load(). `unscale` is the
  /// factor from the main gradient to the gradient of the summed loss.
  GradientNoise noise_of(const StepBoundary::Agreement& found, double unscale);

  void describe(checkpoint::RunState& run) const;
  /// Continues that run; `notes` get a line if it did not save the averages of the gradient noise.
  void go_on_from(const checkpoint::RunState& run, std::vector<std::string>& notes);

 private:
  const Config& config_;
  CheckpointSession& session_;
  std::int64_t steps_ = 0, applied_ = 0, samples_ = 0, tokens_ = 0;
  std::int64_t consecutive_skips_ = 0;  ///< since this engine was made
  std::int64_t skipped_at_end_ = 0;
  bool in_doubt_ = false, proven_ = false;
  bool weights_written_ = false;  ///< since the last applied step
  GradientNoise noise_;           ///< weighted sums over the steps
};

}  // namespace tranche::detail
