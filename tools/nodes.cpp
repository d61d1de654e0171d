#include "tools/nodes.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "engine/rank_texts.h"

namespace tranche::tools {

namespace {

/// More nodes than this with different numbers of ranks are not listed one by one.
constexpr std::size_t listed_nodes = 8;

std::string this_host() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

}  // namespace

std::vector<RanksOfNode> nodes_of(Communicator& ranks) {
  const std::vector<std::string> names =
      detail::exchange_texts(ranks, this_host(), {"start", "nodes", Traffic::control, Tier::host});
  std::vector<RanksOfNode> nodes;
  std::vector<int> numbers;  // of the communicator, in the order of `nodes`
  for (int rank = 0; rank < ranks.size(); ++rank) {
    const auto found = std::find(numbers.begin(), numbers.end(), ranks.node_of(rank));
    const auto at = static_cast<std::size_t>(found - numbers.begin());
    if (found == numbers.end()) {
      numbers.push_back(ranks.node_of(rank));
      nodes.push_back({names[static_cast<std::size_t>(rank)], {}});
    }
    nodes[at].ranks.push_back(rank);
  }
  return nodes;
}

void share_node_bytes(Communicator& ranks, std::optional<std::int64_t> mine,
                      std::vector<RanksOfNode>& nodes) {
  // Each rank adds to its node's entry; the second half counts the ranks with a known value.
  std::vector<std::int64_t> sums(2 * nodes.size());
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    if (!mine || !std::binary_search(nodes[i].ranks.begin(), nodes[i].ranks.end(), ranks.rank())) continue;
    sums[i] = *mine;
    sums[nodes.size() + i] = 1;
  }
  ranks
      .all_reduce(sums.data(), static_cast<std::int64_t>(sums.size()), DataType::int64, ReduceOperation::sum,
                  {"report", "nodes", Traffic::control})
      .wait();
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    if (sums[nodes.size() + i] == static_cast<std::int64_t>(nodes[i].ranks.size())) {
      nodes[i].bytes_to_other_nodes = sums[i];
    }
  }
}

std::string describe(const std::vector<RanksOfNode>& nodes) {
  std::vector<std::size_t> counts;
  for (const RanksOfNode& node : nodes) counts.push_back(node.ranks.size());
  const auto [least, most] = std::minmax_element(counts.begin(), counts.end());
  if (nodes.size() == 1) return fmt::format("1 ({} rank{})", *most, *most == 1 ? "" : "s");
  if (nodes.size() <= listed_nodes)
    return fmt::format("{} ({} ranks)", nodes.size(), fmt::join(counts, " + "));
  if (*least != *most) return fmt::format("{} ({} to {} ranks)", nodes.size(), *least, *most);
  return fmt::format("{} ({} rank{} each)", nodes.size(), *most, *most == 1 ? "" : "s");
}

}  // namespace tranche::tools
