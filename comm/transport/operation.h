#pragma once
/// Operations as state machines over a transport: none of their functions blocks. Private to comm/.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/node/staging_buffer.h"
#include "comm/transport/pending_peers.h"
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

/// An operation under way on one rank.
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

}  // namespace tranche::comm
