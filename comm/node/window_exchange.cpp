#include "comm/node/window_exchange.h"

#include <algorithm>

#include <fmt/format.h>

#include "tranche/core/shape.h"

namespace tranche::comm {

WindowExchange::Look::Look(Transport& transport, int rank, const Exposure& exposure)
    : transport_(&transport),
      rank_(rank),
      exposure_(exposure),
      data_(static_cast<const unsigned char*>(transport.look_at(rank, exposure))) {}

WindowExchange::Look::~Look() {
  if (data_ != nullptr) transport_->look_away(rank_, exposure_);
}

WindowExchange::Look::Look(Look&& other) noexcept
    : transport_(other.transport_),
      rank_(other.rank_),
      exposure_(other.exposure_),
      data_(std::exchange(other.data_, nullptr)) {}

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

/// A rank that copies nothing notifies once, one that copies notifies for every chunk; and so for what its
/// readers tell it.
std::int64_t WindowExchange::expected(const Peer& peer) const {
  const std::int64_t exposures = peer.direct ? 1 : chunks_;
  const std::int64_t dones = call_.exposure && !reads_slots() ? 1 : chunks_;
  return exposures + dones + (two_phases() ? chunks_ : 0);
}

void WindowExchange::take(Peer& peer) {
  const Note& note = peer.incoming;
  if (note.bytes != call_.mine_bytes) {
    throw CommunicationError(
        fmt::format("rank {} sent {} bytes where rank {} expects {}: the ranks' calls differ", peer.rank,
                    note.bytes, call_.members[static_cast<std::size_t>(call_.self)], call_.mine_bytes));
  }
  const bool all = note.chunk < 0;
  switch (note.kind) {
    case Kind::exposed:
      peer.direct = all;
      peer.places[all ? 0 : static_cast<std::size_t>(note.chunk % 2)] = note.place;
      peer.exposed = all ? chunks_ : note.chunk + 1;
      break;
    case Kind::ready:
      peer.slots[static_cast<std::size_t>(note.chunk % 2)] = note.place;
      peer.ready = note.chunk + 1;
      break;
    case Kind::done:
      peer.done = all ? chunks_ : note.chunk + 1;
      break;
  }
  ++peer.received;
}

bool WindowExchange::move_notes() {
  bool moved = false;
  for (int member = 0; member < ranks(); ++member) {
    if (member == call_.self) continue;
    Peer& peer = peers_[static_cast<std::size_t>(member)];
    for (;;) {
      // The first note says how many there will be.
      const std::int64_t wanted = peer.received == 0 ? 1 : expected(peer);
      if (!peer.receiving) {
        if (peer.received == wanted) break;
        peer.receiving = transport().receive_note(&peer.incoming, sizeof(Note), peer.rank, info().tag);
      }
      if (!peer.receiving->test()) break;
      peer.receiving.reset();
      take(peer);
      moved = true;
    }
    for (Outgoing& outgoing : peer.outgoing) {
      if (outgoing.message) continue;
      outgoing.message = transport().send_note(&outgoing.note, sizeof(Note), peer.rank, info().tag);
      moved = true;
    }
    while (!peer.outgoing.empty() && peer.outgoing.front().message->test()) {
      peer.outgoing.pop_front();
      moved = true;
    }
  }
  return moved;
}

bool WindowExchange::expose(StagingBuffer& staging) {
  if (exposed_ == chunks_) return false;
  Note note{Kind::exposed, -1, call_.mine_bytes, {}};
  if (call_.exposure) note.place = *call_.exposure;
  const bool tell_peers = !call_.exposure || exposed_ == 0;
  if (!uses_staging()) {
    exposed_ = chunks_;
  } else {
    if (slots_.size() == 2) return false;
    // A second slot only when the first chunk has proved that the peers are here, as in ReduceExchange.
    if (slots_.size() == 1 && !all_peers([&](const Peer& peer) { return peer.exposed > 0; })) return false;
    const int slot = staging.take(order);
    if (slot < 0) return false;
    auto* data = static_cast<unsigned char*>(staging.data(slot));
    slots_.push_back({slot, exposed_, {}, data});  // first, so that the slot is given back whatever happens
    const auto place = transport().expose(data, staging.slot_bytes());
    if (!place) throw LogicError("the exchange buffer lies outside of the window");
    slots_.back().exposure = *place;
    if (!call_.exposure) {
      fill(exposed_, data);
      note.place = *place;
      note.chunk = exposed_;
    }
    ++exposed_;
  }
  for (int member = 0; tell_peers && member < ranks(); ++member) {
    if (member != call_.self) tell(peers_[static_cast<std::size_t>(member)], note);
  }
  return true;
}

bool WindowExchange::free_slots(StagingBuffer& staging) {
  if (slots_.empty()) return false;
  const Slot slot = slots_.front();
  if (worked_ <= slot.chunk) return false;
  const bool read = !call_.exposure || reads_slots();
  if (read && !all_peers([&](const Peer& peer) { return peer.done > slot.chunk; })) return false;
  transport().withdraw(slot.exposure);
  staging.release(slot.number, order);
  slots_.pop_front();
  return true;
}

bool WindowExchange::advance(Transport&, StagingBuffer& staging) {
  if (chunks_ == 0) return false;
  bool moved = free_slots(staging);
  moved |= expose(staging);
  moved |= move_notes();
  const auto here = [&](std::int64_t chunk) {
    return exposed_ > chunk && all_peers([&](const Peer& peer) { return peer.exposed > chunk; });
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
    move_notes();
  }
  return moved || progress != Progress::waits;
}

bool WindowExchange::finished() const {
  return chunks_ == 0 || (worked_ == chunks_ && slots_.empty() && all_peers([&](const Peer& peer) {
                            return peer.outgoing.empty() && peer.received == expected(peer);
                          }));
}

std::vector<int> WindowExchange::unheard() const {
  std::vector<int> result;
  for (int member = 0; member < ranks(); ++member) {
    const Peer& peer = peers_[static_cast<std::size_t>(member)];
    if (member != call_.self && peer.received == 0) result.push_back(peer.rank);
  }
  return result;
}

Missing WindowExchange::missing() const {
  Missing result{unheard()};
  if (!result.ranks.empty()) return result;
  const auto collect = [&](auto&& absent) {
    for (int member = 0; member < ranks(); ++member) {
      const Peer& peer = peers_[static_cast<std::size_t>(member)];
      if (member != call_.self && absent(peer)) result.ranks.push_back(peer.rank);
    }
    return !result.ranks.empty();
  };
  if (collect([&](const Peer& peer) { return peer.exposed <= worked_ && worked_ < chunks_; })) return result;
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
    if (slot.exposure.bytes > 0) transport().withdraw(slot.exposure);
    staging.release(slot.number, order);
  }
  slots_.clear();
  if (call_.exposure && !withdrawn_) transport().withdraw(*call_.exposure);
  withdrawn_ = true;
}

WindowExchange::Look WindowExchange::look(int member, std::int64_t chunk, std::int64_t direct,
                                          std::int64_t packed) const {
  const Peer& peer = peers_[static_cast<std::size_t>(member)];
  Exposure place = peer.places[peer.direct ? 0 : static_cast<std::size_t>(chunk % 2)];
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
  return call_.exposure ? static_cast<unsigned char*>(call_.mine) + direct : slot_of(chunk) + packed;
}

WindowExchange::Look WindowExchange::look_in_slot(int member, std::int64_t chunk, std::int64_t offset) const {
  const Peer& peer = peers_[static_cast<std::size_t>(member)];
  Exposure place = peer.slots[static_cast<std::size_t>(chunk % 2)];
  place.offset += offset;
  return {transport(), peer.rank, place};
}

void WindowExchange::tell_ready(std::int64_t chunk) {
  Note note{Kind::ready, chunk, call_.mine_bytes, {}};
  for (const Slot& slot : slots_) {
    if (slot.chunk == chunk) note.place = slot.exposure;
  }
  for (int member = 0; member < ranks(); ++member) {
    if (member != call_.self) tell(peers_[static_cast<std::size_t>(member)], note);
  }
}

}  // namespace tranche::comm
