#include "comm/node/hierarchical_all_gather.h"

#include <algorithm>
#include <cstring>

#include "comm/node/window_all_gather.h"
#include "device/large_copy.h"

namespace tranche::comm {

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

// A slot holds the rank's own chunk (empty where peers read the shard itself), then the shards that arrive.
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
    detail::copy_past_caches(to, from, bytes);
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
