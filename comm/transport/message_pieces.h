#pragma once
/// Divides a message to another node into pieces. Private to comm/.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tranche::comm {

/// MPI sends a small message at once. For a large one it asks the receiver first, and the answer waits behind
/// the data that the other node sends. Nothing moves in this direction meanwhile: on a link of 50 Mbit/s that
/// was a third of the time. So a message is divided into pieces below the limit of Open MPI's TCP (64 KiB
/// with its header). Shards are multiples of other sizes, so messages of different sizes differ in their
/// first piece, by which the receiver notices a mismatch.
inline constexpr std::int64_t piece_bytes = 64 * 959;
/// A late receiver buffers eager messages in MPI's own memory, so their number is limited: a message has so
/// many small pieces, after one large piece for which MPI asks while the small ones travel.
inline constexpr std::int64_t most_small_pieces = 16;

/// The sizes of the pieces, in the order in which both sides post them.
inline std::vector<std::int64_t> message_pieces(std::int64_t bytes) {
  const std::int64_t small = std::min(most_small_pieces, std::max<std::int64_t>(bytes - 1, 0) / piece_bytes);
  std::vector<std::int64_t> pieces(static_cast<std::size_t>(small + 1), piece_bytes);
  pieces.front() = bytes - small * piece_bytes;
  return pieces;
}

}  // namespace tranche::comm
