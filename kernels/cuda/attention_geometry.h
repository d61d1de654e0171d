#pragma once
/// Index arithmetic of the flash attention kernels: which tiles there are, which of them a causal mask
/// leaves, and where a tile's elements lie in shared memory. Plain functions, so that the host tests what the
/// device runs.

#include <cstdint>

#include "kernels/attention_operands.h"

namespace tranche::kernels::cuda {

constexpr std::int64_t tiles_of(std::int64_t elements, std::int64_t tile) {
  return (elements + tile - 1) / tile;
}

/// Elements from a row of a tile in shared memory to the next. 16 bytes more than the row holds: so the 8
/// rows that ldmatrix reads at one place lie in 8 different groups of 4 banks. (Mixing the row's number into
/// the place does the same without the 16 bytes, but then no address is a constant away from another, and
/// registers are what these kernels lack.)
constexpr int tile_stride(int head) {
  return head + 8;
}
/// The position of 16-byte chunk `chunk` of row `row` in a tile of rows of `head` 16-bit elements, in
/// elements.
constexpr int place_in_tile(int row, int chunk, int head) {
  return row * tile_stride(head) + 8 * chunk;
}

/// Key tiles that queries [first, first + count) see, of those that start below `time`.
constexpr int key_tiles_seen(int first, int count, int time, int keys) {
  const int end = count < time - first ? first + count : time;
  return (end + keys - 1) / keys;
}
/// The first of the query tiles from query `first_query` on that sees keys from `first_key` on.
constexpr int first_query_tile(int first_key, int first_query, int queries) {
  return first_key > first_query ? (first_key - first_query) / queries : 0;
}
/// One past the last of `tiles` query tiles of which some query sees a key below end_key, from tile `first`
/// on; `first` where none does. What a tile's first query sees begins first, and never earlier than for the
/// tile before.
constexpr int end_query_tile(const AttentionMask& mask, int first_query, int first, int tiles, int queries,
                             int end_key) {
  const auto sees = [&](int tile) {
    return mask.first(first_query + static_cast<std::int64_t>(tile) * queries) < end_key;
  };
  if (first >= tiles || !sees(first)) return first;
  int seeing = first, end = tiles;  // the tile `seeing` does, and `end` does not
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
/// No query of [first_query, first_query + queries) sees a key from first_key on.
constexpr bool above_diagonal(int first_query, int queries, int first_key) {
  return first_key > first_query + queries - 1;
}
/// Some query does not see some key: the tile has to be masked.
constexpr bool crosses_diagonal(int first_query, int first_key, int keys) {
  return first_key + keys - 1 > first_query;
}
/// The block's query tile when tiles with more work have to start first: queries at the end see most keys.
constexpr int longest_first(int block, int tiles) {
  return tiles - 1 - block;
}

/// Shape of the kernels for one head size: what a block owns, what it loops over, and how many rows of its
/// own a warp holds in registers. 32 rows a warp use each fragment of the other operand twice, which shared
/// memory's bandwidth asks for; where two fp32 accumulators of 32 rows would not fit in the registers it
/// is 16.
struct ForwardShape {
  int queries, keys, warps;
  constexpr int rows_per_warp() const { return queries / warps; }
  constexpr int threads() const { return 32 * warps; }
  constexpr int shared_bytes(int head) const { return 2 * tile_stride(head) * (queries + 2 * 2 * keys); }
};
inline constexpr ForwardShape forward_shape{128, 64, 4};

/// The gradient kernels own `own` queries (or keys) and loop over tiles of `other` keys (or queries). Two
/// tensors of each kind pass through shared memory; those looped over twice, so that loads overlap with work.
struct BackwardShape {
  int own, other, warps;
  constexpr int rows_per_warp() const { return own / warps; }
  constexpr int threads() const { return 32 * warps; }
  constexpr int tile_bytes(int head) const { return 2 * tile_stride(head) * 2 * (own + 2 * other); }
};
constexpr BackwardShape backward_shape(int head) {
  return head == 64 ? BackwardShape{128, 64, 4} : BackwardShape{128, 64, 8};
}

/// The values that the gradient of the queries leaves for that of keys and values: for each query log_sum_exp
/// in units of log(2) and dot(d_out, out), rows of each head padded to whole tiles with {infinity, 0}, so
/// that a query that is not there has probability 0.
struct alignas(8) QueryStatistics {
  float log2_sum_exp, projection;
};
constexpr std::int64_t padded_time(std::int64_t time) {
  constexpr std::int64_t tile = 128;
  return tiles_of(time, tile) * tile;
}
static_assert(backward_shape(64).own == 128 && backward_shape(128).own == 128);
/// Scratch that flash_backward takes for one (batch, head).
constexpr std::int64_t flash_scratch_bytes(std::int64_t time) {
  return padded_time(time) * static_cast<std::int64_t>(sizeof(QueryStatistics));
}
/// (batch, head) that flash_backward takes at once: whole groups of heads that share a key.
constexpr std::int64_t flash_heads(std::int64_t time, std::int64_t group, std::int64_t workspace_bytes) {
  return workspace_bytes / (group * flash_scratch_bytes(time)) * group;
}

}  // namespace tranche::kernels::cuda
