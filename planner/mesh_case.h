#pragma once
/// A mesh under one schedule, with everything that a search of meshes knows before it varies the other
/// settings. Private to planner/.

#include <cstdint>
#include <string>
#include <vector>

#include "planner/levers.h"
#include "planner/mesh_cost.h"
#include "planner/step_cost.h"
#include "tranche/partition/mesh.h"
#include "tranche/planner/mesh_search.h"

namespace tranche::planner {

struct MeshCase {
  std::string mesh;
  Mesh axes{1};
  std::string schedule;         ///< empty if there is no pipeline
  Config base;                  ///< complete, with the smallest micro-batch
  std::string refused;          ///< the reason why every run refuses the mesh; empty if runs accept it
  std::vector<int> ranks;       ///< one rank of each class of equal plans, those of the first and last stage
                                ///< first
  std::vector<HeldState> held;  ///< sizes that each of `ranks` holds
  StageShares shares;           ///< used with a pipeline
  PlanRequest alone;            ///< the ranks of one stage, without the pipeline
  Sizes sizes;                  ///< sizes on the mesh of `alone`
  CostModel rates;
  std::vector<Levers> levers;               ///< simplest first
  std::vector<std::int64_t> micro_batches;  ///< ascending
  int stages() const { return axes.size(MeshAxis::pipeline); }
};

/// Every mesh of the request's ranks under every schedule that is searched, in the order of all_meshes().
/// `spec` is the model of the request's plan. A case that every run would refuse says why.
std::vector<MeshCase> mesh_cases(const MeshSearchRequest& request, const ModelSpec& spec);

}  // namespace tranche::planner
