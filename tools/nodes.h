#pragma once
/// The nodes that a job's ranks are on.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tranche/comm/communicator.h"

namespace tranche::tools {

struct RanksOfNode {
  std::string name;        ///< of the host, as the lowest of its ranks sees it
  std::vector<int> ranks;  ///< ascending
  /// Data that these ranks together sent to other nodes in the last step; nothing where it is not counted.
  std::optional<std::int64_t> bytes_to_other_nodes = std::nullopt;
};

/// Collective. The nodes of a group, by their lowest ranks.
std::vector<RanksOfNode> nodes_of(Communicator& ranks);

/// Collective. Adds up what each rank of a node sent: `mine`: of this rank, where it is known.
void share_node_bytes(Communicator& ranks, std::optional<std::int64_t> mine, std::vector<RanksOfNode>& nodes);

/// "2 (2 + 2 ranks)", "16 (8 ranks each)", "40 (2 to 8 ranks)".
std::string describe(const std::vector<RanksOfNode>& nodes);

}  // namespace tranche::tools
