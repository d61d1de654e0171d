#pragma once
/// Step time before a run: project() records on the meta device what a step asks of streams and
/// communicators, and simulates that work with a machine's rates. planner/projection.cpp describes the
/// mechanism, docs/internals/projection-model.md the model.

#include <string>
#include <utility>
#include <vector>

#include "tranche/core/trace.h"
#include "tranche/planner/machine.h"
#include "tranche/planner/planner.h"

namespace tranche::planner {

/// The seconds of a step, split by what the compute stream does or waits for.
struct StepBreakdown {
  double compute = 0;          ///< forward and backward kernels, slowed where they share cores
  double exposed_gather = 0;   ///< waiting for parameters of other ranks
  double exposed_reduce = 0;   ///< waiting for reduced gradients
  double exposed_message = 0;  ///< waiting for messages of other stages of a pipeline
  double exposed_offload = 0;  ///< waiting for copies, host updates and the disk
  double optimizer = 0;        ///< kernels after the last micro-batch
  double other = 0;            ///< launches, agreement of ranks, host copies of numbers
  double total() const {
    return compute + exposed_gather + exposed_reduce + exposed_message + exposed_offload + optimizer + other;
  }
};

struct Projection {
  StepBreakdown step;
  double tokens_per_second = 0;  ///< of all ranks together; tokens are positions, learned or not
  /// Bytes of gradients, parameters and messages that a node sends to others in a step. On GPUs gathered data
  /// crosses once for all ranks of a node, in a ring, whereas PlanResult::crossing_bytes counts the bytes for
  /// each rank.
  double node_bytes = 0;
  /// Weak scaling: tokens a second of one rank of many, divided by those of one rank alone, which updates all
  /// of the state.
  double efficiency = 1;
  double alone_optimizer =
      0;  ///< seconds of the lone rank's update; greater than those of `step` if state is sharded
  /// The critical path: seconds of the chain of work that determines the step, by name, longest first.
  std::vector<std::pair<std::string, double>> critical_path;
  std::vector<std::string> notes;  ///< figures that are not measured, and their sources
};

struct ProjectionRequest {
  PlanRequest plan;
  Machine machine;
  /// The network between nodes; if not set, the machine's own.
  std::optional<LinkRate> network;
  /// Number of ranks that share a node's cores and memory; 0: the ranks on the node.
  int sharing = 0;
};

/// Projects the time of a step. Throws ConfigurationError for what a run would refuse and for missing
/// figures: ranks on several nodes without a network, offload to nvme without a disk, a dtype without rates.
/// On a mesh with a pipeline one rank of each stage is simulated, the ranks of a stage count as equal, and
/// messages join the stages; the step is the one that the request's rank sees. A schedule from a file is
/// simulated with all of its micro-batches. `trace` receives the simulated step, beginning at 0; it may be
/// null.
Projection project(const ProjectionRequest& request, TraceRecorder* trace = nullptr);
/// Only Projection::step, for searches that ask often.
StepBreakdown project_step(const ProjectionRequest& request);
/// The same seconds split as in StepCost; the totals are equal.
StepCost projected_cost(const ProjectionRequest& request);
/// The rates of a rank on the machine, for the formulas of searches and of offload (StepCost, OffloadCost).
/// The rate of operations comes from the simulated step of the request, the network's rate from collectives
/// of the request's shard group, the others from the machine's file. Throws as project() does.
CostModel machine_rates(const ProjectionRequest& request);
/// Bytes a second that a rank of the request's mesh sends to its group on an axis of several ranks, in
/// gathers and reductions of large blocks. For `pipeline` it is the rate of messages between the stages that
/// are furthest apart; `shard` includes `context`. The request's configuration is complete
/// (validate_config()).
double axis_rate(const ProjectionRequest& request, MeshAxis axis);

/// Seconds of a collective over `ranks` ranks, `ranks_per_node` of them on a node, for the given bytes of all
/// ranks' parts together. Inside a node the machine's tables give the time. Between nodes it is the bytes
/// that each node sends and receives, and one message latency for each doubling of the number of nodes. CPU
/// ranks of a node send partial sums of a reduction in fp32. Each GPU rank sends a part to each rank of other
/// nodes; with `by_library` (NCCL's own reduction) one ring crosses each node once. `groups_on_node` groups
/// run at the same time and share the node's network, and its memory if the data of CPUs passes through that.
/// `by_messages`: CPU ranks do not read each other's memory (`tranche.collectives`), so that each sends its
/// part to every rank of other nodes.
double collective_seconds(const Machine& machine, const LinkRate& network, const std::string& operation,
                          int ranks, int ranks_per_node, int element_bytes, double full_bytes,
                          bool by_library = false, int groups_on_node = 1, bool by_messages = false);

}  // namespace tranche::planner
