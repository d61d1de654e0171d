#pragma once
/// Operations as state machines over a Transport: none of their functions blocks.

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/node/staging_buffer.h"
#include "comm/transport/transport.h"
#include "tranche/comm/communicator.h"

namespace tranche::comm {

/// The properties that all operations have in common.
struct OperationInfo {
  std::string_view name;  ///< a literal
  std::string unit, phase;
  Tag tag;
  std::int64_t bytes = 0;  ///< that this rank gets of all others
  std::vector<Event> ready;
  std::shared_ptr<HostEvent> done;
  /// Few bytes, and nothing to wait for but peers: may be done by the thread that issues it.
  bool eager = false;
};

/// "reduce_scatter of unit h.3 in backward"
std::string describe(std::string_view name, std::string_view unit, std::string_view phase);

/// Whom an operation waits for.
struct PendingPeers {
  std::vector<int> ranks;  ///< of the job
  bool sending = false;    ///< they have not taken our data (everything of theirs has arrived)
  bool indirect = false;   ///< they may be there, and wait for others themselves
};

/// The sentence of a time-out: "<what>: no data from rank 2 after 0.2 s (rank 2 has not entered ...)".
std::string timeout_message(const std::string& what, const PendingPeers& pending, double seconds);

class Operation {
 public:
  explicit Operation(OperationInfo info) : info_(std::move(info)) {}
  virtual ~Operation() = default;
  /// Called once, when every ready event has passed.
  virtual void start() {}
  /// Moves as far as it can; returns whether anything moved.
  virtual bool advance(Transport& transport, StagingBuffer& staging) = 0;
  virtual bool finished() const = 0;
  virtual PendingPeers pending_peers() const = 0;
  virtual bool uses_staging() const { return false; }
  /// Gives up messages and slots.
  virtual void abandon(StagingBuffer&) {}
  /// True while it waits for a slot of the staging buffer and so for this rank, not for its peers.
  virtual bool waits_for_staging() const { return false; }

  const OperationInfo& info() const { return info_; }
  std::string describe() const { return comm::describe(info_.name, info_.unit, info_.phase); }

  // The progress engine's state of it.
  enum class State { waiting, exchanging };
  State state = State::waiting;
  std::uint64_t order = 0;      ///< place in this rank's sequence of all operations
  double not_before = 0;        ///< injected delay
  double begin = 0;             ///< when the exchange started
  double last_move = 0;         ///< the time-out counts from here
  bool signature_sent = false;  ///< peers that it waits for know which call it is
  std::size_t ready_seen = 0;   ///< ready events that have passed

 private:
  OperationInfo info_;
};

/// One direction of one pair: bytes cut in messages, a few of them under way at once, in order.
class Flow {
 public:
  Flow(bool sending, int peer, void* data, std::int64_t bytes, std::int64_t message_bytes, const Tag& tag);
  Flow(Flow&&) = default;
  Flow& operator=(Flow&&) = default;
  Flow(const Flow&) = delete;
  Flow& operator=(const Flow&) = delete;
  bool advance(Transport& transport);
  bool finished() const { return completed_ == messages_; }
  /// Messages that have gone, from the first on.
  std::int64_t completed() const { return completed_; }
  int peer() const { return peer_; }
  void abandon() { window_.clear(); }

 private:
  bool sending_;
  int peer_;
  unsigned char* data_;
  std::int64_t bytes_, message_bytes_, messages_;
  Tag tag_;
  std::int64_t posted_ = 0, completed_ = 0;
  std::deque<std::unique_ptr<Message>> window_;
};

/// Everything that only moves bytes: gathers, broadcasts, all-to-all, send, recv, barriers.
class DirectOperation : public Operation {
 public:
  /// `local` is this rank's own copy, made first.
  DirectOperation(OperationInfo info, std::function<void()> local, std::vector<Flow> sends,
                  std::vector<Flow> receives);
  void start() override;
  bool advance(Transport& transport, StagingBuffer& staging) override;
  bool finished() const override;
  PendingPeers pending_peers() const override;
  void abandon(StagingBuffer& staging) override;

 private:
  std::function<void()> local_;
  std::vector<Flow> sends_, receives_;
};

/// The data that a reduction exchanges, and its order of summation.
struct Reduction {
  std::vector<int> members;         ///< job ranks of the group, in group order
  int self = 0;                     ///< index in members
  std::vector<const void*> pieces;  ///< what goes to each member; [self] stays here
  std::int64_t count = 0;           ///< elements of a piece
  std::int64_t chunk = 0;           ///< elements exchanged at once
  DataType dtype = DataType::float32;
  /// The result overwrites what is sent, so a chunk must have left before it is summed.
  bool in_place = false;
  std::int64_t scratch_bytes = 0;  ///< > 0: small enough for a buffer of its own; chunk must be >= count
  /// pieces[member] holds elements [first, first + count).
  std::function<void(std::span<const void* const> pieces, std::int64_t first, std::int64_t count,
                     DataType dtype)>
      combine;
};

/// Pairwise exchange of pieces and a sum of each chunk once all of it is here.
class ReduceExchange : public Operation {
 public:
  ReduceExchange(OperationInfo info, Reduction reduction);
  bool advance(Transport& transport, StagingBuffer& staging) override;
  bool finished() const override { return summed_ == chunks_ && sent(); }
  PendingPeers pending_peers() const override;
  bool uses_staging() const override;
  void abandon(StagingBuffer& staging) override;
  bool waits_for_staging() const override;

 private:
  struct Arrival {
    std::int64_t chunk = 0;
    int slot = -1;
    unsigned char* data = nullptr;
    std::vector<std::unique_ptr<Message>> messages;  ///< by member; null once arrived
    bool arrived = false;
  };
  bool sent() const;
  bool post(Transport& transport, StagingBuffer& staging);
  void sum(const Arrival& arrival);
  std::int64_t elements_of(std::int64_t chunk) const;

  Reduction reduction_;
  std::int64_t chunks_ = 0, posted_ = 0, summed_ = 0;
  std::vector<Flow> sends_;
  std::deque<Arrival> arrivals_;
  std::vector<unsigned char> scratch_;
};

}  // namespace tranche::comm
