#pragma once
/// Parts of the training rule that a program supplies beside the configuration: docs/guides/training-rule.md.

#include <functional>
#include <memory>
#include <string>

#include "tranche/engine/step_result.h"
#include "tranche/optim/optimizer.h"
#include "tranche/optim/schedule.h"

namespace tranche {

/// Given to Engine's constructor, equal on all ranks; null: what the configuration says.
struct EngineOptions {
  std::unique_ptr<Optimizer> optimizer = nullptr;
  /// Asked for the rate and momentum of every step by the number of the update, so that a resumed run goes on
  /// in it without a state of its own. Ranks must get equal numbers; step() compares them.
  std::unique_ptr<Schedule> schedule = nullptr;
};

/// Called on every rank by Engine::step(), between the ranks' agreement on the gradients and the update: not
/// where the step is skipped anyway (overflow, no tokens). `found` has what is known by then: loss, norm,
/// clip coefficient, learning rate, loss scale, tokens. Engine::read_gradient() and write_gradient() give and
/// take what the update multiplies its rate with: the mean gradient, clipped; what is written is not clipped
/// again, and the norm in StepResult stays that of before. Other calls that read state are allowed too, those
/// that open, end or save something throw LogicError. Returns empty to go on, or why the step is to be
/// skipped
/// ("the gradient hook: " stands before it in StepResult::skipped_because): no weight and no state changes
/// then, the schedule does not move on, and the step counts neither as an overflow for the loss scale nor
/// towards tranche.maximum_consecutive_skips. The answer must be the same on all ranks, else step() throws
/// CommunicationError on all of them. An exception that leaves the hook ends the engine on all ranks.
using GradientHook = std::function<std::string(const StepResult& found)>;

}  // namespace tranche
