#pragma once
/// Plans: what a run would take, found by running real steps of the real engine on the meta device as one
/// rank of any number, and the cheapest configuration that fits a budget. Needs no MPI, no device, and memory
/// that grows with the number of units alone.

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tranche/config/config.h"
#include "tranche/device/ledger.h"
#include "tranche/device/stream.h"
#include "tranche/engine/engine.h"
#include "tranche/engine/offload_traffic.h"
#include "tranche/partition/mesh.h"
#include "tranche/planner/host_memory.h"
#include "tranche/planner/offload_cost.h"
#include "tranche/planner/plan_model.h"

namespace tranche::planner {

inline constexpr int most_planned_ranks = 65536;

struct PlanRequest {
  PlanModel model;
  Config config;              ///< for `ranks`; its device_memory_limit does not stop the plan
  std::int64_t sequence = 0;  ///< of a language model; 0: as long as it allows
  /// Lengths, none above `sequence`, that the micro-batches of the planned rank have in turn; empty: all have
  /// that. The plan is of at least three rounds of them.
  std::vector<std::int64_t> lengths;
  bool documents = false;               ///< batches tell where documents begin, of models that take that
  int ranks = 1;                        ///< 1 to most_planned_ranks
  int ranks_per_node = 0;               ///< 0: all on one
  int rank = 0;                         ///< the one that is simulated
  DeviceKind device = DeviceKind::cpu;  ///< cuda: also the host memory that GPUs need beside theirs
  CostModel rates;                      ///< of what is said about seconds
  HostMemory host_memory;               ///< the budget of a search, and what is said of it
  bool verbose = false;                 ///< the notes have a line for each key without effect, not one in all
};

/// A plan with the other value of Config::gather_for.
struct OtherGathering {
  GatherFor gather_for = GatherFor::step;
  std::int64_t peak = 0;      ///< bytes of device memory
  std::int64_t elements = 0;  ///< that this rank sends in a step
  std::int64_t bytes = 0;     ///< the same
};

/// Data that the planned rank sends to its group of an axis of the mesh in a step, as the meter counts it and
/// by the engine's formula.
struct AxisTraffic {
  std::int64_t elements = 0, bytes = 0;
  std::int64_t formula_elements = 0, formula_bytes = 0;
  int group = 1;      ///< ranks of it
  int elsewhere = 0;  ///< those of them on other nodes
  /// Every rank of the group is sent the same.
  std::int64_t bytes_to_other_nodes() const { return group > 1 ? bytes / (group - 1) * elsewhere : 0; }
};

/// The flat buffers of the planned rank whose tensors have the same optimizer states, and which as many ranks
/// share.
struct PlacedState {
  std::int64_t elements = 0;  ///< of whole buffers, padding included
  double state_bytes = 0;     ///< of an element in all states, without master weights
  bool frozen = false;        ///< weights alone
  int group = 1;              ///< ranks over which a buffer is sharded
  int holders = 1;  ///< ranks of each data rank that hold equal values; above 1 stage 3 keeps weights whole
};

/// One rank of a run of at least three steps (the first two record and pack its memory) with an evaluation.
/// With PlanRequest::lengths what is said of a step is of the last; formulas in tokens take `sequence`.
struct PlanResult {
  std::array<TierAccount, tier_count> tiers;
  Engine::StateBytes state;
  /// Traffic of a step, as the meter counts it for this rank, by operation.
  std::map<std::string, TrafficCount> data, control;
  std::int64_t formula_elements = 0;  ///< that this rank sends a step by Engine::formula_traffic_elements()
  Mesh mesh{1};
  std::string units;  ///< of the rank's stage of a pipeline, "embedding to h.2"; empty without one
  std::map<MeshAxis, AxisTraffic> axes;  ///< shard; the others where the mesh has them
  /// Bytes that this rank sends to other nodes in a step. GPUs may gather in rings, in which a shard crosses
  /// once for all ranks of a node: then `crossing_exact` is false, and it is at most this.
  std::int64_t crossing_bytes = 0;
  bool crossing_exact = true;
  /// The same for all ranks of its node together, which are assumed to send alike. Not set for GPUs.
  std::optional<std::int64_t> node_crossing_bytes;
  /// Elements of all flat buffers, padding included.
  std::int64_t padded_elements = 0;
  std::vector<PlacedState> placed;  ///< each class of optimizer state, and behind them the frozen tensors
  WorkCount work;                   ///< of a step, as the kernels count it
  double model_operations = 0;      ///< of a step by the model's formula: flops_per_token x tokens
  std::int64_t tokens = 0;          ///< of a step, this rank
  OffloadTraffic offload_bytes;     ///< of a step
  OffloadCost offload;              ///< by PlanRequest::rates
  std::optional<OtherGathering> other_gathering;  ///< by plan_other_gathering()
  std::vector<std::string> notes;  ///< as at the start of a run: cheaper stages, keys without a meaning
  /// The effective configuration, and the `memory`, `traffic` and `model` objects of a run's report, as JSON.
  std::string config, memory, traffic, model;

  const TierAccount& tier(Tier which) const { return tiers[static_cast<std::size_t>(which)]; }
};

/// Throws ConfigurationError for what a run would refuse.
PlanResult plan_run(const PlanRequest& request);
/// The price of what `result`, the plan of the request, does not do; none where no unit is gathered from
/// other ranks for its use.
std::optional<OtherGathering> plan_other_gathering(const PlanRequest& request, const PlanResult& result);

/// Seconds of a step in closed form (docs/internals/memory-formulas.md has the formulas), to rank candidates
/// of a search. For times see project() (projection.h), which simulates the recorded step on a machine's
/// measured rates.
struct StepCost {
  double compute = 0;    ///< the model's own operations
  double recompute = 0;  ///< those done again to save activations
  double exposed = 0;    ///< communication that nothing hides
  double offload = 0;    ///< waiting for copies, host updates and the disk
  double other = 0;      ///< of a simulated step alone: the update, launches, agreement of the ranks
  double total() const { return compute + recompute + exposed + offload + other; }
};
/// `rates` are used in place of request.rates.
StepCost step_cost(const PlanRequest& request, const CostModel& rates);
/// The part of it that offloaded state costs, by link.
OffloadCost step_offload_cost(const PlanRequest& request, const CostModel& rates);

struct FitRequest {
  PlanRequest plan;         ///< the first candidate; its global batch is kept
  std::int64_t budget = 0;  ///< bytes of device memory a rank
  CostModel rates;          ///< replace plan.rates
  /// The seconds of a configuration, in place of step_cost(), which then only says in which order
  /// configurations are tried: projected_cost() (projection.h) for a machine. The search ends once none that
  /// is left takes fewer with its largest micro-batch, or less than 1.5 times as many by step_cost(). Empty:
  /// step_cost().
  std::function<StepCost(const PlanRequest& candidate)> seconds;
  bool keep_stage = false;                                         ///< the stage is not searched
  bool keep_micro_batch = false;                                   ///< nor the micro-batch
  bool keep_optimizer_tier = false, keep_parameters_tier = false;  ///< nor where state lives
  std::int64_t nvme_budget = 0;   ///< bytes of a rank; 0: none. Of host memory it is plan.host_memory
  std::function<bool()> give_up;  ///< asked between plans: true ends the search with an Error
};

/// A configuration that was tried, with the largest micro-batch that fits, or the smallest when none does.
/// One whose model state alone is beyond the budget was not run, and stands for all of its stage and policy.
struct FitTrial {
  int stage = 0;
  ReductionPolicy reduction = ReductionPolicy::automatic;
  int checkpoint_every = 0;  ///< 0: no activation checkpointing
  std::int64_t vocabulary_chunk = 0;
  OffloadTier optimizer = OffloadTier::none, parameters = OffloadTier::none;
  bool activations = false;  ///< activation checkpoints wait in host memory
  std::int64_t micro_batch = 1, accumulation = 1;
  std::int64_t peak = 0;            ///< bytes of device memory
  std::int64_t host = 0, nvme = 0;  ///< bytes of the other tiers; 0 where it was not run
  bool fits = false;
  bool state_alone =
      false;      ///< not run: `peak` is model state, workspace and staging buffer, beyond the budget
  StepCost cost;  ///< where FitRequest::seconds is given, of what fits alone
};

struct FitResult {
  bool fits = false;
  std::vector<FitTrial> ladder;  ///< in the order of trial: cheapest first
  std::size_t chosen = 0;        ///< index in the ladder: the cheapest that fits, else the smallest
  Config config;                 ///< of the chosen
  PlanResult plan;               ///< of the chosen
  int rank = 0;                  ///< that was planned: of the axis `tensor` the one with most memory
  std::int64_t missing = 0;      ///< bytes of device memory beyond the budget when nothing fits
};

/// Searches stage, reduction policy (where the configuration leaves it to `auto`), activation checkpointing,
/// the chunked head, where optimizer state and parameters live (on nvme only where the configuration has a
/// path) and the micro-batch for the least step_cost() that fits, on all ranks of the axis `tensor` too.
/// Throws ConfigurationError on a mesh with a pipeline. Deterministic.
FitResult find_fit(const FitRequest& request);

}  // namespace tranche::planner
