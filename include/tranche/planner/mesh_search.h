#pragma once
/// The search for a mesh: which axes, with which stage, schedule, checkpointing, tiers and micro-batches,
/// take the least time of all that fit a budget. docs/guides/mesh-search.md says how to read its answer.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tranche/planner/planner.h"
#include "tranche/planner/projection.h"

namespace tranche::planner {

/// The sizes that a text such as "search, tensor=2" leaves to the search: nothing where the text does not
/// begin with the word "search", else the axes behind it ("tensor=2").
std::optional<std::string> searched_axes(std::string_view mesh);

/// Every mesh of so many ranks on the axes replicate, pipeline, shard, context and tensor, in that order,
/// slowest first, and with the sizes that `axes` gives; that of data ranks alone comes first. An axis of
/// `axes` with the size
/// `*` is searched. Throws ConfigurationError as Mesh::parse() does for the text, and for sizes that do
/// not divide the ranks, with the closest that do.
std::vector<std::string> all_meshes(int ranks, const std::string& axes = {});

struct MeshSearchRequest {
  /// The mesh of fit.plan.config only says, with its batch, how many samples a step has: every mesh keeps
  /// them. A schedule other than 1f1b, and a number of chunks, are kept; so is what FitRequest keeps.
  FitRequest fit;
  std::string axes;  ///< sizes that are given, as searched_axes() returns them
  /// A description of the machine, whose simulation then decides among the best of each mesh, stage and
  /// schedule by formula; its `plan` is not looked at. Empty: the formula alone decides.
  std::optional<ProjectionRequest> machine;
  /// Plans every configuration, without any bound: for tests, and slow.
  bool exhaustive = false;
};

/// A configuration on a mesh.
struct MeshTrial {
  std::string mesh;
  std::string schedule;  ///< empty: there is no pipeline
  FitTrial trial;        ///< its cost is by formula
  double seconds = 0;    ///< of a step: by the machine's simulation where there is one, else the cost's
  /// Bytes beyond the budgets; of one that was not planned the least that a bound tells.
  std::int64_t missing = 0;
  bool planned = false;    ///< the peaks are those of a plan
  std::int64_t bound = 0;  ///< bytes of device memory by the state formula, which no plan is below
};

/// How many configurations there were, and what became of them. All but `all` and `meshes` add up to `all`.
struct SearchCounts {
  std::int64_t all = 0;
  /// The state formula alone is beyond the budget, or equal state beside the device was in a plan.
  std::int64_t by_state = 0;
  std::int64_t by_activations = 0;  ///< state, and activations that another plan of equal stages measured
  std::int64_t by_micro_batch = 0;  ///< a smaller micro-batch does not fit
  std::int64_t by_time = 0;         ///< takes no less time than what was chosen, whatever its memory
  std::int64_t refused = 0;         ///< a run would refuse it
  std::int64_t planned = 0;         ///< run on the meta device
  std::int64_t projected = 0;       ///< of these: simulated on the machine
};

/// The outcome of a search on one mesh.
struct SearchedMesh {
  std::string mesh;
  std::string verdict;  ///< "chosen", "fits", "does not fit", "slower", or why a run would refuse it
  std::optional<MeshTrial> best;  ///< the fastest that was found to fit
};

struct MeshSearchResult {
  bool fits = false;
  MeshTrial chosen;                      ///< the fastest that fits; else the one that lacks least
  std::optional<MeshTrial> less_memory;  ///< the fastest with at most nine tenths of its device memory
  /// One that would take less time by formula, and lacks least memory of those.
  std::optional<MeshTrial> less_time;
  SearchCounts counts;
  std::vector<SearchedMesh> meshes;
  std::vector<MeshTrial> planned;  ///< every configuration that was run, in the order of the runs
  Config config;                   ///< of the chosen, complete
  PlanResult plan;                 ///< of its rank that is furthest beyond the budgets, or has most memory
  int rank = 0;                    ///< that was planned
};

/// Tries configurations in the order of their seconds by formula and plans those on the meta device which no
/// bound removes, until none that is left can be faster than what fits. Throws ConfigurationError where every
/// configuration is refused, with the reason of the first. Deterministic.
MeshSearchResult search_meshes(const MeshSearchRequest& request);

}  // namespace tranche::planner
