#pragma once
/// Updates of a step before its ranks have agreed on the gradients (tranche.update: as_reduced). Private to
/// engine/.

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/breakdown.h"
#include "engine/exposed_time.h"
#include "engine/parameter_gatherer.h"
#include "engine/state_store.h"
#include "engine/step_boundary.h"
#include "tranche/config/config.h"

namespace tranche::detail {

/// Issues the update of each flat buffer in the last micro-batch of a step, once the reduction of its
/// gradient was launched and nobody holds its unit. State on the device is updated one submission later, so
/// that the compute stream does not wait for a reduction that has just begun. Where weights are fetched for
/// the backward pass, buffers with weights on the device wait for its end: the copies of their new weights
/// wait for compute, and the fetches behind them would too. The order follows from the
/// model's calls, so that ranks of a group issue their gathers of new weights in the same one. An error in
/// begin(), issue() or finish() ends the engine: part of the state may be that of the next step.
class EarlyUpdates {
 public:
  /// All arguments except `config` must outlive it. If on() is false, begin() must not be called, and the
  /// other calls do nothing.
  EarlyUpdates(StateStore& store, StepBoundary& boundary, const ParameterGatherer& gatherer,
               ExposedTime& exposed, Breakdown& breakdown, const Config& config)
      : store_(store),
        boundary_(boundary),
        gatherer_(gatherer),
        exposed_(exposed),
        breakdown_(breakdown),
        on_(config.update == UpdateTime::as_reduced),
        fetches_(config.offload.parameters != OffloadTier::none) {}

  bool on() const { return on_; }
  /// Called when the last micro-batch of a step begins. Buffers whose gradients become complete after this
  /// call are updated with `step`.
  void begin(const OptimizerStep& step);
  /// The argument of begin(), until end_step(); otherwise empty.
  const std::optional<OptimizerStep>& begun() const { return step_; }
  /// Called after the last reduction of the buffer's gradient was launched.
  void complete(FlatBuffer& flat);
  /// Issues the updates that may begin now. `submitted`: a unit has just submitted its gradients.
  void issue(bool submitted);
  /// Issues all remaining updates. The gradients of every buffer must be complete.
  void finish();
  /// True if an update of the unit's weights was issued in this step.
  bool updated(int unit) const;
  void end_step();

 private:
  struct Waiting {
    FlatBuffer* flat;
    int unit;
    std::int64_t submission;  ///< the number of the submission that completed its gradient
  };
  void update(FlatBuffer& flat);
  template <class Work>
  void ending_on_error(Work&& work);

  StateStore& store_;
  StepBoundary& boundary_;
  const ParameterGatherer& gatherer_;
  ExposedTime& exposed_;
  Breakdown& breakdown_;
  const bool on_;
  const bool fetches_;  ///< the backward pass copies weights to the device
  std::optional<OptimizerStep> step_;
  std::int64_t submissions_ = 0;
  std::vector<Waiting> waiting_;
  std::vector<char> updated_;  ///< by unit: an update was issued
};

}  // namespace tranche::detail
