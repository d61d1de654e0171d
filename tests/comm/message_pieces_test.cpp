// The division of messages to other nodes.
#include "comm/transport/message_pieces.h"

#include <gtest/gtest.h>

#include <numeric>

namespace tranche::comm {
namespace {

TEST(MessagePieces, AllBytesOnceAndFewUnasked) {
  for (const std::int64_t bytes :
       {std::int64_t{0}, std::int64_t{1}, piece_bytes - 1, piece_bytes, piece_bytes + 1, 4 * piece_bytes,
        most_small_pieces * piece_bytes, (most_small_pieces + 1) * piece_bytes,
        (most_small_pieces + 1) * piece_bytes + 1, std::int64_t{16} << 20}) {
    SCOPED_TRACE(bytes);
    const auto pieces = message_pieces(bytes);
    EXPECT_EQ(std::accumulate(pieces.begin(), pieces.end(), std::int64_t{0}), bytes);
    EXPECT_LE(static_cast<std::int64_t>(pieces.size()), most_small_pieces + 1);
    for (std::size_t i = 1; i < pieces.size(); ++i) EXPECT_EQ(pieces[i], piece_bytes);
    EXPECT_EQ(pieces.front() > 0, bytes > 0);
    EXPECT_EQ(pieces.front() <= piece_bytes, bytes <= (most_small_pieces + 1) * piece_bytes);
  }
  // A piece and Open MPI's header together stay within 64 KiB.
  EXPECT_LE(piece_bytes + 256, 64 << 10);
}

TEST(MessagePieces, SizesThatShardsHaveDifferInTheFirstPiece) {
  for (std::int64_t bytes = 512; bytes < 400 * 1024; bytes += 512) {
    EXPECT_NE(message_pieces(bytes).front(), message_pieces(2 * bytes).front()) << bytes;
  }
}

}  // namespace
}  // namespace tranche::comm
