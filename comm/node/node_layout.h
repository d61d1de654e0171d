#pragma once
/// The spread of the members of a group over nodes. Arithmetic only. Private to comm/.

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace tranche::comm {

/// Members of a group by node, both in group order.
class NodeLayout {
 public:
  NodeLayout() = default;
  /// `nodes`: by member; equal numbers share a node.
  explicit NodeLayout(const std::vector<int>& nodes);
  int nodes() const { return static_cast<int>(members_.size()); }
  int ranks() const { return static_cast<int>(node_.size()); }
  const std::vector<int>& members(int node) const { return members_[static_cast<std::size_t>(node)]; }
  int node(int member) const { return node_[static_cast<std::size_t>(member)]; }
  /// Index among the members of its node.
  int local(int member) const { return local_[static_cast<std::size_t>(member)]; }
  /// The member of `node` that stands for it towards `member`, which is on another.
  int counterpart(int member, int node) const;
  /// The number of members of other nodes that `member` stands for its node towards.
  std::int64_t count_towards(int member) const;
  /// The members of other nodes that `member` stands for its node towards.
  std::vector<int> stands_towards(int member) const;

 private:
  std::vector<std::vector<int>> members_;
  std::vector<int> node_, local_;
  std::map<int, std::int64_t> sizes_;  ///< nodes, by their ranks
};

}  // namespace tranche::comm
