#pragma once
/// The record of a run in its checkpoints: save() writes it, and load() restores a run from it. Private to
/// engine/.

#include <string>
#include <vector>

#include "checkpoint/format.h"
#include "engine/gradient_reducer.h"
#include "engine/run_progress.h"
#include "engine/step_rule.h"
#include "tranche/engine/runtime.h"
#include "tranche/engine/saved_state.h"
#include "tranche/optim/loss_scaler.h"

namespace tranche::detail {

class RunRecord {
 public:
  /// All arguments must outlive it.
  RunRecord(const Runtime& runtime, const Config& config, const Optimizer& optimizer, RunProgress& progress,
            StepRule& rule, LossScaler& scaler, GradientReducer& reducer)
      : runtime_(runtime),
        config_(config),
        optimizer_(optimizer),
        progress_(progress),
        rule_(rule),
        scaler_(scaler),
        reducer_(reducer) {}

  void describe(checkpoint::Manifest& manifest) const;
  /// Continues the run of that checkpoint; changes and notes in `result` list the differences.
  void go_on_from(const checkpoint::Manifest& manifest, LoadResult& result);

 private:
  void note_changes(const checkpoint::RunState& run, std::vector<std::string>& changes) const;
  void take_loss_scale(const checkpoint::RunState& run, std::vector<std::string>& notes);
  /// Restores the order in which the saved run added gradients, as far as possible, and notes where it
  /// differs.
  void take_order_of_sums(const checkpoint::Manifest& manifest, std::vector<std::string>& notes);
  void note_defaults(const checkpoint::RunState& run, std::vector<std::string>& notes) const;
  void note_numerics(const std::string& saved, std::vector<std::string>& notes) const;

  const Runtime& runtime_;
  const Config& config_;
  const Optimizer& optimizer_;
  RunProgress& progress_;
  StepRule& rule_;
  LossScaler& scaler_;
  GradientReducer& reducer_;
};

}  // namespace tranche::detail
