#pragma once
/// Abandons a step at the end of a scope. Private to engine/.

#include "tranche/engine/engine.h"

namespace tranche {

/// Abandons the open step of this rank, if there is one, when its scope ends; the peers must do the same.
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
