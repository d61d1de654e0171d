#pragma once
/// Collectives among ranks that read each other's memory: state machines, as in operation.h.

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "comm/transport/operation.h"
#include "tranche/comm/backends.h"

namespace tranche::comm {

/// The arguments that the three collectives have in common.
struct WindowCall {
  std::vector<int> members;  ///< job ranks of the group, in group order
  int self = 0;              ///< index in members
  void* mine = nullptr;      ///< this rank's memory that peers read
  std::int64_t mine_bytes = 0;
  std::int64_t count = 0;  ///< elements per rank, as in the call
  std::int64_t chunk = 0;  ///< elements that a slot holds of each piece; equal on all ranks
  DataType dtype = DataType::float32;
  /// Named to peers as it is; nullopt: it lies outside of the window and is copied through the staging
  /// buffer.
  std::optional<MemoryRegistration> registration;
  Transport* transport = nullptr;
};

/// The protocol, chunk by chunk. A rank tells its peers where its chunk lies (its own buffer for all chunks
/// at once, or a slot of its staging buffer that it has filled), works on the chunk once all have told, and
/// tells them when it will not read theirs again. Only these control messages travel as messages, so waiting,
/// time-outs and failures are those of every other operation.
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
  /// Reading a peer's memory; ends with the object. Null when the peer has deregistered it, having failed.
  class PeerMapping {
   public:
    PeerMapping(Transport& transport, int rank, const MemoryRegistration& registration);
    ~PeerMapping();
    PeerMapping(PeerMapping&& other) noexcept;
    PeerMapping(const PeerMapping&) = delete;
    PeerMapping& operator=(const PeerMapping&) = delete;
    const unsigned char* data() const { return data_; }

   private:
    Transport* transport_;
    int rank_;
    MemoryRegistration registration_;
    const unsigned char* data_;
  };

  /// Copies what peers read of a chunk into a slot.
  virtual void fill(std::int64_t chunk, unsigned char* slot) = 0;
  enum class Progress { waits, moved, done };
  /// A bounded piece of the work on a chunk.
  virtual Progress work(std::int64_t chunk) = 0;
  /// Prepares a chunk for work(), while earlier chunks are still being worked on.
  virtual Progress stage(std::int64_t) { return Progress::done; }
  /// True when every chunk needs a slot, even where peers read this rank's buffer itself.
  virtual bool needs_slot() const { return false; }
  /// True when peers read more of the slot, so that it is kept until they have done.
  virtual bool reads_slots() const { return false; }
  /// True when a second control message (see announce_ready) of every rank belongs to each chunk.
  virtual bool two_phases() const { return false; }

  std::int64_t elements_of(std::int64_t chunk) const;
  std::int64_t first_of(std::int64_t chunk) const { return chunk * call_.chunk; }
  int ranks() const { return static_cast<int>(call_.members.size()); }
  /// A member's memory of a chunk. `direct`, `packed`: bytes before the wanted place in its buffer, in a
  /// slot.
  PeerMapping map_chunk(int member, std::int64_t chunk, std::int64_t direct, std::int64_t packed) const;
  unsigned char* own(std::int64_t chunk, std::int64_t direct, std::int64_t packed) const;
  /// The slot of a chunk that is staged or at work.
  unsigned char* slot_of(std::int64_t chunk) const;
  /// A peer's slot, once it is ready.
  PeerMapping map_slot(int member, std::int64_t chunk, std::int64_t offset) const;
  void announce_ready(std::int64_t chunk);
  bool ready(int member, std::int64_t chunk) const {
    return peers_[static_cast<std::size_t>(member)].ready > chunk;
  }
  const WindowCall& call() const { return call_; }
  Transport& transport() const { return *call_.transport; }
  /// Members of which nothing has been heard yet.
  std::vector<int> silent_peers() const;

 private:
  enum class Kind : std::int64_t { published, ready, done };
  struct ControlMessage {
    Kind kind = Kind::published;
    std::int64_t chunk = 0;  ///< -1: all
    std::int64_t bytes = 0;  ///< of the call; differs when the ranks' calls do
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
    std::array<MemoryRegistration, 2> places;  ///< by chunk mod 2; [0] when direct
    std::array<MemoryRegistration, 2> slots;   ///< of ready(), by chunk mod 2
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
  std::vector<Peer> peers_;  ///< by member; the own one unused
  std::int64_t chunks_ = 0, published_ = 0, staged_ = 0, worked_ = 0;
  std::deque<Slot> slots_;
  bool deregistered_ = false;
};

/// Bytes moved in one go, so that other operations get their turn: below a millisecond.
inline constexpr std::int64_t quantum_bytes = std::int64_t{4} << 20;

/// From here on (bytes that a rank gets of all others together) calls are made by reading. Where all ranks
/// share a node reading is the quicker from there on with two ranks on two cores, and at half of it neither
/// for certain; with four ranks on two cores sums of up to 64 KiB would be a little quicker by messages
/// (bench/results/archive/2026-11-22-collectives-waiters.md). Over several nodes a rougher figure, with fp32
/// sums in view.
inline constexpr std::int64_t least_bytes_on_one_node = 4 << 10;
inline constexpr std::int64_t least_summed_bytes = 64 << 10, least_gathered_bytes = 64 << 10;
/// True when a call of that size goes by memory that ranks read of each other, where they can.
constexpr bool goes_by_window(NodeCollectives collectives, std::int64_t bytes, std::int64_t least) {
  if (bytes == 0 || collectives == NodeCollectives::messages) return false;
  return collectives == NodeCollectives::shared || bytes >= least;
}

}  // namespace tranche::comm
