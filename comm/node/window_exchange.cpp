#include "comm/node/window_exchange.h"

#include <algorithm>

#include <fmt/format.h>

#include "tranche/core/shape.h"

namespace tranche::comm {

WindowExchange::WindowExchange(OperationInfo info, WindowCall call)
    : Operation(std::move(info)), call_(std::move(call)), peers_(call_.members.size()) {
  chunks_ = divide_round_up(call_.count, std::max<std::int64_t>(call_.chunk, 1));
  for (std::size_t member = 0; member < peers_.size(); ++member) peers_[member].rank = call_.members[member];
}

template <typename Predicate>
bool WindowExchange::all_peers(Predicate&& predicate) const {
  for (int member = 0; member < ranks(); ++member) {
    if (member != call_.self && !predicate(peers_[static_cast<std::size_t>(member)])) return false;
  }
  return true;
}

std::int64_t WindowExchange::elements_of(std::int64_t chunk) const {
  return std::min(call_.chunk, call_.count - first_of(chunk));
}

/// The number of control messages from a peer. A rank that does not copy publishes once, a rank that copies
/// publishes every chunk; the readers' done messages follow the same rule.
std::int64_t WindowExchange::expected(const Peer& peer) const {
  const std::int64_t registrations = peer.direct ? 1 : chunks_;
  const std::int64_t dones = call_.registration && !reads_slots() ? 1 : chunks_;
  return registrations + dones + (two_phases() ? chunks_ : 0);
}

void WindowExchange::take(Peer& peer) {
  const ControlMessage& message = peer.incoming;
  if (message.bytes != call_.mine_bytes) {
    throw CommunicationError(fmt::format(
        "{} sent {} bytes where {} expects {}: the ranks' calls differ",
        transport().rank_names().of(peer.rank), message.bytes,
        transport().rank_names().of(call_.members[static_cast<std::size_t>(call_.self)]), call_.mine_bytes));
  }
  const bool all = message.chunk < 0;
  switch (message.kind) {
    case Kind::published:
      peer.direct = all;
      peer.places[all ? 0 : static_cast<std::size_t>(message.chunk % 2)] = message.place;
      peer.published = all ? chunks_ : message.chunk + 1;
      break;
    case Kind::ready:
      peer.slots[static_cast<std::size_t>(message.chunk % 2)] = message.place;
      peer.ready = message.chunk + 1;
      break;
    case Kind::done:
      peer.done = all ? chunks_ : message.chunk + 1;
      break;
  }
  ++peer.received;
}

bool WindowExchange::move_control_messages() {
  bool moved = false;
  for (int member = 0; member < ranks(); ++member) {
    if (member == call_.self) continue;
    Peer& peer = peers_[static_cast<std::size_t>(member)];
    for (;;) {
      // The first control message determines how many will follow.
      const std::int64_t wanted = peer.received == 0 ? 1 : expected(peer);
      if (!peer.receiving) {
        if (peer.received == wanted) break;
        peer.receiving =
            transport().receive(&peer.incoming, sizeof(ControlMessage), peer.rank, control_tag(info().tag));
      }
      if (!peer.receiving->test()) break;
      peer.receiving.reset();
      take(peer);
      moved = true;
    }
    for (Outgoing& outgoing : peer.outgoing) {
      if (outgoing.sending) continue;
      outgoing.sending =
          transport().send(&outgoing.message, sizeof(ControlMessage), peer.rank, control_tag(info().tag));
      moved = true;
    }
    while (!peer.outgoing.empty() && peer.outgoing.front().sending->test()) {
      peer.outgoing.pop_front();
      moved = true;
    }
  }
  return moved;
}

bool WindowExchange::publish(StagingBuffer& staging) {
  if (published_ == chunks_) return false;
  ControlMessage message{Kind::published, -1, call_.mine_bytes, {}};
  if (call_.registration) message.place = *call_.registration;
  const bool announces = !call_.registration || published_ == 0;
  if (!uses_staging()) {
    published_ = chunks_;
  } else {
    if (slots_.size() == 2) return false;
    // A second slot is taken only after the first chunk has shown that the peers have called, as in
    // ReduceExchange.
    if (slots_.size() == 1 && !all_peers([&](const Peer& peer) { return peer.published > 0; })) return false;
    const int slot = staging.take(order);
    if (slot < 0) return false;
    auto* data = static_cast<unsigned char*>(staging.data(slot));
    slots_.push_back({slot, published_, {}, data});  // first, so that the slot is always released
    const auto place = transport().register_memory(data, staging.slot_bytes());
    if (!place) throw LogicError("the staging buffer lies outside of the window");
    slots_.back().registration = *place;
    if (!call_.registration) {
      fill(published_, data);
      message.place = *place;
      message.chunk = published_;
    }
    ++published_;
  }
  for (int member = 0; announces && member < ranks(); ++member) {
    if (member != call_.self) tell(peers_[static_cast<std::size_t>(member)], message);
  }
  return true;
}

bool WindowExchange::free_slots(StagingBuffer& staging) {
  if (slots_.empty()) return false;
  const Slot slot = slots_.front();
  if (worked_ <= slot.chunk) return false;
  const bool read = !call_.registration || reads_slots();
  if (read && !all_peers([&](const Peer& peer) { return peer.done > slot.chunk; })) return false;
  transport().deregister_memory(slot.registration);
  staging.release(slot.number, order);
  slots_.pop_front();
  return true;
}

bool WindowExchange::advance(Transport&, StagingBuffer& staging) {
  if (chunks_ == 0) return false;
  bool moved = free_slots(staging);
  moved |= publish(staging);
  moved |= move_control_messages();
  const auto here = [&](std::int64_t chunk) {
    return published_ > chunk && all_peers([&](const Peer& peer) { return peer.published > chunk; });
  };
  if (staged_ < chunks_ && here(staged_)) {
    const Progress prepared = stage(staged_);
    if (prepared == Progress::done) ++staged_;
    moved |= prepared != Progress::waits;
  }
  const std::int64_t chunk = worked_;
  if (staged_ == chunk) return moved;
  const Progress progress = work(chunk);
  if (progress == Progress::done) {
    ++worked_;
    for (int member = 0; member < ranks(); ++member) {
      if (member == call_.self) continue;
      Peer& peer = peers_[static_cast<std::size_t>(member)];
      if (!peer.direct || reads_slots()) {
        tell(peer, {Kind::done, chunk, call_.mine_bytes, {}});
      } else if (worked_ == chunks_) {
        tell(peer, {Kind::done, -1, call_.mine_bytes, {}});
      }
    }
    move_control_messages();
  }
  return moved || progress != Progress::waits;
}

bool WindowExchange::finished() const {
  return chunks_ == 0 || (worked_ == chunks_ && slots_.empty() && all_peers([&](const Peer& peer) {
                            return peer.outgoing.empty() && peer.received == expected(peer);
                          }));
}

std::vector<int> WindowExchange::silent_peers() const {
  std::vector<int> result;
  for (int member = 0; member < ranks(); ++member) {
    const Peer& peer = peers_[static_cast<std::size_t>(member)];
    if (member != call_.self && peer.received == 0) result.push_back(peer.rank);
  }
  return result;
}

PendingPeers WindowExchange::pending_peers() const {
  PendingPeers result{silent_peers()};
  if (!result.ranks.empty()) return result;
  const auto collect = [&](auto&& absent) {
    for (int member = 0; member < ranks(); ++member) {
      const Peer& peer = peers_[static_cast<std::size_t>(member)];
      if (member != call_.self && absent(peer)) result.ranks.push_back(peer.rank);
    }
    return !result.ranks.empty();
  };
  if (collect([&](const Peer& peer) { return peer.published <= worked_ && worked_ < chunks_; }))
    return result;
  if (two_phases() && collect([&](const Peer& peer) { return peer.ready <= worked_ && worked_ < chunks_; })) {
    return result;
  }
  result.sending = true;
  collect([&](const Peer& peer) { return peer.done < chunks_ || !peer.outgoing.empty(); });
  return result;
}

void WindowExchange::abandon(StagingBuffer& staging) {
  for (Peer& peer : peers_) {
    peer.receiving.reset();
    peer.outgoing.clear();
  }
  for (const Slot& slot : slots_) {
    if (slot.registration.bytes > 0) transport().deregister_memory(slot.registration);
    staging.release(slot.number, order);
  }
  slots_.clear();
  if (call_.registration && !deregistered_) transport().deregister_memory(*call_.registration);
  deregistered_ = true;
}

PeerMapping WindowExchange::map_chunk(int member, std::int64_t chunk, std::int64_t direct,
                                      std::int64_t packed) const {
  const Peer& peer = peers_[static_cast<std::size_t>(member)];
  MemoryRegistration place = peer.places[peer.direct ? 0 : static_cast<std::size_t>(chunk % 2)];
  place.offset += peer.direct ? direct : packed;
  return {transport(), peer.rank, place};
}

unsigned char* WindowExchange::slot_of(std::int64_t chunk) const {
  for (const Slot& slot : slots_) {
    if (slot.chunk == chunk) return slot.data;
  }
  throw LogicError("no slot for the chunk of an exchange");
}

unsigned char* WindowExchange::own(std::int64_t chunk, std::int64_t direct, std::int64_t packed) const {
  return call_.registration ? static_cast<unsigned char*>(call_.mine) + direct : slot_of(chunk) + packed;
}

PeerMapping WindowExchange::map_slot(int member, std::int64_t chunk, std::int64_t offset) const {
  const Peer& peer = peers_[static_cast<std::size_t>(member)];
  MemoryRegistration place = peer.slots[static_cast<std::size_t>(chunk % 2)];
  place.offset += offset;
  return {transport(), peer.rank, place};
}

void WindowExchange::announce_ready(std::int64_t chunk) {
  ControlMessage message{Kind::ready, chunk, call_.mine_bytes, {}};
  for (const Slot& slot : slots_) {
    if (slot.chunk == chunk) message.place = slot.registration;
  }
  for (int member = 0; member < ranks(); ++member) {
    if (member != call_.self) tell(peers_[static_cast<std::size_t>(member)], message);
  }
}

}  // namespace tranche::comm
