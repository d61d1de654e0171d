#pragma once
/// The record of a run in its checkpoints: written by a save, and read by a run that goes on from one.
/// Private to engine/.

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
  /// All arguments outlive it.
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
  /// The program goes on where that run ended; notes in `result` say what differs.
  void go_on_from(const checkpoint::Manifest& manifest, LoadResult& result);

 private:
  void take_loss_scale(const checkpoint::RunState& run, std::vector<std::string>& notes);
  /// Takes the order in which the run added gradients up, as far as it can, and says where it differs.
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
