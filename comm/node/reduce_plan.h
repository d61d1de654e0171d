#pragma once
/// The messages of a deterministic reduction across nodes. Arithmetic only. Private to comm/.

#include <cstdint>
#include <utility>
#include <vector>

#include "comm/node/node_layout.h"

namespace tranche::comm {

/// The data that crosses between nodes in a deterministic sum of the first `givers` members, with groups of
/// `group_size` consecutive ones (its absolute value); 0: no groups, each sends what it has. A group that
/// lies on one node sends one fp32 sum of it; members of a group that lies on several send what they have,
/// since their sum depends on its order. Either way every addition of the reduction order is one piece sent
/// or read, so that N-1 pieces per shard travel whatever the layout.
class ReducePlan {
 public:
  ReducePlan(const NodeLayout& layout, int group_size, std::int64_t width, int givers = 1 << 30);
  int givers() const { return givers_; }
  int groups() const { return static_cast<int>(node_of_group_.size()); }
  int group_of(int member) const { return member / group_size_; }
  /// First and last but one member.
  std::pair<int, int> range(int group) const;
  /// The node whose members sum a group for the others; -1 when they do not.
  int node_of_group(int group) const { return node_of_group_[static_cast<std::size_t>(group)]; }
  /// Groups that a node sums for the others, in order.
  const std::vector<int>& sums(int node) const { return sums_[static_cast<std::size_t>(node)]; }
  /// Members of a node that send what they have, in order.
  const std::vector<int>& raw(int node) const { return raw_[static_cast<std::size_t>(node)]; }
  /// Bytes of a slot per element of the chunk: pieces that are copied in, sums sent, and what arrives; of the
  /// member that needs most.
  std::int64_t slot_width() const { return slot_width_; }
  std::int64_t largest_message_width() const { return largest_message_width_; }
  /// fp32 sums, each as long as a shard, that a member sends.
  std::int64_t sums_sent(const NodeLayout& layout, int member) const;

 private:
  int group_size_, givers_;
  std::vector<int> node_of_group_;
  std::vector<std::vector<int>> sums_, raw_;
  std::int64_t slot_width_ = 0, largest_message_width_ = 4;
};

}  // namespace tranche::comm
