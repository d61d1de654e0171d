#pragma once
/// What a program brings to the training rule beside the configuration: docs/training-rule.md.

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

}  // namespace tranche
