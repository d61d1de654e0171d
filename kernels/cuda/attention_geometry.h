#pragma once
/// Index arithmetic of the flash attention kernels: the tiles, which of them a causal mask leaves, and the
/// positions of a tile's elements in shared memory. These are plain functions, so that the host can test the
/// code that the device runs.

#include <cstdint>

#include "kernels/attention_operands.h"

namespace tranche::kernels::cuda {

constexpr std::int64_t tiles_of(std::int64_t elements, std::int64_t tile) {
  return (elements + tile - 1) / tile;
}

/// The distance between rows of a tile in shared memory, in elements. It is 16 bytes more than the row, so
/// that the 8 rows that ldmatrix reads at one position lie in 8 different groups of 4 banks. (XORing the
/// row's number into the position would avoid the 16 bytes, but then no address is a constant distance from
/// another, and registers are what these kernels lack.)
constexpr int tile_stride(int head) {
  return head + 8;
}
/// The position of 16-byte chunk `chunk` of row `row` in a tile of rows of `head` 16-bit elements, in
/// elements.
constexpr int place_in_tile(int row, int chunk, int head) {
  return row * tile_stride(head) + 8 * chunk;
}

/// The number of key tiles, among those that start below `time`, that queries [first, first + count) see.
constexpr int key_tiles_seen(int first, int count, int time, int keys) {
  const int end = count < time - first ? first + count : time;
  return (end + keys - 1) / keys;
}
/// The first query tile, counted from query `first_query` on, that sees keys from `first_key` on.
constexpr int first_query_tile(int first_key, int first_query, int queries) {
  return first_key > first_query ? (first_key - first_query) / queries : 0;
}
/// One past the last of `tiles` query tiles in which some query sees a key below end_key, from tile `first`
/// on; `first` if none does. The first key that a tile's first query sees never moves backwards from one tile
/// to the next.
constexpr int end_query_tile(const AttentionMask& mask, int first_query, int first, int tiles, int queries,
                             int end_key) {
  const auto sees = [&](int tile) {
    return mask.first(first_query + static_cast<std::int64_t>(tile) * queries) < end_key;
  };
  if (first >= tiles || !sees(first)) return first;
  int seeing = first, end = tiles;  // tile `seeing` sees the key, tile `end` does not
  while (end - seeing > 1) {
    const int middle = seeing + (end - seeing) / 2;
    if (sees(middle)) {
      seeing = middle;
    } else {
      end = middle;
    }
  }
  return end;
}
/// True if no query of [first_query, first_query + queries) sees a key from first_key on.
constexpr bool above_diagonal(int first_query, int queries, int first_key) {
  return first_key > first_query + queries - 1;
}
/// True if some query does not see some key, so that the tile must be masked.
constexpr bool crosses_diagonal(int first_query, int first_key, int keys) {
  return first_key + keys - 1 > first_query;
}
/// The block's query tile, in an order that starts tiles with more work first: queries at the end see most
/// keys.
constexpr int longest_first(int block, int tiles) {
  return tiles - 1 - block;
}

/// The shape of the kernels for one head size: the rows that a block owns, those it loops over, and how many
/// of its own a warp holds in registers. With 32 rows per warp each fragment of the other operand is used
/// twice, which saves shared memory bandwidth; if two fp32 accumulators of 32 rows do not fit in the
/// registers it is 16.
struct ForwardShape {
  int queries, keys, warps;
  constexpr int rows_per_warp() const { return queries / warps; }
  constexpr int threads() const { return 32 * warps; }
  constexpr int shared_bytes(int head) const { return 2 * tile_stride(head) * (queries + 2 * 2 * keys); }
};
inline constexpr ForwardShape forward_shape{128, 64, 4};

/// The gradient kernels own `own` queries (or keys) and loop over tiles of `other` keys (or queries). Two
/// tensors of each kind pass through shared memory; the looped-over ones have two buffers, so that loads
/// overlap with work.
struct BackwardShape {
  int own, other, warps;
  constexpr int rows_per_warp() const { return own / warps; }
  constexpr int threads() const { return 32 * warps; }
  constexpr int tile_bytes(int head) const { return 2 * tile_stride(head) * 2 * (own + 2 * other); }
};
constexpr BackwardShape backward_shape(int head) {
  return head == 64 ? BackwardShape{128, 64, 4} : BackwardShape{128, 64, 8};
}

/// The values that the kernel for queries' gradients stores for the one for keys and values: for each query
/// log_sum_exp in units of log(2) and dot(d_out, out). Rows of each head are padded to whole tiles with
/// {infinity, 0}, so that a missing query has probability 0.
struct alignas(8) QueryStatistics {
  float log2_sum_exp, projection;
};
constexpr std::int64_t padded_time(std::int64_t time) {
  constexpr std::int64_t tile = 128;
  return tiles_of(time, tile) * tile;
}
static_assert(backward_shape(64).own == 128 && backward_shape(128).own == 128);
/// The scratch that flash_backward needs for one (batch, head).
constexpr std::int64_t flash_scratch_bytes(std::int64_t time) {
  return padded_time(time) * static_cast<std::int64_t>(sizeof(QueryStatistics));
}
/// The number of (batch, head) pairs that flash_backward processes at once: whole groups of heads that share
/// a key.
constexpr std::int64_t flash_heads(std::int64_t time, std::int64_t group, std::int64_t workspace_bytes) {
  return workspace_bytes / (group * flash_scratch_bytes(time)) * group;
}

}  // namespace tranche::kernels::cuda
