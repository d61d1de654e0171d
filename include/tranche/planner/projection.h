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
  double exposed_offload = 0;  ///< waiting for copies, host updates and the disk
  double optimizer = 0;        ///< kernels behind the last micro-batch
  double other = 0;            ///< launches, agreement of ranks, host copies of numbers
  double total() const {
    return compute + exposed_gather + exposed_reduce + exposed_offload + optimizer + other;
  }
};

struct Projection {
  StepBreakdown step;
  double tokens_per_second = 0;  ///< of all ranks
  double efficiency = 1;         ///< weak scaling: a rank's tokens a second over those of one rank alone
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
/// `trace` gets the simulated step, beginning at 0; may be null.
Projection project(const ProjectionRequest& request, TraceRecorder* trace = nullptr);

/// Seconds of a collective over `ranks` ranks, `ranks_per_node` of them on a node, of so many bytes of all
/// ranks' parts together: inside a node by the machine's tables, between nodes each node sends and receives
/// what it must, and a message's latency for each doubling of the nodes. CPUs of a node send partial sums of
/// a reduction, in fp32; of GPUs every rank sends a part to every rank of other nodes, or with `by_library`
/// (NCCL's own reduction) one ring crosses each node once. `groups_on_node` groups do the same at once and
/// share the node's network, and its memory where that carries the data of CPUs.
double collective_seconds(const Machine& machine, const LinkRate& network, const std::string& operation,
                          int ranks, int ranks_per_node, int element_bytes, double full_bytes,
                          bool by_library = false, int groups_on_node = 1);

}  // namespace tranche::planner
