// The index arithmetic of attention on GPUs, as the kernels use it.

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <vector>

#include "kernels/cuda/attention.h"
#include "tranche/kernels/attention.h"

namespace tranche::kernels::cuda {
namespace {

TEST(AttentionGeometry, PlacesInATileAreApartAndFreeOfBankConflicts) {
  for (int head : {64, 128}) {
    std::set<int> places;
    for (int row = 0; row < 64; ++row) {
      for (int chunk = 0; chunk < head / 8; ++chunk) {
        const int place = place_in_tile(row, chunk, head);
        EXPECT_EQ(place * 2 % 16, 0);
        EXPECT_LE(place + 8, tile_stride(head) * (row + 1));
        EXPECT_TRUE(places.insert(place).second);
      }
    }
    // ldmatrix reads 8 rows of one chunk, which must be in 8 different groups of 4 banks.
    for (int row = 0; row < 64; row += 8) {
      for (int chunk = 0; chunk < head / 8; ++chunk) {
        std::set<int> banks;
        for (int i = 0; i < 8; ++i) banks.insert(place_in_tile(row + i, chunk, head) * 2 / 16 % 8);
        EXPECT_EQ(banks.size(), 8u) << head << " " << row << " " << chunk;
      }
    }
  }
}

TEST(AttentionGeometry, EveryVisiblePairIsInATileThatIsVisited) {
  constexpr int queries = forward_shape.queries, keys = forward_shape.keys;
  for (int time : {1, 2, 63, 64, 65, 127, 128, 129, 200, 1000}) {
    const int tiles = static_cast<int>(tiles_of(time, queries));
    for (int tile = 0; tile < tiles; ++tile) {
      const int first = tile * queries, seen = key_tiles_seen(first, queries, time, keys);
      const int last_query = std::min(first + queries, time) - 1;
      EXPECT_GT(seen * keys, last_query);        // a tile contains the last query's own key
      EXPECT_LE((seen - 1) * keys, last_query);  // and no tile is unnecessary
      EXPECT_FALSE(above_diagonal(first, queries, (seen - 1) * keys));
    }
    for (int key_tile = 0; key_tile < tiles_of(time, 128); ++key_tile) {
      const int first = first_query_tile(key_tile * 128, 0, 64);
      EXPECT_LE(first * 64, key_tile * 128);        // every query that sees the first key is included
      EXPECT_GT((first + 1) * 64, key_tile * 128);  // and no query in an earlier tile sees it
    }
  }
}

TEST(AttentionGeometry, MasksAreAskedForWhereATileCrossesTheDiagonal) {
  for (int query = 0; query < 200; query += 16) {
    for (int key = 0; key < 200; key += 8) {
      bool all_hidden = true, some_hidden = false;
      for (int q = query; q < query + 16; ++q) {
        for (int k = key; k < key + 8; ++k) {
          all_hidden = all_hidden && k > q;
          some_hidden = some_hidden || k > q;
        }
      }
      EXPECT_EQ(above_diagonal(query, 16, key), all_hidden) << query << " " << key;
      EXPECT_EQ(crosses_diagonal(query, key, 8), some_hidden) << query << " " << key;
    }
  }
}

TEST(AttentionGeometry, QueryTilesEndWithTheLastThatSeesAKey) {
  for (int time : {1, 64, 65, 300, 1000}) {
    std::vector<std::int32_t> begins;
    for (int t = 0; t < time; ++t) begins.push_back(t / 97 * 97);
    for (const AttentionMask& mask : {AttentionMask{}, AttentionMask{1, nullptr}, AttentionMask{150, nullptr},
                                      AttentionMask{0, begins.data()}, AttentionMask{40, begins.data()}}) {
      for (const int query : {0, 40, 200, 700}) {
        if (query >= time) continue;
        const int tiles = static_cast<int>(tiles_of(time - query, 64));
        for (int first_key = 0; first_key < time; first_key += 128) {
          const int first = first_query_tile(first_key, query, 64), end_key = first_key + 128;
          EXPECT_TRUE(first == 0 || query + first * 64 <= first_key);
          EXPECT_GT(query + (first + 1) * 64, first_key);
          int wanted = first;
          while (wanted < tiles && mask.first(query + wanted * 64) < end_key) ++wanted;
          EXPECT_EQ(end_query_tile(mask, query, first, tiles, 64, end_key), wanted)
              << time << " " << first_key << " " << query;
        }
      }
      for (int t = 0; t < time; ++t) {
        EXPECT_GE(mask.first(t), t > 0 ? mask.first(t - 1) : 0);
        EXPECT_LE(mask.first(t), t);
      }
    }
  }
}

TEST(AttentionGeometry, LongTilesStartFirst) {
  for (int tiles : {1, 2, 7}) {
    for (int block = 1; block < tiles; ++block) {
      EXPECT_LT(longest_first(block, tiles), longest_first(block - 1, tiles));
    }
    EXPECT_EQ(longest_first(tiles - 1, tiles), 0);
  }
}

TEST(AttentionGeometry, BlocksFitTheSharedMemoryOfEveryArchitectureBuiltFor) {
  constexpr int ampere = 163 * 1024, hopper = 227 * 1024, reserved = 1024;
  for (int head : {64, 128}) {
    EXPECT_LE(forward_shape.shared_bytes(head), ampere);
    EXPECT_LE(2 * (forward_shape.shared_bytes(head) + reserved), hopper + reserved) << "two blocks at once";
    EXPECT_LE(backward_shape(head).tile_bytes(head) + 2048, ampere);
    EXPECT_EQ(backward_shape(head).rows_per_warp() % 16, 0);
  }
}

TEST(AttentionPaths, AreChosenByDtypeHeadDropoutAndAlignment) {
  constexpr auto bf16 = DataType::bfloat16, fp16 = DataType::float16, fp32 = DataType::float32;
  for (DataType dtype : {bf16, fp16}) {
    for (std::int64_t head : {64, 128}) {
      EXPECT_EQ(choose_attention(dtype, head, false, true), AttentionPath::flash);
      EXPECT_EQ(choose_attention(dtype, head, true, true), AttentionPath::gemm);
      EXPECT_EQ(choose_attention(dtype, head, false, false), AttentionPath::gemm);
    }
    for (std::int64_t head : {1, 32, 63, 65, 80, 256}) {
      EXPECT_EQ(choose_attention(dtype, head, false, true), AttentionPath::gemm);
    }
  }
  EXPECT_EQ(choose_attention(fp32, 64, false, true), AttentionPath::gemm);
}

TEST(AttentionPaths, ChunksFillTheWorkspaceAndNoMore) {
  for (std::int64_t time : {1, 5, 8, 100, 257, 4096}) {
    for (int copies : {1, 2}) {
      for (std::int64_t bytes :
           {attention_workspace_bytes(64, time), std::int64_t{100000}, std::int64_t{8} << 20}) {
        if (bytes < attention_workspace_bytes(64, time)) continue;
        const ScoreChunk rows = query_chunk(3, time, time, bytes, copies);
        EXPECT_GE(rows.rows, 1);
        EXPECT_LE(rows.rows, time);
        EXPECT_GE(rows.heads, 1);
        EXPECT_LE(rows.heads, 3);
        EXPECT_GE(rows.stride, time);
        EXPECT_LE(rows.elements() * copies * 4, bytes);
        for (std::int64_t more : {0, 64}) {
          const ScoreChunk columns = key_chunk(time, bytes, copies, more);
          EXPECT_GE(columns.stride, 1);
          EXPECT_LE((time + more) * columns.stride * copies * 4, bytes);
        }
      }
    }
  }
}

}  // namespace
}  // namespace tranche::kernels::cuda
