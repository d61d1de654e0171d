#include "comm/node/node_layout.h"

#include <algorithm>
#include <map>

namespace tranche::comm {

NodeLayout::NodeLayout(const std::vector<int>& nodes) {
  std::map<int, int> numbers;
  for (std::size_t member = 0; member < nodes.size(); ++member) {
    const auto [found, fresh] = numbers.emplace(nodes[member], static_cast<int>(members_.size()));
    if (fresh) members_.emplace_back();
    auto& there = members_[static_cast<std::size_t>(found->second)];
    node_.push_back(found->second);
    local_.push_back(static_cast<int>(there.size()));
    there.push_back(static_cast<int>(member));
  }
  for (const auto& there : members_) ++sizes_[static_cast<int>(there.size())];
}

std::int64_t NodeLayout::count_towards(int member) const {
  const auto size = static_cast<int>(members(node(member)).size());
  // The result for a node of `others` ranks: those whose local index equals this rank's, modulo the number of
  // ranks here.
  const auto on = [&](int others) {
    return others > local(member) ? (others - local(member) + size - 1) / size : 0;
  };
  std::int64_t count = -on(size);
  for (const auto& [others, nodes] : sizes_) count += nodes * on(others);
  return count;
}

int NodeLayout::counterpart(int member, int node) const {
  const auto& there = members(node);
  return there[static_cast<std::size_t>(local(member)) % there.size()];
}

std::vector<int> NodeLayout::stands_towards(int member) const {
  const int own = node(member);
  const int there = static_cast<int>(members(own).size());
  std::vector<int> result;
  for (int other = 0; other < ranks(); ++other) {
    if (node(other) != own && local(other) % there == local(member)) result.push_back(other);
  }
  return result;
}

}  // namespace tranche::comm
