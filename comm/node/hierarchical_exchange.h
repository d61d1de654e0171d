#pragma once
/// Collectives over several nodes: within each the ranks read each other's memory, and what crosses between
/// nodes crosses once, in slices that the ranks of a node share out among themselves.

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "comm/node/node_layout.h"
#include "comm/node/window_exchange.h"
#include "tranche/device/stream.h"

namespace tranche::comm {

/// The part of a rank in the whole group, beside the WindowCall of its node.
struct HierarchicalCall {
  std::shared_ptr<const NodeLayout> layout;
  std::vector<int> members;  ///< job ranks of the whole group
  int self = 0;              ///< index in members
};

/// Messages to and from other nodes, chunk by chunk.
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
  /// Of a chunk that is under way.
  Transfer& transfer(std::int64_t chunk);
  void send(Transfer& transfer, int member, const void* data, std::int64_t bytes);
  void receive(Transfer& transfer, int member, void* data, std::int64_t bytes);
  /// True once all have come or gone; `moved` is set when any did.
  static bool settle(std::vector<std::pair<int, std::unique_ptr<Message>>>& messages, bool& moved);
  const HierarchicalCall& whole() const { return whole_; }
  const NodeLayout& layout() const { return *whole_.layout; }
  int own_node() const { return layout().node(whole_.self); }
  /// The group's member with a local index of this node.
  int member_of(int local) const { return layout().members(own_node())[static_cast<std::size_t>(local)]; }
  void close_transfer() { transfers_.pop_front(); }

 private:
  HierarchicalCall whole_;
  std::deque<Transfer> transfers_;
};

/// The ordered sum of docs/design.md, bit for bit, whatever the nodes.
class HierarchicalReduceScatter : public HierarchicalExchange {
 public:
  struct Result {
    void* output = nullptr;
    DataType dtype = DataType::float32;
    bool accumulate = false;
    Stream* stream = nullptr;
  };
  HierarchicalReduceScatter(OperationInfo info, WindowCall call, HierarchicalCall whole,
                            std::shared_ptr<const ReducePlan> plan, const Result& result);

 private:
  void fill(std::int64_t chunk, unsigned char* slot) override;
  Progress stage(std::int64_t chunk) override;
  Progress work(std::int64_t chunk) override;
  void start_transfer(std::int64_t chunk);
  bool sum(std::int64_t chunk);
  PeerMapping piece(int local, int destination, std::int64_t chunk, std::int64_t first) const;
  const unsigned char* own_piece(int destination, std::int64_t chunk) const;
  unsigned char* sent_sums(std::int64_t chunk, std::size_t index) const;
  unsigned char* arrivals(std::int64_t chunk) const;

  std::shared_ptr<const ReducePlan> plan_;
  Result result_;
  std::vector<int> destinations_;
  std::size_t summed_for_ = 0;  ///< destinations of the chunk that is being staged
  bool started_ = false, summed_ = false;
};

class HierarchicalAllGather : public HierarchicalExchange {
 public:
  HierarchicalAllGather(OperationInfo info, WindowCall call, HierarchicalCall whole, void* full);
  /// Shards of other nodes that a rank receives at most, for the size of a chunk.
  static std::int64_t most_received(const NodeLayout& layout);

 private:
  void fill(std::int64_t chunk, unsigned char* slot) override;
  Progress stage(std::int64_t chunk) override;
  Progress work(std::int64_t chunk) override;
  bool two_phases() const override { return true; }
  bool reads_slots() const override { return true; }
  void place(int member, std::int64_t chunk, const void* from);

  unsigned char* full_;
  std::vector<std::vector<int>> received_by_;   ///< members of other nodes, by local index of who receives
  std::vector<bool> copied_, copied_received_;  ///< by local index
  bool told_ = false;
};

}  // namespace tranche::comm
