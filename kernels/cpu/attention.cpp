#include "kernels/cpu/attention.h"

#include <algorithm>

#include "kernels/cpu/attention_bf16.h"
#include "kernels/cpu/attention_head.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/sgemm.h"
#include "kernels/cpu/tasks.h"
#include "tranche/core/shape.h"

namespace tranche::kernels::cpu {

namespace {

/// A row-major GEMM on dense fp32 tiles.
void gemm(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k, float alpha,
          const float* a, const float* b, float beta, float* c) {
  sgemm(
      {transpose_a, transpose_b, m, n, k, alpha, a, transpose_a ? m : k, b, transpose_b ? k : n, beta, c, n});
}

std::int64_t forward_floats(std::int64_t head_width) {
  return attention_queries * attention_keys + 2 * (attention_queries + attention_keys) * head_width;
}

void forward_head(const AttentionCall& call, const AttentionHead& head, float* scratch) {
  const std::int64_t width = head.width();
  float* scores = scratch;
  float* query = scores + attention_queries * attention_keys;
  float* accumulated = query + attention_queries * width;
  float* key = accumulated + attention_queries * width;
  float* value = key + attention_keys * width;
  float maximum[attention_queries], sum[attention_queries];
  for (std::int64_t q = call.first_query, queries = 0; q < call.end_query(); q += queries) {
    queries = head.queries(q);
    const std::int64_t first = head.first_key_tile(q);
    head.load(0, q, queries, query);
    for (std::int64_t k = first; k < q + queries; k += attention_keys) {
      const AttentionTile tile = head.tile(q, k);
      head.load(1, tile.first_key, tile.keys, key);
      head.load(2, tile.first_key, tile.keys, value);
      gemm(false, true, queries, tile.keys, width, head.scale(), query, key, 0.0f, scores);
      softmax_tile(tile, k == first, scores, maximum, sum, accumulated, width);
      gemm(false, false, queries, width, tile.keys, 1.0f, scores, value, k == first ? 0.0f : 1.0f,
           accumulated);
    }
    finish_softmax(queries, maximum, sum, accumulated, width, call.dtype,
                   element_at(call.dtype, call.out, head.row(q)), call.width(), head.log_sum_exp(q));
  }
}

/// The scratch of a task of backward. `d_query`, at the end, holds one tile, or all queries of all heads that
/// share a key and value.
struct BackwardScratch {
  float *scores, *d_scores, *query, *d_out, *key, *value, *d_key, *d_value, *d_query;

  BackwardScratch(float* at, std::int64_t width)
      : scores(at),
        d_scores(scores + attention_queries * attention_keys),
        query(d_scores + attention_queries * attention_keys),
        d_out(query + attention_queries * width),
        key(d_out + attention_queries * width),
        value(key + attention_keys * width),
        d_key(value + attention_keys * width),
        d_value(d_key + attention_keys * width),
        d_query(d_value + attention_keys * width) {}

  /// The number of floats without d_query.
  static std::int64_t floats(std::int64_t width) {
    return 2 * attention_queries * attention_keys + (2 * attention_queries + 4 * attention_keys) * width;
  }
};

/// Computes the scores and their gradient for one tile, from the query, d_out, key and value tiles in
/// scratch.
void backward_tile(const AttentionCall& call, const AttentionHead& head, const AttentionTile& tile,
                   const float* key, const float* value, const BackwardScratch& s) {
  const std::int64_t width = head.width();
  float projection[attention_queries];
  project_rows(tile.queries, width, s.d_out, call.dtype,
               element_at(call.dtype, call.out, head.row(tile.first_query)), call.width(), projection);
  gemm(false, true, tile.queries, tile.keys, width, head.scale(), s.query, key, 0.0f, s.scores);
  gemm(false, true, tile.queries, tile.keys, width, 1.0f, s.d_out, value, 0.0f, s.d_scores);
  softmax_backward_tile(tile, head.scale(), head.log_sum_exp(tile.first_query), projection, s.scores,
                        s.d_scores);
}

void load_query_tile(const AttentionCall& call, const AttentionHead& head, std::int64_t first,
                     const BackwardScratch& s) {
  const std::int64_t queries = head.queries(first);
  head.load(0, first, queries, s.query);
  widen_tile(call.dtype, element_at(call.dtype, call.d_out, head.row(first)), call.width(), queries,
             head.width(), s.d_out, head.width());
}

/// Computes the gradients of a tile of keys and values that heads [first_head, first_head + group) share,
/// over ascending heads and queries; with all_queries the gradient of the queries is also summed, over
/// ascending tiles of keys.
void backward_key_tile(const AttentionCall& call, std::int64_t first_head, std::int64_t k, bool all_queries,
                       const BackwardScratch& s) {
  const std::int64_t width = call.head_width;
  const AttentionHead shared(call, first_head);
  const std::int64_t tile_keys = std::min(attention_keys, call.time - k);
  shared.load(1, k, tile_keys, s.key);
  shared.load(2, k, tile_keys, s.value);
  std::fill_n(s.d_key, tile_keys * width, 0.0f);
  std::fill_n(s.d_value, tile_keys * width, 0.0f);
  for (std::int64_t g = 0; g < call.group(); ++g) {
    const AttentionHead head(call, first_head + g);
    for (std::int64_t q = std::max(k, call.first_query); q < call.end_query() && head.sees(q, k);
         q += head.queries(q)) {
      const AttentionTile tile = head.tile(q, k);
      const std::int64_t queries = tile.queries, keys = tile.keys, skipped = (tile.first_key - k) * width;
      load_query_tile(call, head, q, s);
      backward_tile(call, head, tile, s.key + skipped, s.value + skipped, s);
      gemm(true, false, keys, width, queries, 1.0f, s.scores, s.d_out, 1.0f, s.d_value + skipped);
      gemm(true, false, keys, width, queries, 1.0f, s.d_scores, s.query, 1.0f, s.d_key + skipped);
      if (all_queries) {
        gemm(false, false, queries, width, keys, 1.0f, s.d_scores, s.key + skipped,
             k == head.first_key_tile(q) ? 0.0f : 1.0f,
             s.d_query + (g * call.queries + q - call.first_query) * width);
      }
    }
  }
  shared.store_gradient(1, k, tile_keys, s.d_key);
  shared.store_gradient(2, k, tile_keys, s.d_value);
}

/// Computes the gradient of a tile of queries if the key tiles do not compute all of it: the tiles are
/// recomputed, with the same sums in the same order.
void backward_query_tile(const AttentionCall& call, const AttentionHead& head, std::int64_t q,
                         const BackwardScratch& s) {
  const std::int64_t width = head.width(), queries = head.queries(q), first = head.first_key_tile(q);
  load_query_tile(call, head, q, s);
  for (std::int64_t k = first; k < q + queries; k += attention_keys) {
    const AttentionTile tile = head.tile(q, k);
    head.load(1, tile.first_key, tile.keys, s.key);
    head.load(2, tile.first_key, tile.keys, s.value);
    backward_tile(call, head, tile, s.key, s.value, s);
    gemm(false, false, queries, width, tile.keys, 1.0f, s.d_scores, s.key, k == first ? 0.0f : 1.0f,
         s.d_query);
  }
  head.store_gradient(0, q, queries, s.d_query);
}

constexpr std::int64_t bytes_of(std::int64_t floats) {
  return floats * std::int64_t{sizeof(float)};
}

}  // namespace

std::int64_t attention_workspace_bytes(std::int64_t head_width) {
  // The size depends neither on the dtype nor on the CPU, so that a configuration needs the same everywhere.
  const std::int64_t in_bf16 = head_width % bf16_head_multiple == 0 ? bf16_backward_floats(head_width) : 0;
  const std::int64_t tiles = std::max(BackwardScratch::floats(head_width), in_bf16);
  return bytes_of(tiles + attention_queries * head_width);
}

void attention_forward(const AttentionCall& call) {
  if (call.time == 0 || call.width() == 0) return;
  const std::int64_t width = call.head_width;
  const bool in_bf16 = attention_runs_in_bf16(call.dtype, width);
  const std::int64_t tasks = std::min<std::int64_t>(call.threads, call.batch * call.heads);
  const std::int64_t whole = bf16_forward_floats(width, call.end_query());
  // A head's keys and values are packed once as a whole if they fit, else tile by tile; the bits are the
  // same.
  const bool keep_packed = in_bf16 && call.workspace.bytes / bytes_of(whole) >= tasks;
  const std::int64_t floats = !in_bf16      ? forward_floats(width)
                              : keep_packed ? whole
                                            : bf16_forward_floats(width, attention_keys);
  const std::int64_t space = call.workspace.bytes / bytes_of(floats);
  const int threads = static_cast<int>(std::min<std::int64_t>(call.threads, space));
  auto* scratch = static_cast<float*>(call.workspace.data);
  parallel_tasks(threads, call.batch * call.heads, [&](std::int64_t index, int slot) {
    const AttentionHead head(call, index);
    float* own = scratch + slot * floats;
    if (in_bf16) {
      bf16_forward_head(call, head, keep_packed, own);
    } else {
      forward_head(call, head, own);
    }
  });
}

namespace {

/// Runs the tasks of backward, which share no sums. `key_tile` is called with (scratch, first head, first
/// key, all_queries) and `query_tile` with (scratch, head, first query).
template <class KeyTile, class QueryTile>
void run_backward(const AttentionCall& call, std::int64_t tiles, const KeyTile& key_tile,
                  const QueryTile& query_tile) {
  const std::int64_t width = call.head_width, time = call.time, queries = call.queries;
  const std::int64_t shared = call.batch * call.key_value_heads, heads = call.batch * call.heads;
  auto* scratch = static_cast<float*>(call.workspace.data);
  const auto threads_with = [&](std::int64_t floats) {
    return std::min<std::int64_t>(call.threads, call.workspace.bytes / bytes_of(floats));
  };
  // One pass has a task for each key and value head. It is used when the query gradients of all heads that
  // share it fit beside the tiles for at least half the threads. Two passes have a task for each tile; they
  // take 7 GEMMs instead of 5, but occupy threads that would idle. The bits are the same.
  const std::int64_t whole = tiles + call.group() * queries * width,
                     parted = tiles + attention_queries * width;
  const std::int64_t least = std::max<std::int64_t>(1, std::min<std::int64_t>(call.threads, shared) / 2);
  if (threads_with(whole) >= least && threads_with(parted) < 2 * shared) {
    parallel_tasks(static_cast<int>(threads_with(whole)), shared, [&](std::int64_t index, int slot) {
      float* const own = scratch + slot * whole;
      const std::int64_t first_head = index * call.group();
      for (std::int64_t k = 0; k < time; k += attention_keys) key_tile(own, first_head, k, true);
      for (std::int64_t g = 0; g < call.group(); ++g) {
        AttentionHead(call, first_head + g)
            .store_gradient(0, call.first_query, queries, own + tiles + g * queries * width);
      }
    });
    return;
  }
  // The longest tasks start first: the first keys are seen by most queries, and the last queries see most
  // keys.
  const std::int64_t key_tiles = divide_round_up(time, attention_keys),
                     first_tile = call.first_query / attention_queries,
                     query_tiles = divide_round_up(call.end_query(), attention_queries) - first_tile;
  parallel_tasks(static_cast<int>(threads_with(parted)), shared * key_tiles + heads * query_tiles,
                 [&](std::int64_t index, int slot) {
                   float* const own = scratch + slot * parted;
                   if (index < shared * key_tiles) {
                     key_tile(own, index % shared * call.group(), index / shared * attention_keys, false);
                   } else {
                     index -= shared * key_tiles;
                     const std::int64_t tile = first_tile + query_tiles - 1 - index / heads;
                     query_tile(own, AttentionHead(call, index % heads),
                                std::max(tile * attention_queries, call.first_query));
                   }
                 });
}

}  // namespace

void attention_backward(const AttentionCall& call) {
  if (call.time == 0 || call.width() == 0) return;
  const std::int64_t width = call.head_width;
  if (attention_runs_in_bf16(call.dtype, width)) {
    run_backward(
        call, bf16_backward_floats(width),
        [&](float* own, std::int64_t first_head, std::int64_t k, bool all_queries) {
          bf16_backward_key_tile(call, first_head, k, all_queries, own);
        },
        [&](float* own, const AttentionHead& head, std::int64_t q) {
          bf16_backward_query_tile(call, head, q, own);
        });
    return;
  }
  run_backward(
      call, BackwardScratch::floats(width),
      [&](float* own, std::int64_t first_head, std::int64_t k, bool all_queries) {
        backward_key_tile(call, first_head, k, all_queries, BackwardScratch(own, width));
      },
      [&](float* own, const AttentionHead& head, std::int64_t q) {
        backward_query_tile(call, head, q, BackwardScratch(own, width));
      });
}

}  // namespace tranche::kernels::cpu
