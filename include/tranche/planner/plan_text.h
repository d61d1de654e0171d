#pragma once
/// Plans as text and as JSON.

#include <cstdint>
#include <string>
#include <vector>

#include "tranche/planner/planner.h"

namespace tranche::planner {

/// Changes when the meaning of a key changes, but not when keys are added.
inline constexpr const char* plan_schema = "tranche-plan-1";

/// The shortages of a plan, a line each: device memory beyond `budget` (0: no budget), and host memory and
/// nvme beyond the limits of the configuration. If there is a `budget`, host memory is also compared with the
/// request's host_memory. Empty if the plan fits.
std::vector<std::string> shortages(const PlanRequest& request, const PlanResult& result, std::int64_t budget);

/// Tables of state, memory by tier and category, the peak and the buffers alive at it, traffic, and work. A
/// `budget` of 0 means that there is none.
std::string plan_text(const PlanRequest& request, const PlanResult& result, std::int64_t budget);
/// The ladder of a search and its result.
std::string fit_text(const FitRequest& request, const FitResult& result);

/// docs/reference/plan-files.md has the keys.
std::string plan_json(const PlanRequest& request, const PlanResult& result, std::int64_t budget);
/// The plan of the chosen configuration with "ladder", "cost_model", "budget_bytes" and "missing_bytes".
std::string fit_json(const FitRequest& request, const FitResult& result);

/// One line that names a configuration by the settings that were searched.
std::string describe(const FitTrial& trial);

}  // namespace tranche::planner
