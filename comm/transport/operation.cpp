#include "comm/transport/operation.h"

#include <algorithm>

#include <fmt/format.h>

#include "tranche/core/shape.h"

namespace tranche::comm {

namespace {
/// Messages of one flow under way at once: enough to hide the hand-shake of one behind the data of another.
constexpr std::size_t flow_window = 4;

std::string rank_list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}
}  // namespace

std::string describe(std::string_view name, std::string_view unit, std::string_view phase) {
  std::string text(name);
  if (!unit.empty()) text.append(" of unit ").append(unit);
  if (!phase.empty()) text.append(" in ").append(phase);
  return text;
}

std::string timeout_message(const std::string& what, const PendingPeers& pending, double timeout) {
  const std::string seconds = fmt::format("{:.1f} s", timeout);
  if (pending.ranks.empty()) {
    return fmt::format("{}: not done after {} (no rank is known to be missing: a device or its link hangs)",
                       what, seconds);
  }
  const std::string who = rank_list(pending.ranks);
  const bool one = pending.ranks.size() == 1;
  const std::string observed = pending.sending
                                   ? fmt::format("{}: {} {} not taken the data of this rank after {}", what,
                                                 who, one ? "has" : "have", seconds)
                                   : fmt::format("{}: no data from {} after {}", what, who, seconds);
  const std::string they = !pending.sending ? who : one ? "it" : "they";
  if (pending.indirect) {
    return fmt::format("{} ({}, or a rank that {} for, has not entered the operation, or hangs)", observed,
                       they, one ? "it waits" : "they wait");
  }
  return fmt::format("{} ({} {} not entered the operation, or {})", observed, they, one ? "has" : "have",
                     one ? "hangs" : "hang");
}

Flow::Flow(bool sending, int peer, void* data, std::int64_t bytes, std::int64_t message_bytes, const Tag& tag)
    : sending_(sending),
      peer_(peer),
      data_(static_cast<unsigned char*>(data)),
      bytes_(bytes),
      message_bytes_(std::max<std::int64_t>(message_bytes, 1)),
      // A flow of no bytes is one empty message: what a barrier is made of.
      messages_(std::max<std::int64_t>(divide_round_up(bytes, message_bytes_), 1)),
      tag_(tag) {}

bool Flow::advance(Transport& transport) {
  bool moved = false;
  for (;;) {
    while (!window_.empty() && window_.front()->test()) {
      window_.pop_front();
      ++completed_;
      moved = true;
    }
    if (posted_ == messages_ || window_.size() == flow_window) return moved;
    const std::int64_t first = posted_ * message_bytes_;
    const std::int64_t bytes = std::min(message_bytes_, bytes_ - first);
    unsigned char* data = data_ == nullptr ? nullptr : data_ + first;
    window_.push_back(sending_ ? transport.send(data, bytes, peer_, tag_)
                               : transport.receive(data, bytes, peer_, tag_));
    ++posted_;
    moved = true;
  }
}

DirectOperation::DirectOperation(OperationInfo info, std::function<void()> local, std::vector<Flow> sends,
                                 std::vector<Flow> receives)
    : Operation(std::move(info)),
      local_(std::move(local)),
      sends_(std::move(sends)),
      receives_(std::move(receives)) {}

void DirectOperation::start() {
  if (local_) local_();
}

bool DirectOperation::advance(Transport& transport, StagingBuffer&) {
  bool moved = false;
  // Receives first: data that finds its buffer posted need not wait or be kept elsewhere.
  for (Flow& flow : receives_) moved |= flow.advance(transport);
  for (Flow& flow : sends_) moved |= flow.advance(transport);
  return moved;
}

bool DirectOperation::finished() const {
  const auto finished = [](const Flow& flow) { return flow.finished(); };
  return std::all_of(receives_.begin(), receives_.end(), finished) &&
         std::all_of(sends_.begin(), sends_.end(), finished);
}

PendingPeers DirectOperation::pending_peers() const {
  PendingPeers result;
  for (const Flow& flow : receives_) {
    if (!flow.finished()) result.ranks.push_back(flow.peer());
  }
  if (!result.ranks.empty()) return result;
  result.sending = true;
  for (const Flow& flow : sends_) {
    if (!flow.finished()) result.ranks.push_back(flow.peer());
  }
  return result;
}

void DirectOperation::abandon(StagingBuffer&) {
  for (Flow& flow : receives_) flow.abandon();
  for (Flow& flow : sends_) flow.abandon();
}

ReduceExchange::ReduceExchange(OperationInfo info, Reduction reduction)
    : Operation(std::move(info)), reduction_(std::move(reduction)) {
  const Reduction& r = reduction_;
  chunks_ = divide_round_up(r.count, std::max<std::int64_t>(r.chunk, 1));
  if (r.count == 0) return;
  const int ranks = static_cast<int>(r.members.size());
  // Starting behind one's own rank spreads the senders over the receivers.
  for (int step = 1; step < ranks; ++step) {
    const auto member = static_cast<std::size_t>((r.self + step) % ranks);
    sends_.emplace_back(true, r.members[member], const_cast<void*>(r.pieces[member]),
                        r.count * size_of(r.dtype), r.chunk * size_of(r.dtype), this->info().tag);
  }
  scratch_.resize(static_cast<std::size_t>(r.scratch_bytes));
}

bool ReduceExchange::uses_staging() const {
  return scratch_.empty() && !sends_.empty();
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
  arrival.messages.resize(r.members.size());
  arrivals_.push_back(std::move(arrival));  // first, so that a slot is given back whatever happens
  for (std::size_t member = 0; member < r.members.size(); ++member) {
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
  std::vector<const void*> pieces(r.members.size());
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
    if (!arrived) break;  // messages of one tag match in order
  }
  if (arrivals_.empty() || !arrivals_.front().arrived) return moved;
  const std::int64_t chunk = arrivals_.front().chunk;
  if (reduction_.in_place && std::any_of(sends_.begin(), sends_.end(),
                                         [chunk](const Flow& flow) { return flow.completed() <= chunk; })) {
    return moved;
  }
  // A second slot only now, when the first has proved that the peers are here: an operation that waits for a
  // late rank holds one slot and leaves the other to the rest. The next chunk arrives during this sum.
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
