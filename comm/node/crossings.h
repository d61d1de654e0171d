#pragma once
/// Computes the bytes of a group's calls that go to other nodes. Arithmetic only. Private to comm/.

#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>

#include "comm/node/node_layout.h"
#include "comm/node/reduce_plan.h"
#include "tranche/comm/backends.h"
#include "tranche/comm/communicator.h"

namespace tranche::comm {

/// Counts the bytes that operations on host memory send, including the choice of the algorithm by size.
/// Thread-safe.
class Crossings {
 public:
  struct Bytes {
    std::int64_t own = 0;   ///< this member's
    std::int64_t node = 0;  ///< all members' on its node
  };
  /// `windows`: true if ranks of a node can read each other's memory.
  Crossings(NodeLayout layout, int self, NodeCollectives collectives, bool windows);

  /// `count` elements from each member.
  Bytes all_gather(std::int64_t count, DataType dtype) const;
  Bytes reduce_scatter(std::int64_t count, DataType dtype, const ReductionOptions& options) const;
  /// Each of the first `givers` members sends so many bytes to every other.
  Bytes to_all(std::int64_t bytes, int givers = 1 << 30) const;
  bool elsewhere(int member) const { return layout_.node(member) != layout_.node(self_); }

 private:
  bool by_window(std::int64_t bytes, std::int64_t least) const;
  template <typename OfMember>
  Bytes sum(const OfMember& of_member) const;

  NodeLayout layout_;
  int self_;
  NodeCollectives collectives_;
  bool windows_;
  mutable std::mutex mutex_;
  mutable std::map<std::tuple<int, int, std::int64_t>, ReducePlan> plans_;  ///< by groups, givers, width
};

}  // namespace tranche::comm
