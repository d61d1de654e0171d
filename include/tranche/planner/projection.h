#pragma once
/// Step time before a run: the work that a step asks of streams and communicators, as recorded on the meta
/// device, in the time that a machine takes for each piece. docs/internals/projection-model.md has the model.

#include <string>
#include <utility>
#include <vector>

#include "tranche/core/trace.h"
#include "tranche/planner/machine.h"
#include "tranche/planner/planner.h"

namespace tranche::planner {

/// Seconds of a step by what the stream that computes does in them.
struct StepBreakdown {
  double compute = 0;          ///< forward and backward kernels, slowed where they share cores
  double exposed_gather = 0;   ///< waiting for parameters of other ranks
  double exposed_reduce = 0;   ///< waiting for reduced gradients
  double exposed_message = 0;  ///< waiting for messages of other stages of a pipeline
  double exposed_offload = 0;  ///< waiting for copies, host updates and the disk
  double optimizer = 0;        ///< kernels behind the last micro-batch
  double other = 0;            ///< launches, agreement of ranks, host copies of numbers
  double total() const {
    return compute + exposed_gather + exposed_reduce + exposed_message + exposed_offload + optimizer + other;
  }
};

struct Projection {
  StepBreakdown step;
  double tokens_per_second = 0;  ///< of all ranks; positions, learned or not
  /// Gradients, parameters and messages that a node sends to others in a step. On GPUs what is gathered
  /// crosses once for all ranks of a node, in a ring; PlanResult::crossing_bytes counts what is meant for
  /// each of them.
  double node_bytes = 0;
  /// Weak scaling: a rank's tokens a second over those of one rank alone, which updates all of the state.
  double efficiency = 1;
  double alone_optimizer =
      0;  ///< seconds of that rank's update; above those of `step` where state is sharded
  /// Seconds of the chain of work that determines the step, by name; longest first.
  std::vector<std::pair<std::string, double>> critical_path;
  std::vector<std::string> notes;  ///< figures that are not measured, and their sources
};

struct ProjectionRequest {
  PlanRequest plan;
  Machine machine;
  /// Between nodes; without, the machine's own.
  std::optional<LinkRate> network;
  /// Ranks that share a node's cores and memory; 0: as many as are on it.
  int sharing = 0;
};

/// Throws ConfigurationError for what a run would refuse, and where figures are missing: ranks on several
/// nodes without a network, offload to nvme without a disk, a dtype without rates.
/// On a mesh with a pipeline the step is that of all stages, joined by their messages, as the request's rank
/// sees it; a rank of each stage is simulated, and those of the same stage are taken to be alike. A file with
/// a schedule is simulated with all of its micro-batches. `trace` gets the simulated step, beginning at 0;
/// may be null.
Projection project(const ProjectionRequest& request, TraceRecorder* trace = nullptr);
/// Its `step` alone, for a search that asks for many.
StepBreakdown project_step(const ProjectionRequest& request);
/// The same in the parts of StepCost; both have one total.
StepCost projected_cost(const ProjectionRequest& request);
/// The rates of a rank that the formulas of a search and of offload take (StepCost, OffloadCost), on the
/// machine: operations from the simulated step of the request, the network from its collectives of the
/// request's group of shards, the others from its file. Throws as project() does.
CostModel machine_rates(const ProjectionRequest& request);
/// Bytes a second that a rank of the request's mesh sends to its group of an axis of several ranks, in
/// gathers and reductions of large blocks; along `pipeline` in messages between the stages that are furthest
/// apart, along `shard` over `context` too. The request's configuration is complete (validate_config()).
double axis_rate(const ProjectionRequest& request, MeshAxis axis);

/// Seconds of a collective over `ranks` ranks, `ranks_per_node` of them on a node, of so many bytes of all
/// ranks' parts together: inside a node by the machine's tables, between nodes each node sends and receives
/// what it must, and a message's latency for each doubling of the nodes. CPUs of a node send partial sums of
/// a reduction, in fp32; of GPUs every rank sends a part to every rank of other nodes, or with `by_library`
/// (NCCL's own reduction) one ring crosses each node once. `groups_on_node` groups do the same at once and
/// share the node's network, and its memory where that carries the data of CPUs. `by_messages`: CPUs' ranks
/// read nothing of each other (`tranche.collectives`), so that each sends its part to every rank of other
/// nodes.
double collective_seconds(const Machine& machine, const LinkRate& network, const std::string& operation,
                          int ranks, int ranks_per_node, int element_bytes, double full_bytes,
                          bool by_library = false, int groups_on_node = 1, bool by_messages = false);

}  // namespace tranche::planner
