#pragma once
/// The messages of a deterministic reduction across nodes. Arithmetic only. Private to comm/.

#include <cstdint>
#include <utility>
#include <vector>

#include "comm/node/node_layout.h"

namespace tranche::comm {

/// The data that is sent between nodes in a deterministic sum of the first `givers` members, in groups of
/// `group_size` (its absolute value) consecutive members; 0: no groups, each sends its own data. For a group
/// on one node, one fp32 sum is sent; members of a group over several nodes send their own data, because
/// their sum depends on its order. Either way every addition of the reduction order receives one part, sent
/// or read, so N-1 parts per shard are moved whatever the layout.
class ReducePlan {
 public:
  ReducePlan(const NodeLayout& layout, int group_size, std::int64_t width, int givers = 1 << 30);
  int givers() const { return givers_; }
  int groups() const { return static_cast<int>(node_of_group_.size()); }
  int group_of(int member) const { return member / group_size_; }
  /// The range of a group's members: its first member and the one after its last.
  std::pair<int, int> range(int group) const;
  /// The node whose members sum the group for the others; -1 when the group is not summed by one node.
  int node_of_group(int group) const { return node_of_group_[static_cast<std::size_t>(group)]; }
  /// The groups that a node sums for the others, in order.
  const std::vector<int>& sums(int node) const { return sums_[static_cast<std::size_t>(node)]; }
  /// The members of a node that send their own data, in order.
  const std::vector<int>& raw(int node) const { return raw_[static_cast<std::size_t>(node)]; }
  /// The bytes of a slot per element of the chunk, for the member that needs most: parts that are copied in,
  /// sums to send, and data that arrives.
  std::int64_t slot_width() const { return slot_width_; }
  std::int64_t largest_message_width() const { return largest_message_width_; }
  /// The number of fp32 sums, each as long as a shard, that a member sends.
  std::int64_t sums_sent(const NodeLayout& layout, int member) const;

 private:
  int group_size_, givers_;
  std::vector<int> node_of_group_;
  std::vector<std::vector<int>> sums_, raw_;
  std::int64_t slot_width_ = 0, largest_message_width_ = 4;
};

}  // namespace tranche::comm
