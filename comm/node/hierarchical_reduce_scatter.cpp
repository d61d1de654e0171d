#include "comm/node/hierarchical_reduce_scatter.h"

#include <algorithm>
#include <cstring>

#include "comm/deterministic_sum.h"
#include "tranche/core/shape.h"

namespace tranche::comm {

namespace {
/// The number of elements for which the sums of all groups stay in the cache before they are added.
constexpr std::int64_t block_elements = 2048;
}  // namespace

HierarchicalReduceScatter::HierarchicalReduceScatter(OperationInfo info, WindowCall call,
                                                     HierarchicalCall whole,
                                                     std::shared_ptr<const ReducePlan> plan,
                                                     const Result& result)
    : HierarchicalExchange(std::move(info), std::move(call), std::move(whole)),
      plan_(std::move(plan)),
      result_(result) {
  if (!plan_->sums(own_node()).empty()) destinations_ = layout().stands_towards(this->whole().self);
}

// A slot holds, in this order, the parts for all other members (empty where peers read the buffer itself),
// the sums that this rank sends, the sums that arrive from all nodes, and the parts that arrive.
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

PeerMapping HierarchicalReduceScatter::piece(int local, int destination, std::int64_t chunk,
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
  // Receives are posted in the order in which a rank sends: sums come last, because they take time.
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
  // The address of each group's sum, or of its members' parts.
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
    if (member >= plan_->givers()) continue;
    if (member == whole().self) {
      place_of(member) = own_piece(member, chunk);
      continue;
    }
    mappings.push_back(piece(layout().local(member), whole().self, chunk, 0));
    if (mappings.back().data() == nullptr) return false;
    place_of(member) = mappings.back().data();
  }
  ReductionOptions over_groups;
  over_groups.accumulate = result_.order.accumulate;
  const int outer = result_.order.outer_group;
  over_groups.group_size = result_.order.group_size <= 0 ? -outer : outer;
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

}  // namespace tranche::comm
