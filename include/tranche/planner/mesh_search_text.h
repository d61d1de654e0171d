#pragma once
/// The result of a mesh search as text and as JSON.

#include <string>

#include "tranche/planner/mesh_search.h"

namespace tranche::planner {

/// A configuration in one line: "shard=4, tensor=2, stage 2, ...".
std::string describe(const MeshTrial& one);
/// The chosen configuration and the reason, the next best ones, and how many were tried; if nothing fits, the
/// settings that would make room. `command` is the command line that runs the chosen one.
std::string mesh_search_text(const MeshSearchRequest& request, const MeshSearchResult& result,
                             const std::string& command);
/// The JSON object of a plan (plan_json() or stage_plans_json()) with the key "search" added.
/// docs/reference/plan-files.md describes the keys.
std::string with_search(const std::string& plan, const MeshSearchRequest& request,
                        const MeshSearchResult& result, const std::string& command);

}  // namespace tranche::planner
