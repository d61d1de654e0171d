#pragma once
/// Plans of all ranks that do different work on a sample: one rank of each pipeline stage and of each class
/// of coordinates on the axis `tensor` whose ranks have parts of equal sizes.

#include <cstdint>
#include <string>
#include <vector>

#include "tranche/planner/planner.h"

namespace tranche::planner {

/// Changes when the meaning of a key changes, but not when keys are added.
inline constexpr const char* stage_plans_schema = "tranche-stage-plans-1";

struct StagePlan {
  int stage = 0;             ///< its number on the mesh's axis `pipeline`
  std::vector<int> tensors;  ///< coordinates on the mesh's axis `tensor` whose ranks have equal plans
  PlanRequest request;       ///< its rank is the first of these coordinates
  PlanResult plan;
  /// "stage 1", "tensor 1" or "stage 1, tensor 0-2", as the mesh has these axes.
  std::string name() const;
  /// "1", "0-2" or "0, 2-3": the coordinates on `tensor`.
  std::string tensor_text() const;
  std::int64_t state_bytes() const {
    return plan.state.parameters + plan.state.gradients + plan.state.optimizer;
  }
  /// Residuals and gradients that the rank sends to its neighbours in a step, without reductions of tied
  /// tensors.
  TrafficCount messages() const;
};

/// Plans the first rank of each stage and of each class of coordinates on `tensor` of the request's mesh; the
/// request's own rank is ignored. Plans that do not fit (shortages()) come first, then the order is by peak
/// device memory, largest first. `other_gathering` adds plan_other_gathering() to each plan. Throws
/// ConfigurationError as plan_run() does.
std::vector<StagePlan> plan_stages(const PlanRequest& request, std::int64_t budget,
                                   bool other_gathering = false);

/// A text with the properties that all plans share, and a line for each in the order of `plans`. A `budget`
/// of 0 means that there is no budget.
std::string stage_plans_text(const std::vector<StagePlan>& plans, std::int64_t budget);
/// The same as JSON, with each stage's whole plan. docs/reference/plan-files.md has the keys.
std::string stage_plans_json(const std::vector<StagePlan>& plans, std::int64_t budget);

}  // namespace tranche::planner
