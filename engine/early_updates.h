#pragma once
/// Updates of a step before its ranks have agreed on the gradients (tranche.update: as_reduced). Private to
/// engine/.

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/exposed_time.h"
#include "engine/parameter_gatherer.h"
#include "engine/state_store.h"
#include "engine/step_boundary.h"

namespace tranche::detail {

/// Issues the update of each flat buffer in the last micro-batch of a step, once the reduction of its
/// gradient was launched and nobody holds its unit. State on the device is updated one submission later, so
/// that the compute stream does not wait for a reduction that has just begun. The order follows from the
/// model's calls, so that ranks of a group issue their gathers of new weights in the same one.
class EarlyUpdates {
 public:
  /// All outlive it. `on` false: begin() is not called, and the other calls do nothing.
  EarlyUpdates(StateStore& store, StepBoundary& boundary, const ParameterGatherer& gatherer,
               ExposedTime& exposed, bool on)
      : store_(store), boundary_(boundary), gatherer_(gatherer), exposed_(exposed), on_(on) {}

  bool on() const { return on_; }
  /// The last micro-batch of a step begins: what is complete from here on is updated with `step`.
  void begin(const OptimizerStep& step);
  /// The step of begin(), until end_step(); otherwise empty.
  const std::optional<OptimizerStep>& begun() const { return step_; }
  /// The last reduction of the buffer's gradient was launched.
  void complete(FlatBuffer& flat);
  /// Issues what may be issued. `submitted`: a unit has just submitted its gradients.
  void issue(bool submitted);
  /// Issues all that is left; gradients of every buffer are complete.
  void finish();
  /// The unit's weights are those of the next step, or will be.
  bool updated(int unit) const;
  void end_step();

 private:
  struct Waiting {
    FlatBuffer* flat;
    int unit;
    std::int64_t submission;  ///< that completed its gradient
  };
  void update(FlatBuffer& flat);

  StateStore& store_;
  StepBoundary& boundary_;
  const ParameterGatherer& gatherer_;
  ExposedTime& exposed_;
  const bool on_;
  std::optional<OptimizerStep> step_;
  std::int64_t submissions_ = 0;
  std::vector<Waiting> waiting_;
  std::vector<char> updated_;  ///< by unit: an update was issued
};

}  // namespace tranche::detail
