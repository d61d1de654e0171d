#include "comm/node/hierarchical_exchange.h"

#include <algorithm>
#include <cstring>

#include "comm/deterministic_sum.h"
#include "comm/node/window_collectives.h"
#include "device/large_copy.h"
#include "tranche/core/shape.h"

namespace tranche::comm {

namespace {
/// Elements of which the sums of all groups are kept near before they are added up.
constexpr std::int64_t block_elements = 2048;
}  // namespace

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

/// Ranks of other nodes that messages are wanted from, or have not been taken by. A node's messages wait
/// until all of its ranks are there, so that only one that is alone there is missing for sure.
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
  // Those of this node are there, and wait for what comes from other nodes.
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

HierarchicalReduceScatter::HierarchicalReduceScatter(OperationInfo info, WindowCall call,
                                                     HierarchicalCall whole,
                                                     std::shared_ptr<const ReducePlan> plan,
                                                     const Result& result)
    : HierarchicalExchange(std::move(info), std::move(call), std::move(whole)),
      plan_(std::move(plan)),
      result_(result) {
  if (!plan_->sums(own_node()).empty()) destinations_ = layout().stands_towards(this->whole().self);
}

// A slot holds the pieces for all other members behind one another (empty where peers read the buffer
// itself), then the sums that this rank sends, then what arrives: sums of all nodes, then pieces.
void HierarchicalReduceScatter::fill(std::int64_t chunk, unsigned char* slot) {
  const std::int64_t width = size_of(call().dtype), bytes = elements_of(chunk) * width;
  for (int member = 0; member < layout().ranks(); ++member) {
    if (member == whole().self) continue;
    std::memcpy(slot, own_piece(member, chunk), static_cast<std::size_t>(bytes));
    slot += bytes;
  }
}

const unsigned char* HierarchicalReduceScatter::own_piece(int destination, std::int64_t chunk) const {
  return static_cast<const unsigned char*>(call().mine) +
         (destination * call().count + first_of(chunk)) * size_of(call().dtype);
}

WindowExchange::PeerMapping HierarchicalReduceScatter::piece(int local, int destination, std::int64_t chunk,
                                                             std::int64_t first) const {
  const std::int64_t width = size_of(call().dtype);
  const int owner = member_of(local), place = destination < owner ? destination : destination - 1;
  return map_chunk(local, chunk, (destination * call().count + first_of(chunk) + first) * width,
                   (place * elements_of(chunk) + first) * width);
}

unsigned char* HierarchicalReduceScatter::sent_sums(std::int64_t chunk, std::size_t index) const {
  const std::int64_t pieces = (layout().ranks() - 1) * call().chunk * size_of(call().dtype);
  const auto sums = static_cast<std::int64_t>(index * plan_->sums(own_node()).size());
  return slot_of(chunk) + pieces + sums * call().chunk * 4;
}

unsigned char* HierarchicalReduceScatter::arrivals(std::int64_t chunk) const {
  return sent_sums(chunk, destinations_.size());
}

void HierarchicalReduceScatter::start_transfer(std::int64_t chunk) {
  Transfer& under_way = transfer(chunk);
  const std::int64_t width = size_of(call().dtype), elements = elements_of(chunk);
  unsigned char* place = arrivals(chunk);
  // In the order in which a rank sends: its sums come last, since they take time.
  std::vector<std::pair<int, unsigned char*>> sums;
  for (int from = 0; from < layout().nodes(); ++from) {
    if (from == own_node() || plan_->sums(from).empty()) continue;
    sums.emplace_back(layout().counterpart(whole().self, from), place);
    place += static_cast<std::int64_t>(plan_->sums(from).size()) * elements * 4;
  }
  for (int from = 0; from < layout().nodes(); ++from) {
    if (from == own_node()) continue;
    for (const int member : plan_->raw(from)) {
      receive(under_way, member, place, elements * width);
      place += elements * width;
    }
  }
  for (const auto& [member, data] : sums) {
    const auto count = static_cast<std::int64_t>(plan_->sums(layout().node(member)).size());
    receive(under_way, member, data, count * elements * 4);
  }
  const auto& raw = plan_->raw(own_node());
  if (std::find(raw.begin(), raw.end(), whole().self) == raw.end()) return;
  for (int member = 0; member < layout().ranks(); ++member) {
    if (layout().node(member) == own_node()) continue;
    send(under_way, member, own_piece(member, chunk), elements * width);
  }
}

WindowExchange::Progress HierarchicalReduceScatter::stage(std::int64_t chunk) {
  if (!started_) {
    start_transfer(chunk);
    started_ = true;
  }
  if (summed_for_ < destinations_.size()) {
    const int destination = destinations_[summed_for_];
    const std::int64_t elements = elements_of(chunk);
    unsigned char* sums = sent_sums(chunk, summed_for_);
    unsigned char* place = sums;
    for (const int group : plan_->sums(own_node())) {
      std::vector<PeerMapping> mappings;
      std::vector<const void*> pieces;
      const auto [first, end] = plan_->range(group);
      for (int member = first; member < end; ++member) {
        if (member == whole().self) {
          pieces.push_back(own_piece(destination, chunk));
          continue;
        }
        mappings.push_back(piece(layout().local(member), destination, chunk, 0));
        if (mappings.back().data() == nullptr) return Progress::waits;
        pieces.push_back(mappings.back().data());
      }
      deterministic_sum(*result_.stream, pieces, call().dtype, {},
                        TensorView{place, DataType::float32, Shape{elements}});
      place += elements * 4;
    }
    send(transfer(chunk), destination, sums, place - sums);
    if (++summed_for_ < destinations_.size()) return Progress::moved;
  }
  summed_for_ = 0;
  started_ = false;
  return Progress::done;
}

WindowExchange::Progress HierarchicalReduceScatter::work(std::int64_t chunk) {
  Transfer& under_way = transfer(chunk);
  bool moved = false;
  const bool gone = settle(under_way.sends, moved);
  if (!summed_) {
    if (!settle(under_way.receives, moved)) return moved ? Progress::moved : Progress::waits;
    if (!sum(chunk)) return Progress::waits;
    summed_ = true;
    return Progress::moved;
  }
  if (!gone) return moved ? Progress::moved : Progress::waits;
  close_transfer();
  summed_ = false;
  return Progress::done;
}

bool HierarchicalReduceScatter::sum(std::int64_t chunk) {
  const std::int64_t width = size_of(call().dtype), elements = elements_of(chunk);
  const std::int64_t out_width = size_of(result_.dtype);
  // The addresses of each group's sum, or of its members' pieces.
  struct Source {
    const unsigned char* sum = nullptr;
    std::vector<const unsigned char*> pieces;
  };
  std::vector<Source> sources(static_cast<std::size_t>(plan_->groups()));
  for (int group = 0; group < plan_->groups(); ++group) {
    const int at = plan_->node_of_group(group);
    if (at >= 0 && at != own_node()) continue;
    const auto [first, end] = plan_->range(group);
    sources[static_cast<std::size_t>(group)].pieces.resize(static_cast<std::size_t>(end - first));
  }
  const auto place_of = [&](int member) -> const unsigned char*& {
    const int group = plan_->group_of(member);
    const int first = plan_->range(group).first;
    return sources[static_cast<std::size_t>(group)].pieces[static_cast<std::size_t>(member - first)];
  };
  const unsigned char* arrived = arrivals(chunk);
  for (int from = 0; from < layout().nodes(); ++from) {
    if (from == own_node()) continue;
    for (const int group : plan_->sums(from)) {
      sources[static_cast<std::size_t>(group)].sum = arrived;
      arrived += elements * 4;
    }
  }
  for (int from = 0; from < layout().nodes(); ++from) {
    if (from == own_node()) continue;
    for (const int member : plan_->raw(from)) {
      place_of(member) = arrived;
      arrived += elements * width;
    }
  }
  std::vector<PeerMapping> mappings;
  for (const int member : layout().members(own_node())) {
    if (member == whole().self) {
      place_of(member) = own_piece(member, chunk);
      continue;
    }
    mappings.push_back(piece(layout().local(member), whole().self, chunk, 0));
    if (mappings.back().data() == nullptr) return false;
    place_of(member) = mappings.back().data();
  }
  ReductionOptions over_groups;
  over_groups.accumulate = result_.accumulate;
  std::vector<float> block(static_cast<std::size_t>(plan_->groups() * block_elements));
  std::vector<const void*> sums(sources.size()), pieces;
  for (std::int64_t done = 0; done < elements; done += block_elements) {
    const std::int64_t some = std::min(block_elements, elements - done);
    for (std::size_t group = 0; group < sources.size(); ++group) {
      const Source& source = sources[group];
      if (source.sum != nullptr) {
        sums[group] = source.sum + done * 4;
        continue;
      }
      float* near = block.data() + static_cast<std::int64_t>(group) * block_elements;
      pieces.clear();
      for (const unsigned char* each : source.pieces) pieces.push_back(each + done * width);
      deterministic_sum(*result_.stream, pieces, call().dtype, {},
                        TensorView{near, DataType::float32, Shape{some}});
      sums[group] = near;
    }
    auto* out = static_cast<unsigned char*>(result_.output) + (first_of(chunk) + done) * out_width;
    deterministic_sum(*result_.stream, sums, DataType::float32, over_groups,
                      TensorView{out, result_.dtype, Shape{some}});
  }
  return true;
}

HierarchicalAllGather::HierarchicalAllGather(OperationInfo info, WindowCall call, HierarchicalCall whole,
                                             void* full)
    : HierarchicalExchange(std::move(info), std::move(call), std::move(whole)),
      full_(static_cast<unsigned char*>(full)),
      copied_(static_cast<std::size_t>(ranks())),
      copied_received_(copied_.size()) {
  for (const int member : layout().members(own_node())) {
    received_by_.push_back(layout().stands_towards(member));
  }
}

std::int64_t HierarchicalAllGather::most_received(const NodeLayout& layout) {
  std::int64_t most = 0;
  for (int member = 0; member < layout.ranks(); ++member) most = std::max(most, layout.count_towards(member));
  return most;
}

// A slot holds the own shard's chunk (empty where peers read the shard itself), then the shards that arrive.
void HierarchicalAllGather::fill(std::int64_t chunk, unsigned char* slot) {
  const std::int64_t width = size_of(call().dtype);
  std::memcpy(slot, static_cast<const unsigned char*>(call().mine) + first_of(chunk) * width,
              static_cast<std::size_t>(elements_of(chunk) * width));
}

WindowExchange::Progress HierarchicalAllGather::stage(std::int64_t chunk) {
  Transfer& under_way = transfer(chunk);
  const std::int64_t width = size_of(call().dtype), bytes = elements_of(chunk) * width;
  unsigned char* arriving = slot_of(chunk) + call().chunk * width;
  for (const int member : received_by_[static_cast<std::size_t>(call().self)]) {
    receive(under_way, member, arriving, bytes);
    arriving += bytes;
  }
  const auto* shard = static_cast<const unsigned char*>(call().mine) + first_of(chunk) * width;
  for (int to = 0; to < layout().nodes(); ++to) {
    if (to != own_node()) send(under_way, layout().counterpart(whole().self, to), shard, bytes);
  }
  return Progress::done;
}

void HierarchicalAllGather::place(int member, std::int64_t chunk, const void* from) {
  const std::int64_t width = size_of(call().dtype);
  unsigned char* to = full_ + (member * call().count + first_of(chunk)) * width;
  const std::int64_t bytes = elements_of(chunk) * width;
  if (to == from) return;
  if (call().count * width * layout().ranks() >= streamed_gather_bytes) {
    copy_past_caches(to, from, bytes);
  } else {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
}

WindowExchange::Progress HierarchicalAllGather::work(std::int64_t chunk) {
  Transfer& under_way = transfer(chunk);
  const std::int64_t width = size_of(call().dtype), bytes = elements_of(chunk) * width;
  const std::int64_t first = first_of(chunk) * width, behind = call().chunk * width;
  bool moved = false;
  const bool gone = settle(under_way.sends, moved);
  if (!told_ && settle(under_way.receives, moved)) {
    announce_ready(chunk);
    told_ = moved = true;
  }
  bool all = told_;
  for (int local = 0; local < ranks(); ++local) {
    const auto index = static_cast<std::size_t>(local);
    const bool self = local == call().self;
    if (!copied_[index]) {
      if (self) {
        place(whole().self, chunk, static_cast<const unsigned char*>(call().mine) + first);
      } else {
        const PeerMapping shard = map_chunk(local, chunk, first, 0);
        if (shard.data() == nullptr) return Progress::waits;
        place(member_of(local), chunk, shard.data());
      }
      copied_[index] = moved = true;
    }
    if (copied_received_[index]) continue;
    if (self ? !told_ : !ready(local, chunk)) {
      all = false;
      continue;
    }
    const auto copy_all = [&](const unsigned char* from) {
      for (const int member : received_by_[index]) {
        place(member, chunk, from);
        from += bytes;
      }
    };
    if (self) {
      copy_all(slot_of(chunk) + behind);
    } else if (!received_by_[index].empty()) {
      const PeerMapping received = map_slot(local, chunk, behind);
      if (received.data() == nullptr) return Progress::waits;
      copy_all(received.data());
    }
    copied_received_[index] = moved = true;
  }
  if (!all || !gone) return moved ? Progress::moved : Progress::waits;
  close_transfer();
  told_ = false;
  std::fill(copied_.begin(), copied_.end(), false);
  std::fill(copied_received_.begin(), copied_received_.end(), false);
  return Progress::done;
}

}  // namespace tranche::comm
