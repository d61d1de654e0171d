#pragma once
#include <string>

#include "tranche/planner/projection.h"

namespace tranche::planner {

/// For example "6.88 ms".
std::string seconds_text(double seconds);
/// The table that follows a plan's tables.
std::string projection_text(const ProjectionRequest& request, const Projection& projection);
/// A plan's JSON with the key "projection" added (docs/guides/projection.md).
std::string with_projection(const std::string& plan_json, const ProjectionRequest& request,
                            const Projection& projection);

}  // namespace tranche::planner
