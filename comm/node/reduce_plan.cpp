#include "comm/node/reduce_plan.h"

#include <algorithm>
#include <cstdlib>

namespace tranche::comm {

ReducePlan::ReducePlan(const NodeLayout& layout, int group_size, std::int64_t width, int givers)
    : group_size_(std::clamp(std::abs(group_size), 1, layout.ranks())),
      givers_(std::min(givers, layout.ranks())),
      sums_(static_cast<std::size_t>(layout.nodes())),
      raw_(sums_.size()) {
  for (int first = 0; first < givers_; first += group_size_) {
    const int group = static_cast<int>(node_of_group_.size());
    const int end = std::min(first + group_size_, givers_);
    bool one_node = end - first > 1;  // one member's sum is its own data
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
  for (int member = 0; member < layout.ranks(); ++member) {
    const std::int64_t in = all - arriving[static_cast<std::size_t>(layout.node(member))];
    slot_width_ = std::max(slot_width_, sums_sent(layout, member) * 4 + in);
  }
  slot_width_ += (layout.ranks() - 1) * width;
}

std::pair<int, int> ReducePlan::range(int group) const {
  return {group * group_size_, std::min((group + 1) * group_size_, givers_)};
}

std::int64_t ReducePlan::sums_sent(const NodeLayout& layout, int member) const {
  return layout.count_towards(member) * static_cast<std::int64_t>(sums(layout.node(member)).size());
}

}  // namespace tranche::comm
