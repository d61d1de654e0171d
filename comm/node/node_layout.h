#pragma once
/// The distribution of a group's members over nodes. Arithmetic only. Private to comm/.

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace tranche::comm {

/// The members of a group by node, both in group order.
class NodeLayout {
 public:
  NodeLayout() = default;
  /// `nodes`: the node of each member; equal numbers share a node.
  explicit NodeLayout(const std::vector<int>& nodes);
  int nodes() const { return static_cast<int>(members_.size()); }
  int ranks() const { return static_cast<int>(node_.size()); }
  const std::vector<int>& members(int node) const { return members_[static_cast<std::size_t>(node)]; }
  int node(int member) const { return node_[static_cast<std::size_t>(member)]; }
  /// Index among the members of its node.
  int local(int member) const { return local_[static_cast<std::size_t>(member)]; }
  /// The member of `node` that exchanges data with `member`, which is on another node, on its node's behalf.
  int counterpart(int member, int node) const;
  /// The number of members on other nodes for which `member` is its node's counterpart.
  std::int64_t count_towards(int member) const;
  /// The members on other nodes for which `member` is its node's counterpart.
  std::vector<int> stands_towards(int member) const;

 private:
  std::vector<std::vector<int>> members_;
  std::vector<int> node_, local_;
  std::map<int, std::int64_t> sizes_;  ///< the number of nodes by their number of ranks
};

}  // namespace tranche::comm
