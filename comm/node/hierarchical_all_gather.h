#pragma once
/// All-gather across nodes. Private to comm/.

#include <cstdint>
#include <vector>

#include "comm/node/hierarchical_exchange.h"

namespace tranche::comm {

/// Sends each shard once to every other node; the ranks of a node read the received shards from each other.
class HierarchicalAllGather : public HierarchicalExchange {
 public:
  HierarchicalAllGather(OperationInfo info, WindowCall call, HierarchicalCall whole, void* full);
  /// The largest number of shards that a rank receives from other nodes, which determines the chunk size.
  static std::int64_t most_received(const NodeLayout& layout);

 private:
  void fill(std::int64_t chunk, unsigned char* slot) override;
  Progress stage(std::int64_t chunk) override;
  Progress work(std::int64_t chunk) override;
  bool two_phases() const override { return true; }
  bool reads_slots() const override { return true; }
  void place(int member, std::int64_t chunk, const void* from);

  unsigned char* full_;
  std::vector<std::vector<int>> received_by_;   ///< members of other nodes, by their receiver's local index
  std::vector<bool> copied_, copied_received_;  ///< by local index
  bool told_ = false;
};

}  // namespace tranche::comm
