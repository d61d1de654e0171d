#pragma once
/// Control messages between two ranks of a node, through mailboxes in their windows. Private to comm/.

#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "comm/node/control_segment.h"

namespace tranche::comm {

/// One pair of ranks. What is told lies in the other's memory at once, without a call of the system unless
/// that rank sleeps; polling it reads one cache line. A poll of MPI gives the core away (Open
/// MPI yields when ranks are more than cores), and an exchange polls each of its peers.
/// All calls come from the thread that owns the transport.
class ControlChannel {
 public:
  /// `out`: in the memory of `peer`, whose segment is notified; `in`: in the own one.
  ControlChannel(int self, int peer, Mailbox& out, ControlSegment& segment, Mailbox& in)
      : self_(self), peer_(peer), out_(&out), segment_(&segment), in_(&in) {}

  /// At most Mailbox::max_bytes bytes, copied. Messages may outlive neither this object nor its memory.
  std::unique_ptr<Message> send(const void* data, std::int64_t bytes, const Tag& tag);
  /// Throws CommunicationError from test() when the control message has another size.
  std::unique_ptr<Message> receive(void* data, std::int64_t bytes, const Tag& tag);

 private:
  class Sending;
  class Receiving;
  void flush();
  bool take(void* data, std::int64_t bytes, const Tag& tag);

  int self_, peer_;
  Mailbox* out_;
  ControlSegment* segment_;
  Mailbox* in_;
  std::deque<Mailbox::Slot> waiting_;  ///< the ring was full
  std::uint64_t sent_ = 0;             ///< waiting ones included
  std::deque<Mailbox::Slot> arrived_;  ///< not asked for yet
};

}  // namespace tranche::comm
