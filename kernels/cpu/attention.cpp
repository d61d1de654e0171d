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

/// Row-major GEMM on dense fp32 tiles.
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
  for (std::int64_t q = 0; q < call.time; q += attention_queries) {
    const std::int64_t queries = head.queries(q), first = head.first_key_tile(q);
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

/// Scratch of backward for the heads that share one key and value. `d_query` holds all queries of each head
/// when they fit, else one tile.
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

  /// Without d_query.
  static std::int64_t floats(std::int64_t width) {
    return 2 * attention_queries * attention_keys + (2 * attention_queries + 4 * attention_keys) * width;
  }
};

/// Scores and their gradient for one tile, from the query, d_out, key and value tiles in scratch.
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

/// Gradients of the keys and values that heads [first_head, first_head + group) share, tile of keys by tile
/// of keys over ascending heads and queries; with all_queries the gradient of the queries is summed beside
/// them, over ascending keys.
void backward_keys(const AttentionCall& call, std::int64_t first_head, bool all_queries,
                   const BackwardScratch& s) {
  const std::int64_t width = call.head_width, time = call.time;
  const AttentionHead shared(call, first_head);
  for (std::int64_t k = 0; k < time; k += attention_keys) {
    const std::int64_t tile_keys = std::min(attention_keys, time - k);
    shared.load(1, k, tile_keys, s.key);
    shared.load(2, k, tile_keys, s.value);
    std::fill_n(s.d_key, tile_keys * width, 0.0f);
    std::fill_n(s.d_value, tile_keys * width, 0.0f);
    for (std::int64_t g = 0; g < call.group(); ++g) {
      const AttentionHead head(call, first_head + g);
      for (std::int64_t q = k; q < time && head.sees(q, k); q += attention_queries) {
        const AttentionTile tile = head.tile(q, k);
        const std::int64_t queries = tile.queries, keys = tile.keys, skipped = (tile.first_key - k) * width;
        load_query_tile(call, head, q, s);
        backward_tile(call, head, tile, s.key + skipped, s.value + skipped, s);
        gemm(true, false, keys, width, queries, 1.0f, s.scores, s.d_out, 1.0f, s.d_value + skipped);
        gemm(true, false, keys, width, queries, 1.0f, s.d_scores, s.query, 1.0f, s.d_key + skipped);
        if (all_queries) {
          gemm(false, false, queries, width, keys, 1.0f, s.d_scores, s.key + skipped,
               k == head.first_key_tile(q) ? 0.0f : 1.0f, s.d_query + (g * time + q) * width);
        }
      }
    }
    shared.store_gradient(1, k, tile_keys, s.d_key);
    shared.store_gradient(2, k, tile_keys, s.d_value);
  }
  for (std::int64_t g = 0; all_queries && g < call.group(); ++g) {
    AttentionHead(call, first_head + g).store_gradient(0, 0, time, s.d_query + g * time * width);
  }
}

/// The gradient of the queries where all of it does not fit: the tiles once more, the same sums in the same
/// order.
void backward_queries(const AttentionCall& call, const AttentionHead& head, const BackwardScratch& s) {
  const std::int64_t width = head.width();
  for (std::int64_t q = 0; q < call.time; q += attention_queries) {
    const std::int64_t queries = head.queries(q), first = head.first_key_tile(q);
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
  const std::int64_t whole = bf16_forward_floats(width, call.time);
  // The whole head's keys and values are packed once where they fit, else tile by tile: the same bits.
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

void attention_backward(const AttentionCall& call) {
  if (call.time == 0 || call.width() == 0) return;
  const std::int64_t width = call.head_width;
  const bool in_bf16 = attention_runs_in_bf16(call.dtype, width);
  const std::int64_t tiles = in_bf16 ? bf16_backward_floats(width) : BackwardScratch::floats(width);
  // One pass when the query gradients of all heads that share a key fit beside the tiles for half the threads
  // or more (two passes take 7 GEMMs instead of 5); the same bits either way.
  const std::int64_t whole = tiles + call.group() * call.time * width;
  const std::int64_t shared = call.batch * call.key_value_heads;
  const std::int64_t tasks = std::min<std::int64_t>(call.threads, shared);
  const bool one_pass = call.workspace.bytes / bytes_of(whole) >= std::max<std::int64_t>(1, tasks / 2);
  const std::int64_t floats = one_pass ? whole : tiles + attention_queries * width;
  const std::int64_t space = call.workspace.bytes / bytes_of(floats);
  const int threads = static_cast<int>(std::min<std::int64_t>(call.threads, space));
  auto* scratch = static_cast<float*>(call.workspace.data);
  parallel_tasks(threads, shared, [&](std::int64_t index, int slot) {
    const std::int64_t first_head = index * call.group();
    float* at = scratch + slot * floats;
    if (in_bf16) return bf16_backward_heads(call, first_head, one_pass, at);
    const BackwardScratch own(at, width);
    backward_keys(call, first_head, one_pass, own);
    for (std::int64_t g = 0; !one_pass && g < call.group(); ++g) {
      backward_queries(call, AttentionHead(call, first_head + g), own);
    }
  });
}

}  // namespace tranche::kernels::cpu
