#pragma once
/// The nodes on which a launcher puts ranks, derived from a study's arguments.

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tools/scale/scale_arguments.h"

namespace tranche::tools {

/// The nodes that a batch system allocated to this process, each with the number of ranks that may start
/// there; empty if there is no allocation, or the number of ranks is unknown.
struct Allocation {
  std::vector<std::pair<std::string, int>> nodes;
  bool of_slurm = false;
  bool several() const { return nodes.size() > 1; }
  /// Reads SLURM_TASKS_PER_NODE in a job of Slurm's, the lines of PBS_NODEFILE, or the words of LSB_HOSTS.
  static Allocation of_environment();
};

/// The nodes of a run's ranks, and the launcher arguments that place them so.
struct NodesOfRun {
  std::optional<int> per_node;         ///< as from ranks_per_node()
  std::vector<std::string> arguments;  ///< for srun, after the given ones
};
NodesOfRun nodes_of_run(const ScaleOptions& options, const std::string& hostfile, int ranks,
                        const Allocation& allocation = {});

/// The number of consecutive ranks, among `ranks`, that share a node: `ranks` if all do, nullopt if it cannot
/// be derived (other mappings than by slot, hosts of unequal slots, slots left to the launcher).
/// --ranks-per-node comes first, then mpirun's `-N`, `--npernode` and `--map-by ppr:N:node` (srun's
/// `--nodes`, `--ntasks-per-node`), then the slots of `--host` or the hostfile, then those of the allocation.
/// `hostfile`: its text.
std::optional<int> ranks_per_node(const ScaleOptions& options, const std::string& hostfile, int ranks,
                                  const Allocation& allocation = {});

}  // namespace tranche::tools
