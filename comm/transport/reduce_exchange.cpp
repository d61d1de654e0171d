#include "comm/transport/reduce_exchange.h"

#include <algorithm>

#include "tranche/core/shape.h"

namespace tranche::comm {

ReduceExchange::ReduceExchange(OperationInfo info, Reduction reduction)
    : Operation(std::move(info)), reduction_(std::move(reduction)) {
  const Reduction& r = reduction_;
  chunks_ = divide_round_up(r.count, std::max<std::int64_t>(r.chunk, 1));
  if (r.count == 0) return;
  const int ranks = static_cast<int>(r.members.size());
  // Starting after the own rank spreads the senders over the receivers.
  for (int step = 1; step < ranks && r.self < r.givers; ++step) {
    const auto member = static_cast<std::size_t>((r.self + step) % ranks);
    sends_.emplace_back(true, r.members[member], const_cast<void*>(r.pieces[member]),
                        r.count * size_of(r.dtype), r.chunk * size_of(r.dtype), this->info().tag);
  }
  scratch_.resize(static_cast<std::size_t>(r.scratch_bytes));
}

bool ReduceExchange::uses_staging() const {
  const int others = reduction_.givers - (reduction_.self < reduction_.givers ? 1 : 0);
  return scratch_.empty() && chunks_ > 0 && others > 0;
}

bool ReduceExchange::waits_for_staging() const {
  return uses_staging() && arrivals_.empty() && posted_ < chunks_;
}

bool ReduceExchange::sent() const {
  return std::all_of(sends_.begin(), sends_.end(), [](const Flow& flow) { return flow.finished(); });
}

std::int64_t ReduceExchange::elements_of(std::int64_t chunk) const {
  return std::min(reduction_.chunk, reduction_.count - chunk * reduction_.chunk);
}

bool ReduceExchange::post(Transport& transport, StagingBuffer& staging) {
  if (posted_ == chunks_) return false;
  Arrival arrival;
  if (uses_staging()) {
    arrival.slot = staging.take(order);
    if (arrival.slot < 0) return false;
    arrival.data = static_cast<unsigned char*>(staging.data(arrival.slot));
  } else {
    arrival.data = scratch_.data();
  }
  arrival.chunk = posted_++;
  const Reduction& r = reduction_;
  const std::int64_t bytes = elements_of(arrival.chunk) * size_of(r.dtype);
  unsigned char* place = arrival.data;
  arrival.messages.resize(static_cast<std::size_t>(r.givers));
  arrivals_.push_back(std::move(arrival));  // first, so that a slot is always released
  for (std::size_t member = 0; member < arrivals_.back().messages.size(); ++member) {
    if (static_cast<int>(member) == r.self) continue;
    arrivals_.back().messages[member] = transport.receive(place, bytes, r.members[member], info().tag);
    place += bytes;
  }
  return true;
}

void ReduceExchange::sum(const Arrival& arrival) {
  const Reduction& r = reduction_;
  const std::int64_t first = arrival.chunk * r.chunk;
  const std::int64_t count = elements_of(arrival.chunk);
  const std::int64_t bytes = count * size_of(r.dtype);
  std::vector<const void*> pieces(static_cast<std::size_t>(r.givers));
  const unsigned char* place = arrival.data;
  for (std::size_t member = 0; member < pieces.size(); ++member) {
    if (static_cast<int>(member) == r.self) {
      pieces[member] = static_cast<const unsigned char*>(r.pieces[member]) + first * size_of(r.dtype);
    } else {
      pieces[member] = place;
      place += bytes;
    }
  }
  r.combine(pieces, first, count, r.dtype);
}

bool ReduceExchange::advance(Transport& transport, StagingBuffer& staging) {
  bool moved = false;
  if (arrivals_.empty()) moved |= post(transport, staging);
  for (Flow& flow : sends_) moved |= flow.advance(transport);
  for (Arrival& arrival : arrivals_) {
    bool arrived = true;
    for (auto& message : arrival.messages) {
      if (!message) continue;
      if (message->test()) {
        message.reset();
        moved = true;
      } else {
        arrived = false;
      }
    }
    arrival.arrived = arrived;
    if (!arrived) break;  // messages with equal tags match in order
  }
  if (arrivals_.empty() || !arrivals_.front().arrived) return moved;
  const std::int64_t chunk = arrivals_.front().chunk;
  if (reduction_.in_place && std::any_of(sends_.begin(), sends_.end(),
                                         [chunk](const Flow& flow) { return flow.completed() <= chunk; })) {
    return moved;
  }
  // A second slot is taken only after the first chunk has shown that the peers have called: an operation that
  // waits for a late rank holds one slot and leaves the other to other operations. The next chunk arrives
  // during this sum.
  if (arrivals_.size() == 1 && uses_staging()) post(transport, staging);
  sum(arrivals_.front());
  if (arrivals_.front().slot >= 0) staging.release(arrivals_.front().slot, order);
  arrivals_.pop_front();
  ++summed_;
  return true;
}

PendingPeers ReduceExchange::pending_peers() const {
  PendingPeers result;
  for (const Arrival& arrival : arrivals_) {
    for (std::size_t member = 0; member < arrival.messages.size(); ++member) {
      if (arrival.messages[member]) result.ranks.push_back(reduction_.members[member]);
    }
    if (!result.ranks.empty()) return result;
  }
  result.sending = true;
  for (const Flow& flow : sends_) {
    if (!flow.finished()) result.ranks.push_back(flow.peer());
  }
  std::sort(result.ranks.begin(), result.ranks.end());
  return result;
}

void ReduceExchange::abandon(StagingBuffer& staging) {
  for (Flow& flow : sends_) flow.abandon();
  for (Arrival& arrival : arrivals_) {
    arrival.messages.clear();
    if (arrival.slot >= 0) staging.release(arrival.slot, order);
  }
  arrivals_.clear();
}

}  // namespace tranche::comm
