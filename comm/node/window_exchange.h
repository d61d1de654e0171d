#pragma once
/// The protocol of collectives whose ranks read each other's memory. Private to comm/.

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "comm/node/peer_mapping.h"
#include "comm/node/window_call.h"
#include "comm/transport/operation.h"

namespace tranche::comm {

/// The protocol, chunk by chunk. A rank publishes the place of its chunk (its own buffer for all chunks at
/// once, or a slot of its staging buffer that it has filled), works on the chunk once all peers have
/// published theirs, and sends `done` when it will not read theirs again. Only these control messages travel
/// as messages, so waiting, time-outs and failures are those of every other operation.
///
///     own chunk:  slot filled -> published -> read by the peers -> `done` from all -> slot released
///     each chunk: `published` from all -> stage() -> work(), which may use `ready` -> `done` sent
class WindowExchange : public Operation {
 public:
  WindowExchange(OperationInfo info, WindowCall call);
  bool advance(Transport& transport, StagingBuffer& staging) override;
  bool finished() const override;
  PendingPeers pending_peers() const override;
  bool uses_staging() const override { return chunks_ > 0 && (!call_.registration || needs_slot()); }
  void abandon(StagingBuffer& staging) override;
  bool waits_for_staging() const override { return uses_staging() && published_ == 0; }

 protected:
  /// Copies the data that peers read of a chunk into a slot.
  virtual void fill(std::int64_t chunk, unsigned char* slot) = 0;
  enum class Progress { waits, moved, done };
  /// Does a bounded part of the work on a chunk.
  virtual Progress work(std::int64_t chunk) = 0;
  /// Prepares a chunk for work(), while earlier chunks are still in work.
  virtual Progress stage(std::int64_t) { return Progress::done; }
  /// True when every chunk needs a slot, even where peers read this rank's buffer directly.
  virtual bool needs_slot() const { return false; }
  /// True when peers also read other contents of the slot, so that it is kept until they have done so.
  virtual bool reads_slots() const { return false; }
  /// True when every rank sends a second control message for each chunk (see announce_ready).
  virtual bool two_phases() const { return false; }

  std::int64_t elements_of(std::int64_t chunk) const;
  std::int64_t first_of(std::int64_t chunk) const { return chunk * call_.chunk; }
  int ranks() const { return static_cast<int>(call_.members.size()); }
  /// A member's memory for a chunk. `direct`, `packed`: the offset in bytes of the wanted place, in its
  /// buffer or in a slot.
  PeerMapping map_chunk(int member, std::int64_t chunk, std::int64_t direct, std::int64_t packed) const;
  unsigned char* own(std::int64_t chunk, std::int64_t direct, std::int64_t packed) const;
  /// The slot of a chunk that is staged or in work.
  unsigned char* slot_of(std::int64_t chunk) const;
  /// A peer's slot, once it is ready.
  PeerMapping map_slot(int member, std::int64_t chunk, std::int64_t offset) const;
  void announce_ready(std::int64_t chunk);
  bool ready(int member, std::int64_t chunk) const {
    return peers_[static_cast<std::size_t>(member)].ready > chunk;
  }
  const WindowCall& call() const { return call_; }
  Transport& transport() const { return *call_.transport; }
  /// The members that have not sent any message yet.
  std::vector<int> silent_peers() const;

 private:
  enum class Kind : std::int64_t { published, ready, done };
  struct ControlMessage {
    Kind kind = Kind::published;
    std::int64_t chunk = 0;  ///< -1: all
    std::int64_t bytes = 0;  ///< of the call; different when the ranks' calls differ
    MemoryRegistration place;
  };
  struct Outgoing {
    ControlMessage message;
    std::unique_ptr<Message> sending;
  };
  struct Peer {
    int rank = 0;
    ControlMessage incoming;
    std::unique_ptr<Message> receiving;
    std::deque<Outgoing> outgoing;
    std::int64_t received = 0, published = 0, ready = 0, done = 0;
    bool direct = false;
    std::array<MemoryRegistration, 2> places;  ///< by chunk mod 2; only [0] when direct
    std::array<MemoryRegistration, 2> slots;   ///< the places in `ready` messages, by chunk mod 2
  };
  struct Slot {
    int number;
    std::int64_t chunk;
    MemoryRegistration registration;
    unsigned char* data;
  };
  std::int64_t expected(const Peer& peer) const;
  void tell(Peer& peer, const ControlMessage& message) { peer.outgoing.push_back({message, nullptr}); }
  bool move_control_messages();
  void take(Peer& peer);
  bool publish(StagingBuffer& staging);
  bool free_slots(StagingBuffer& staging);
  template <typename Predicate>
  bool all_peers(Predicate&& predicate) const;

  WindowCall call_;
  std::vector<Peer> peers_;  ///< by member; this rank's own is unused
  std::int64_t chunks_ = 0, published_ = 0, staged_ = 0, worked_ = 0;
  std::deque<Slot> slots_;
  bool deregistered_ = false;
};

/// The bytes moved in one go, less than a millisecond's work, so that other operations get their turn.
inline constexpr std::int64_t quantum_bytes = std::int64_t{4} << 20;

}  // namespace tranche::comm
