#pragma once
/// Small messages among the ranks of a node, through the memory of their windows. Private to comm/.

#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "comm/node/window_board.h"

namespace tranche::comm {

/// One pair of ranks. What is told lies in the other's memory at once, without a call of the system unless
/// that rank sleeps; looking for what has come reads one cache line. A look at MPI gives the core away (Open
/// MPI yields when ranks are more than cores), and an exchange looks for each of its peers.
/// All calls come from the thread that owns the transport.
class WindowNotes {
 public:
  /// `out`: in the memory of `peer`, whose board is rung; `in`: in the own one.
  WindowNotes(int self, int peer, NoteRing& out, WindowBoard& board, NoteRing& in)
      : self_(self), peer_(peer), out_(&out), board_(&board), in_(&in) {}

  /// At most NoteRing::largest bytes, copied. Messages may outlive neither this object nor its memory.
  std::unique_ptr<Message> send(const void* data, std::int64_t bytes, const Tag& tag);
  /// Throws CommunicationError from test() when the note has another size.
  std::unique_ptr<Message> receive(void* data, std::int64_t bytes, const Tag& tag);

 private:
  class Sending;
  class Receiving;
  void flush();
  bool take(void* data, std::int64_t bytes, const Tag& tag);

  int self_, peer_;
  NoteRing* out_;
  WindowBoard* board_;
  NoteRing* in_;
  std::deque<NoteRing::Slot> waiting_;  ///< the ring was full
  std::uint64_t sent_ = 0;              ///< waiting ones included
  std::deque<NoteRing::Slot> arrived_;  ///< not asked for yet
};

}  // namespace tranche::comm
