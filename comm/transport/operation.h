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
  std::int64_t bytes = 0;  ///< that this rank receives from all others
  std::vector<Event> ready;
  std::shared_ptr<HostEvent> done;
  /// The operation has few bytes and waits only for peers, so the issuing thread may carry it out.
  bool eager = false;
};

/// "reduce_scatter of unit h.3 in backward"
std::string describe(std::string_view name, std::string_view unit, std::string_view phase);

/// An operation in flight on one rank. The progress engine moves it through these states:
///
///     waiting --all ready events passed, start()--> exchanging --advance() until finished()--> done event
///     any state --failure or abandon()--> the done event carries the error
class Operation {
 public:
  explicit Operation(OperationInfo info) : info_(std::move(info)) {}
  virtual ~Operation() = default;
  /// Called once, when every ready event has passed.
  virtual void start() {}
  /// Makes as much progress as possible; returns whether anything moved.
  virtual bool advance(Transport& transport, StagingBuffer& staging) = 0;
  virtual bool finished() const = 0;
  virtual PendingPeers pending_peers() const = 0;
  virtual bool uses_staging() const { return false; }
  /// Releases messages and slots.
  virtual void abandon(StagingBuffer&) {}
  /// True while it waits for a slot of the staging buffer, and so for this rank, not for its peers.
  virtual bool waits_for_staging() const { return false; }

  const OperationInfo& info() const { return info_; }
  std::string describe() const { return comm::describe(info_.name, info_.unit, info_.phase); }

  // The state, set by the progress engine.
  enum class State { waiting, exchanging };
  State state = State::waiting;
  std::uint64_t order = 0;      ///< place in this rank's sequence of all operations
  double not_before = 0;        ///< an injected delay
  double begin = 0;             ///< when the exchange started
  double last_move = 0;         ///< the time-out counts from here
  bool signature_sent = false;  ///< the awaited peers have received this call's signature
  std::size_t ready_seen = 0;   ///< the number of ready events that have passed

 private:
  OperationInfo info_;
};

}  // namespace tranche::comm
