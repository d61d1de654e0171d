#pragma once
/// The nodes on which a launcher puts ranks, as far as a study's arguments tell.

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tools/scale/scale_arguments.h"

namespace tranche::tools {

/// The nodes that a batch system gave this process, each with the ranks that may start there; none where it
/// gave none, or does not say how many ranks each takes.
struct Allocation {
  std::vector<std::pair<std::string, int>> nodes;
  bool of_slurm = false;
  bool several() const { return nodes.size() > 1; }
  /// By SLURM_TASKS_PER_NODE in a job of Slurm's, the lines of PBS_NODEFILE, or the words of LSB_HOSTS.
  static Allocation of_environment();
};

/// Where a launcher puts the ranks of a run, and the arguments that have it do so.
struct NodesOfRun {
  std::optional<int> per_node;         ///< as ranks_per_node() has it
  std::vector<std::string> arguments;  ///< srun's, behind those that were given
};
NodesOfRun nodes_of_run(const ScaleOptions& options, const std::string& hostfile, int ranks,
                        const Allocation& allocation = {});

/// How many consecutive ranks of `ranks` share a node: `ranks` where all do, nullopt where what was given
/// does not say (other mappings than by slot, hosts of unequal slots, slots left to the launcher).
/// --ranks-per-node comes first, then mpirun's `-N`, `--npernode` and `--map-by ppr:N:node` (srun's
/// `--nodes`, `--ntasks-per-node`), then the slots of `--host` or the hostfile, then those of the allocation.
/// `hostfile`: its text.
std::optional<int> ranks_per_node(const ScaleOptions& options, const std::string& hostfile, int ranks,
                                  const Allocation& allocation = {});

}  // namespace tranche::tools
