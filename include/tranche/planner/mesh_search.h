#pragma once
/// The search for a mesh: it finds the axes, stage, schedule, checkpointing, tiers and micro-batches with the
/// shortest step among all that fit a budget. docs/guides/mesh-search.md explains the output;
/// planner/mesh_search.cpp and planner/mesh_trials.h explain the bounds.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tranche/planner/all_meshes.h"
#include "tranche/planner/planner.h"
#include "tranche/planner/projection.h"

namespace tranche::planner {

struct MeshSearchRequest {
  /// The mesh of fit.plan.config counts only for the batch: with it, the configuration determines the samples
  /// of a step, which every mesh keeps. A schedule other than 1f1b, a number of chunks, and everything that
  /// FitRequest keeps are kept as well.
  FitRequest fit;
  std::string axes;  ///< fixed sizes, as searched_axes() returns them
  /// The machine whose simulation chooses among the best candidates of each mesh, stage and schedule by
  /// formula. Its `plan` is ignored. Empty: the formula alone chooses.
  std::optional<ProjectionRequest> machine;
  /// Plans every configuration without any bound. This is slow and serves tests.
  bool exhaustive = false;
};

/// A configuration on a mesh.
struct MeshTrial {
  std::string mesh;
  std::string schedule;  ///< empty if there is no pipeline
  FitTrial trial;        ///< its cost is by formula
  double seconds = 0;    ///< seconds of a step: by the machine's simulation if there is a machine, else those
                         ///< of the cost
  /// Bytes beyond the budgets. If the configuration was not planned, a bound gives the least number of them.
  std::int64_t missing = 0;
  bool planned = false;    ///< true if the peaks come from a plan
  std::int64_t bound = 0;  ///< lower bound of every plan's device memory in bytes, by the state formula
};

/// The number of configurations and the reasons for which they were left out. All fields except `all` and
/// `meshes` add up to `all`.
struct SearchCounts {
  std::int64_t all = 0;
  /// The state formula alone exceeds the budget, or a plan with equal state in host memory or on nvme did.
  std::int64_t by_state = 0;
  std::int64_t by_activations = 0;  ///< state and the activations that a plan of equal stages measured exceed
                                    ///< the budget
  std::int64_t by_micro_batch = 0;  ///< a smaller micro-batch does not fit, and no stage holds more of it
  std::int64_t by_time = 0;         ///< takes at least as long as the chosen one, whatever its memory
  std::int64_t refused = 0;         ///< a run would refuse it
  std::int64_t planned = 0;         ///< run on the meta device
  std::int64_t projected = 0;       ///< number of planned configurations that were simulated on the machine
};

/// The outcome of a search on one mesh.
struct SearchedMesh {
  std::string mesh;
  std::string verdict;  ///< "chosen", "fits", "does not fit", "slower", or why a run would refuse it
  std::optional<MeshTrial> best;  ///< the fastest that fits
};

struct MeshSearchResult {
  bool fits = false;
  MeshTrial chosen;                      ///< the fastest that fits, else the one with the fewest bytes beyond
                                         ///< the budget
  std::optional<MeshTrial> less_memory;  ///< the fastest with at most nine tenths of its device memory
  /// Among the configurations that would be faster by formula but do not fit, the one with the fewest bytes
  /// beyond the budget.
  std::optional<MeshTrial> less_time;
  SearchCounts counts;
  std::vector<SearchedMesh> meshes;
  std::vector<MeshTrial> planned;  ///< every planned configuration, in the order of the plans
  Config config;                   ///< the chosen configuration, complete
  PlanResult plan;                 ///< plan of the rank with the most bytes beyond the budgets, else with the
                                   ///< most memory
  int rank = 0;                    ///< the rank of `plan`
};

/// Tries configurations in ascending order of their seconds by formula. Plans those that no bound excludes,
/// and stops when no remaining one can be faster than one that fits. Throws ConfigurationError with the
/// reason of the first if every configuration is refused. Deterministic.
MeshSearchResult search_meshes(const MeshSearchRequest& request);

}  // namespace tranche::planner
