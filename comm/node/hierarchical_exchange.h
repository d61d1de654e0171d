#pragma once
/// The base of hierarchical collectives: ranks read each other's memory within a node, and send messages
/// between nodes. Private to comm/.

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "comm/node/node_layout.h"
#include "comm/node/window_exchange.h"

namespace tranche::comm {

/// A rank's place in the whole group; WindowCall describes its node.
struct HierarchicalCall {
  std::shared_ptr<const NodeLayout> layout;
  std::vector<int> members;  ///< job ranks of the whole group
  int self = 0;              ///< index of this rank in members
};

/// The messages to and from other nodes, chunk by chunk.
class HierarchicalExchange : public WindowExchange {
 public:
  HierarchicalExchange(OperationInfo info, WindowCall call, HierarchicalCall whole);
  PendingPeers pending_peers() const override;
  void abandon(StagingBuffer& staging) override;

 protected:
  bool needs_slot() const override { return true; }
  PendingPeers pending_on_other_nodes(bool sending) const;
  struct Transfer {
    std::int64_t chunk;
    std::vector<std::pair<int, std::unique_ptr<Message>>> sends, receives;  ///< by member of the group
  };
  /// The transfer of a chunk in flight.
  Transfer& transfer(std::int64_t chunk);
  void send(Transfer& transfer, int member, const void* data, std::int64_t bytes);
  void receive(Transfer& transfer, int member, void* data, std::int64_t bytes);
  /// True once all have completed; `moved` is set when any did.
  static bool settle(std::vector<std::pair<int, std::unique_ptr<Message>>>& messages, bool& moved);
  const HierarchicalCall& whole() const { return whole_; }
  const NodeLayout& layout() const { return *whole_.layout; }
  int own_node() const { return layout().node(whole_.self); }
  /// The group's member with a local index on this node.
  int member_of(int local) const { return layout().members(own_node())[static_cast<std::size_t>(local)]; }
  void close_transfer() { transfers_.pop_front(); }

 private:
  HierarchicalCall whole_;
  std::deque<Transfer> transfers_;
};

}  // namespace tranche::comm
