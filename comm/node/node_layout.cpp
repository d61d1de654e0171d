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
  // On a node of `others` ranks, those whose local index is this one's modulo the ranks here.
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

ReducePlan::ReducePlan(const NodeLayout& layout, int group_size, std::int64_t width)
    : group_size_(std::min(group_size, layout.ranks())),
      ranks_(layout.ranks()),
      sums_(static_cast<std::size_t>(layout.nodes())),
      raw_(sums_.size()) {
  for (int first = 0; first < ranks_; first += group_size_) {
    const int group = static_cast<int>(node_of_group_.size());
    const int end = std::min(first + group_size_, ranks_);
    bool one_node = end - first > 1;  // the sum of one is what it has
    for (int member = first; member < end; ++member) one_node &= layout.node(member) == layout.node(first);
    node_of_group_.push_back(one_node ? layout.node(first) : -1);
    if (one_node) {
      sums_[static_cast<std::size_t>(layout.node(first))].push_back(group);
    } else {
      for (int member = first; member < end; ++member) {
        raw_[static_cast<std::size_t>(layout.node(member))].push_back(member);
      }
    }
  }
  std::vector<std::int64_t> arriving(raw_.size());
  std::int64_t all = 0;
  for (std::size_t node = 0; node < raw_.size(); ++node) {
    arriving[node] = static_cast<std::int64_t>(sums_[node].size()) * 4 +
                     static_cast<std::int64_t>(raw_[node].size()) * width;
    all += arriving[node];
    largest_message_width_ =
        std::max(largest_message_width_, static_cast<std::int64_t>(sums_[node].size()) * 4);
  }
  for (int member = 0; member < ranks_; ++member) {
    const std::int64_t in = all - arriving[static_cast<std::size_t>(layout.node(member))];
    slot_width_ = std::max(slot_width_, sums_sent(layout, member) * 4 + in);
  }
  slot_width_ += (ranks_ - 1) * width;
}

std::pair<int, int> ReducePlan::range(int group) const {
  return {group * group_size_, std::min((group + 1) * group_size_, ranks_)};
}

std::int64_t ReducePlan::sums_sent(const NodeLayout& layout, int member) const {
  return layout.count_towards(member) * static_cast<std::int64_t>(sums(layout.node(member)).size());
}

}  // namespace tranche::comm
