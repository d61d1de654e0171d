#pragma once
/// The nodes on which a launcher puts ranks, as far as a study's arguments tell.

#include <optional>
#include <string>

#include "tools/scale_arguments.h"

namespace tranche::tools {

/// How many consecutive ranks of `ranks` share a node: `ranks` where all do, nullopt where what was given
/// does not say (other mappings than by slot, hosts of unequal slots, slots left to the launcher).
/// --ranks-per-node comes first, then mpirun's `-N`, `--npernode` and `--map-by ppr:N:node` (srun's
/// `--ntasks-per-node`, `--nodes`), then the slots of `--host` or the hostfile. `hostfile`: its text.
std::optional<int> ranks_per_node(const ScaleOptions& options, const std::string& hostfile, int ranks);

}  // namespace tranche::tools
