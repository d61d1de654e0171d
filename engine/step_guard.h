#pragma once
/// Private to engine/.

#include "tranche/engine/engine.h"

namespace tranche {

/// Gives up the step that is open where its scope ends, on this rank: its peers have to do the same.
class StepGuard {
 public:
  explicit StepGuard(Engine& engine) : engine_(engine) {}
  ~StepGuard();
  StepGuard(const StepGuard&) = delete;
  StepGuard& operator=(const StepGuard&) = delete;

 private:
  Engine& engine_;
};

}  // namespace tranche
