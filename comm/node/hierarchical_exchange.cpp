#include "comm/node/hierarchical_exchange.h"

#include <algorithm>

namespace tranche::comm {

HierarchicalExchange::HierarchicalExchange(OperationInfo info, WindowCall call, HierarchicalCall whole)
    : WindowExchange(std::move(info), std::move(call)), whole_(std::move(whole)) {}

HierarchicalExchange::Transfer& HierarchicalExchange::transfer(std::int64_t chunk) {
  for (Transfer& each : transfers_) {
    if (each.chunk == chunk) return each;
  }
  transfers_.push_back({chunk, {}, {}});
  return transfers_.back();
}

void HierarchicalExchange::send(Transfer& transfer, int member, const void* data, std::int64_t bytes) {
  const int rank = whole_.members[static_cast<std::size_t>(member)];
  transfer.sends.emplace_back(member, call().transport->send(data, bytes, rank, info().tag));
}

void HierarchicalExchange::receive(Transfer& transfer, int member, void* data, std::int64_t bytes) {
  const int rank = whole_.members[static_cast<std::size_t>(member)];
  transfer.receives.emplace_back(member, call().transport->receive(data, bytes, rank, info().tag));
}

bool HierarchicalExchange::settle(std::vector<std::pair<int, std::unique_ptr<Message>>>& messages,
                                  bool& moved) {
  const auto gone = std::erase_if(messages, [](const auto& each) { return each.second->test(); });
  moved |= gone > 0;
  return messages.empty();
}

/// The ranks of other nodes whose messages have not arrived, or which have not received ours. A node's
/// messages wait until all of its ranks have called, so a missing rank is certain only if it is alone on its
/// node.
PendingPeers HierarchicalExchange::pending_on_other_nodes(bool sending) const {
  PendingPeers result{{}, sending, true};
  std::vector<int> alone;
  for (const Transfer& each : transfers_) {
    for (const auto& [member, message] : sending ? each.sends : each.receives) {
      const int rank = whole_.members[static_cast<std::size_t>(member)];
      if (std::find(result.ranks.begin(), result.ranks.end(), rank) != result.ranks.end()) continue;
      result.ranks.push_back(rank);
      if (layout().members(layout().node(member)).size() == 1) alone.push_back(rank);
    }
  }
  if (alone.empty()) return result;
  return {std::move(alone), sending, false};
}

PendingPeers HierarchicalExchange::pending_peers() const {
  if (std::vector<int> here = silent_peers(); !here.empty()) return {std::move(here)};
  if (PendingPeers elsewhere = pending_on_other_nodes(false); !elsewhere.ranks.empty()) return elsewhere;
  // The ranks of this node have called, and wait for messages from other nodes.
  PendingPeers here = WindowExchange::pending_peers();
  here.indirect = true;
  if (!here.sending && !here.ranks.empty()) return here;
  if (PendingPeers elsewhere = pending_on_other_nodes(true); !elsewhere.ranks.empty()) return elsewhere;
  return here;
}

void HierarchicalExchange::abandon(StagingBuffer& staging) {
  transfers_.clear();
  WindowExchange::abandon(staging);
}

}  // namespace tranche::comm
