#pragma once
/// How a message to another node is cut. Private to comm/.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tranche::comm {

/// MPI sends a small message at once. For a large one it asks the receiver first, and the answer waits behind
/// what the other node sends. Nothing moves in this direction meanwhile: over a link of 50 Mbit/s that was a
/// third of the time. So a message is cut in pieces below the limit of Open MPI's TCP (64 KiB with its
/// header). Shards are multiples of other sizes, so that messages of different sizes differ in their first
/// piece, which is how their receiver notices.
inline constexpr std::int64_t piece_bytes = 64 * 959;
/// A receiver that is late keeps what was sent unasked in MPI's own memory, so this is bounded: a message has
/// so many small pieces, behind one piece that MPI asks for while the small ones travel.
inline constexpr std::int64_t most_small_pieces = 16;

/// Bytes of the pieces in the order in which both sides post them.
inline std::vector<std::int64_t> message_pieces(std::int64_t bytes) {
  const std::int64_t small = std::min(most_small_pieces, std::max<std::int64_t>(bytes - 1, 0) / piece_bytes);
  std::vector<std::int64_t> pieces(static_cast<std::size_t>(small + 1), piece_bytes);
  pieces.front() = bytes - small * piece_bytes;
  return pieces;
}

}  // namespace tranche::comm
