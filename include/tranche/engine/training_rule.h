#pragma once
/// Parts of the training rule that a program supplies instead of the configuration:
/// docs/guides/training-rule.md.

#include <functional>
#include <memory>
#include <string>

#include "tranche/engine/step_result.h"
#include "tranche/optim/optimizer.h"
#include "tranche/optim/schedule.h"

namespace tranche {

/// Passed to Engine's constructor, equal on all ranks; null: as configured.
struct EngineOptions {
  std::unique_ptr<Optimizer> optimizer = nullptr;
  /// Gives the rate and momentum of every step by the number of the update, so that a resumed run continues
  /// it without saved state. Ranks must get equal numbers; step() compares them.
  std::unique_ptr<Schedule> schedule = nullptr;
};

/// Engine::step() calls this on every rank, after the ranks have agreed on the gradients and before the
/// update. It is not called if the step is skipped anyway (overflow, no tokens). `found` has the known
/// results: loss, norm, clip coefficient, learning rate, loss scale, tokens. Engine::read_gradient() and
/// write_gradient() access the gradient that the update uses: the mean gradient, clipped. Written values are
/// not clipped again, and the norm in StepResult does not change. Other calls that read state are allowed
/// too; calls that begin, end or save something throw LogicError. Returns an empty text to continue, or the
/// reason to skip the step (StepResult::skipped_because has it after "the gradient hook: "). A skipped step
/// changes no weight and no state, does not advance the schedule, and counts neither as an overflow for the
/// loss scale nor towards tranche.maximum_consecutive_skips. The answer must be the same on all ranks, else
/// step() throws CommunicationError on all of them. An exception that leaves the hook ends the engine on all
/// ranks.
using GradientHook = std::function<std::string(const StepResult& found)>;

}  // namespace tranche
