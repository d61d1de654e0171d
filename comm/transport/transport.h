#pragma once
/// The interface of a communicator to the network: nonblocking messages and reports of failure. Private to
/// comm/.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "comm/peer_failure.h"
#include "comm/rank_names.h"
#include "comm/transport/message.h"
#include "tranche/core/error.h"
#include "tranche/device/event.h"

namespace tranche::comm {

/// A failed rank's message to its peers.
struct FailureReport {
  int rank = 0;  ///< the rank of the origin, which need not be the sender
  std::string cause;
  ExitStatus status = ExitStatus::communication;  ///< exit status of the cause
  /// An exception is unwinding on that rank and its text is not known yet: another report follows.
  bool cause_follows = false;
  /// The rank has not failed but ended, while a peer waits in a call that it will never issue.
  bool ended = false;
};

/// Memory of a rank that its peers on the node may read, in the form that the rank sends to them.
struct MemoryRegistration {
  std::int64_t allocation = 0, bytes = 0, offset = 0;  ///< their meaning is the transport's
};

struct CallSignature;

/// The answer of an ended rank to a peer that reports a call: nullopt if it has issued that call too, else
/// the report that ends the peer's wait.
using Farewell = std::function<std::optional<FailureReport>(const CallSignature&)>;

/// All calls except register_memory() come from one thread at a time: the communication thread, or the caller
/// with inline progress.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string_view backend() const = 0;
  /// Ranks with equal numbers share a node.
  virtual int node_of(int rank) const = 0;
  /// True when this rank and `peer` can read each other's memory; agreed on when the transport was made.
  virtual bool reads(int) const { return false; }
  /// The reason why reads() is false for ranks of one node; empty when it is true. A transport whose ranks
  /// share a node but that leaves reads() false must override this too, because an empty text lets
  /// collectives read peers' memory.
  virtual std::string window_obstacle() const { return {}; }
  /// Registers memory of this rank for its peers; nullopt when they cannot read it. From any thread.
  virtual std::optional<MemoryRegistration> register_memory(const void*, std::int64_t) {
    return std::nullopt;
  }
  /// Ends a registration: once this has returned, peers do not read the memory, or read only zeros.
  virtual void deregister_memory(const MemoryRegistration&) noexcept {}
  /// The address of a peer's registered memory, valid until unmap_peer(); null when it was deregistered
  /// because the peer has failed.
  virtual const void* map_peer(int, const MemoryRegistration&) { return nullptr; }
  virtual void unmap_peer(int, const MemoryRegistration&) noexcept {}
  /// Notified whenever a rank of this node has sent something, and by notify(); null when the transport has
  /// none.
  virtual std::shared_ptr<WakeEvent> wake_event() { return nullptr; }
  virtual void notify() noexcept {}
  virtual std::unique_ptr<Message> send(const void* data, std::int64_t bytes, int peer, const Tag& tag) = 0;
  virtual std::unique_ptr<Message> receive(void* data, std::int64_t bytes, int peer, const Tag& tag) = 0;
  /// The first failure that a peer has reported; a report whose cause follows is replaced by the next.
  virtual std::optional<FailureReport> poll_failure() = 0;
  /// Starts sending the report to every peer; returns true once it has been sent, false if it must be called
  /// again. The report may be another rank's, whose failure ended this one. Only the first report whose cause
  /// follows is sent, and the first of the others.
  virtual bool post_failure(const FailureReport& report) = 0;
  /// Sends a peer the signature of this rank's call, and returns those that peers sent; see call_signature.h.
  /// Called seldom, only when an operation waits for long.
  virtual void send_signature(const CallSignature&, int) {}
  virtual bool poll_signature(CallSignature&) { return false; }
  /// True when nothing wakes the communication thread on arrival, so that it must poll.
  virtual bool needs_polling() const = 0;
  /// Ends the job, if the transport can.
  virtual void abort_job(int status) noexcept = 0;
  /// Called once, last. `clean` means that nothing failed and nothing was abandoned; then it may wait for
  /// peers, for `seconds` at most, and peers that ask are answered by farewell().
  virtual void close(bool clean, double seconds) noexcept = 0;
  /// The names of the job's ranks for error texts, set before the first message.
  const RankNames& rank_names() const { return rank_names_; }
  void set_rank_names(RankNames names) { rank_names_ = std::move(names); }
  /// Set before close(); empty until then.
  const Farewell& farewell() const { return farewell_; }
  void set_farewell(Farewell farewell) { farewell_ = std::move(farewell); }

 private:
  Farewell farewell_;
  RankNames rank_names_;
};

/// The largest message; longer transfers are divided. It also keeps counts within MPI's int.
inline constexpr std::int64_t largest_message_bytes = std::int64_t{16} << 20;

}  // namespace tranche::comm
