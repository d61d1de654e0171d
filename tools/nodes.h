#pragma once
/// The nodes of a job's ranks.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tranche/comm/communicator.h"

namespace tranche::tools {

struct RanksOfNode {
  std::string name;        ///< the host's name, as its lowest rank reports it
  std::vector<int> ranks;  ///< ascending
  /// The data that these ranks together sent to other nodes in the last step; nullopt if it is not counted.
  std::optional<std::int64_t> bytes_to_other_nodes = std::nullopt;
};

/// Collective. The nodes of a group, ordered by their lowest ranks.
std::vector<RanksOfNode> nodes_of(Communicator& ranks);

/// Collective. Adds up the bytes sent by each node's ranks. `mine`: this rank's, if known.
void share_node_bytes(Communicator& ranks, std::optional<std::int64_t> mine, std::vector<RanksOfNode>& nodes);

/// "2 (2 + 2 ranks)", "16 (8 ranks each)", "40 (2 to 8 ranks)".
std::string describe(const std::vector<RanksOfNode>& nodes);

}  // namespace tranche::tools
