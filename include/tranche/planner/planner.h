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
  Config config;              ///< for `ranks` ranks; its device_memory_limit does not stop the plan
  std::int64_t sequence = 0;  ///< length for a language model; 0: the longest that it takes
  /// Lengths, at most `sequence`, of the planned rank's micro-batches in rotation; empty: all have the length
  /// `sequence`. The plan runs at least three rounds of them.
  std::vector<std::int64_t> lengths;
  bool documents = false;               ///< batches mark the beginnings of documents, if the model supports
                                        ///< that
  int ranks = 1;                        ///< 1 to most_planned_ranks
  int ranks_per_node = 0;               ///< 0: all ranks on one node
  int rank = 0;                         ///< the rank that is planned
  DeviceKind device = DeviceKind::cpu;  ///< cuda: the host memory that GPUs need in addition counts too
  CostModel rates;                      ///< rates for the estimates of seconds
  HostMemory host_memory;               ///< the budget of a search, and the limit that texts mention
  bool verbose = false;                 ///< the notes have one line for each key without effect, instead of
                                        ///< one for all
};

/// The plan that results from the other value of Config::gather_for.
struct OtherGathering {
  GatherFor gather_for = GatherFor::step;
  std::int64_t peak = 0;      ///< bytes of device memory
  std::int64_t elements = 0;  ///< elements that this rank sends in a step
  std::int64_t bytes = 0;     ///< bytes of these elements
};

/// Data that the planned rank sends to its group on one axis of the mesh in a step, counted by the meter and
/// by the engine's formula, which is not set for chains over the axis `tensor` (Config::tensor_sums).
struct AxisTraffic {
  std::int64_t elements = 0, bytes = 0;
  std::optional<std::int64_t> formula_elements, formula_bytes;
  int group = 1;      ///< ranks of the group
  int elsewhere = 0;  ///< ranks of the group on other nodes
  /// Every rank of the group receives the same number of bytes.
  std::int64_t bytes_to_other_nodes() const { return group > 1 ? bytes / (group - 1) * elsewhere : 0; }
};

/// The flat buffers of the planned rank whose tensors have the same optimizer states and are shared by the
/// same number of ranks.
struct PlacedState {
  std::int64_t elements = 0;  ///< elements of whole buffers with padding
  double state_bytes = 0;     ///< bytes of one element in all states, without master weights
  bool frozen = false;        ///< true: the buffers hold weights alone
  int group = 1;              ///< ranks over which a buffer is sharded
  int holders = 1;  ///< ranks of each data rank that hold equal values; if above 1, stage 3 keeps weights
                    ///< whole
};

/// One rank of a run of at least three steps (the first two record and pack its memory) with an evaluation.
/// With PlanRequest::lengths the figures of a step are those of the last one, and formulas in tokens use
/// `sequence`.
struct PlanResult {
  std::array<TierAccount, tier_count> tiers;
  Engine::StateBytes state;
  /// Traffic of one step of this rank by operation, as the meter counts it.
  std::map<std::string, TrafficCount> data, control;
  /// Elements that this rank sends in a step by Engine::formula_traffic_elements(); not set for chains.
  std::optional<std::int64_t> formula_elements;
  Mesh mesh{1};
  std::string units;  ///< units of the rank's pipeline stage ("embedding to h.2"); empty without a pipeline
  std::map<MeshAxis, AxisTraffic> axes;  ///< `shard` always, other axes if the mesh has them
  /// Bytes that this rank sends to other nodes in a step. GPUs may gather in rings, in which a shard crosses
  /// once for all ranks of a node: then `crossing_exact` is false and this is an upper bound.
  std::int64_t crossing_bytes = 0;
  bool crossing_exact = true;
  /// The same for all ranks of its node together. Not set for GPUs, nor where the node's ranks send different
  /// numbers of bytes: those of several stages, and of groups that do not cover nodes alike.
  std::optional<std::int64_t> node_crossing_bytes;
  /// Elements of all flat buffers with padding.
  std::int64_t padded_elements = 0;
  std::vector<PlacedState> placed;  ///< each class of optimizer state, followed by the frozen tensors
  WorkCount work;                   ///< work of a step, as the kernels count it
  double model_operations = 0;      ///< operations of a step by the model's formula: flops_per_token x tokens
  std::int64_t tokens = 0;          ///< tokens of a step on this rank
  OffloadTraffic offload_bytes;     ///< bytes of a step
  OffloadCost offload;              ///< at the rates PlanRequest::rates
  std::optional<OtherGathering> other_gathering;  ///< set by plan_other_gathering()
  std::vector<std::string> notes;  ///< the notes of a run's start: cheaper stages, keys without effect
  /// The effective configuration, and the `memory`, `traffic` and `model` objects of a run's report, as JSON.
  std::string config, memory, traffic, model;

  const TierAccount& tier(Tier which) const { return tiers[static_cast<std::size_t>(which)]; }
};

/// Throws ConfigurationError for what a run would refuse.
PlanResult plan_run(const PlanRequest& request);
/// The plan with the other value of Config::gather_for, for the request that led to `result`; none if no unit
/// is gathered from other ranks for its use.
std::optional<OtherGathering> plan_other_gathering(const PlanRequest& request, const PlanResult& result);

/// Seconds of a step in closed form (docs/internals/memory-formulas.md has the formulas), used to rank the
/// candidates of a search. project() in projection.h simulates the recorded step on a machine's measured
/// rates and is the estimate of real time.
struct StepCost {
  double compute = 0;    ///< the model's own operations
  double recompute = 0;  ///< recomputation under activation checkpointing
  double exposed = 0;    ///< communication that no computation hides
  double offload = 0;    ///< waiting for copies, host updates and the disk
  double other = 0;      ///< only for a simulated step: the update, launches, agreement of the ranks
  double total() const { return compute + recompute + exposed + offload + other; }
};
/// `rates` replaces request.rates.
StepCost step_cost(const PlanRequest& request, const CostModel& rates);
/// The part of step_cost() that offloaded state causes, by link.
OffloadCost step_offload_cost(const PlanRequest& request, const CostModel& rates);

struct FitRequest {
  PlanRequest plan;         ///< the first candidate, whose global batch is kept
  std::int64_t budget = 0;  ///< bytes of device memory for one rank
  CostModel rates;          ///< replaces plan.rates
  /// Returns the seconds of a configuration in place of step_cost(), for example projected_cost()
  /// (projection.h) for a machine. step_cost() then only gives the order of trials. The search ends when no
  /// remaining configuration is faster with its largest micro-batch or takes less than 1.5 times as long by
  /// step_cost(). Empty: step_cost() decides.
  std::function<StepCost(const PlanRequest& candidate)> seconds;
  bool keep_stage = false;                                         ///< does not search the stage
  bool keep_micro_batch = false;                                   ///< does not search the micro-batch
  bool keep_optimizer_tier = false, keep_parameters_tier = false;  ///< does not search the tiers
  std::int64_t nvme_budget = 0;   ///< bytes for one rank; 0: none. The budget of host memory is
                                  ///< plan.host_memory
  std::function<bool()> give_up;  ///< asked between plans: true ends the search with an Error
};

/// A configuration that was tried, with the largest micro-batch that fits, or the smallest if none does. If
/// its model state alone exceeds the budget it was not planned, and it represents all configurations of its
/// stage and policy.
struct FitTrial {
  int stage = 0;
  ReductionPolicy reduction = ReductionPolicy::automatic;
  int checkpoint_every = 0;  ///< 0: no activation checkpointing
  std::int64_t vocabulary_chunk = 0;
  OffloadTier optimizer = OffloadTier::none, parameters = OffloadTier::none;
  bool activations = false;  ///< copies activation checkpoints to host memory
  std::int64_t micro_batch = 1, accumulation = 1;
  std::int64_t peak = 0;            ///< bytes of device memory
  std::int64_t host = 0, nvme = 0;  ///< bytes of the other tiers; 0 if it was not planned
  /// `tranche.host_state`: the given bytes, or for `auto` those that the budget of host memory leaves, once a
  /// plan has shown that the configuration fits, or exceeds the budget of nvme; -1 otherwise.
  std::int64_t host_state = -1;
  std::string host_state_reason;  ///< the source of these bytes, as in OffloadConfig
  bool fits = false;
  bool state_alone = false;  ///< not planned: `peak` is model state, workspace and staging buffer, which
                             ///< exceed the budget
  StepCost cost;             ///< if FitRequest::seconds is given, only set for what fits
};

struct FitResult {
  bool fits = false;
  std::vector<FitTrial> ladder;  ///< in the order of trial, cheapest first
  std::size_t chosen = 0;        ///< index in the ladder of the cheapest that fits, else of the smallest
  Config config;                 ///< the chosen configuration
  PlanResult plan;               ///< its plan
  int rank = 0;                  ///< the planned rank: on the axis `tensor` the one with the most memory
  std::int64_t missing = 0;      ///< bytes of device memory beyond the budget when nothing fits
};

/// Searches the settings whose step_cost() is least among those that fit. It varies the stage, the reduction
/// policy (if the configuration says `auto`), activation checkpointing, the chunked head, the tiers of
/// optimizer state and parameters (nvme only if the configuration has a path), and the micro-batch. State
/// that is requested on nvme stays in the host memory that the budget leaves (`tranche.host_state` auto), and
/// its seconds count what stays. All ranks of the axis `tensor` must fit. Throws ConfigurationError on a mesh
/// with a pipeline. Deterministic.
FitResult find_fit(const FitRequest& request);

}  // namespace tranche::planner
