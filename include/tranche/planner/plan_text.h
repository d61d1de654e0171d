#pragma once
/// Plans for people, and as JSON.

#include <cstdint>
#include <string>
#include <vector>

#include "tranche/planner/planner.h"

namespace tranche::planner {

/// "tranche-plan-1": changes with any key's meaning, not with keys that are added.
inline constexpr const char* plan_schema = "tranche-plan-1";

/// The parts of a plan that are beyond a budget, a line each: device memory (`budget`; 0: none) and the
/// configuration's for host memory and nvme; beside a `budget`, host memory is also what the request says
/// that there is. Empty when it fits.
std::vector<std::string> shortages(const PlanRequest& request, const PlanResult& result, std::int64_t budget);

/// Tables: state, memory by tier and category, the peak and who was alive then, traffic, work. A `budget` of
/// 0 is none.
std::string plan_text(const PlanRequest& request, const PlanResult& result, std::int64_t budget);
/// The ladder of a search, and what came of it.
std::string fit_text(const FitRequest& request, const FitResult& result);

/// docs/reference/plan-files.md has the keys.
std::string plan_json(const PlanRequest& request, const PlanResult& result, std::int64_t budget);
/// The plan of the chosen configuration with "ladder", "cost_model", "budget_bytes" and "missing_bytes".
std::string fit_json(const FitRequest& request, const FitResult& result);

/// One line that names a configuration by what was searched.
std::string describe(const FitTrial& trial);

}  // namespace tranche::planner
