#pragma once
/// The outcome of a search of meshes, for people and as JSON.

#include <string>

#include "tranche/planner/mesh_search.h"

namespace tranche::planner {

/// "shard=4, tensor=2, stage 2, ...": a configuration in one line.
std::string describe(const MeshTrial& one);
/// The choice and its reason, the next best, how many were tried, and where nothing fits what would make
/// room. `command` is the line that runs the choice.
std::string mesh_search_text(const MeshSearchRequest& request, const MeshSearchResult& result,
                             const std::string& command);
/// The object of a plan (plan_json() or stage_plans_json()) with "search" in it. docs/reference/plan-files.md
/// has the keys.
std::string with_search(const std::string& plan, const MeshSearchRequest& request,
                        const MeshSearchResult& result, const std::string& command);

}  // namespace tranche::planner
