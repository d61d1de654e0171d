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
    const std::int64_t queries = queries_of(call.time, q);
    head.load(0, q, queries, query);
    for (std::int64_t k = 0; k < q + queries; k += attention_keys) {
      const std::int64_t keys = keys_of(k, q + queries);
      head.load(1, k, keys, key);
      head.load(2, k, keys, value);
      gemm(false, true, queries, keys, width, head.scale(), query, key, 0.0f, scores);
      softmax_tile(head.tile(q, queries, k, keys), k == 0, scores, maximum, sum, accumulated, width);
      gemm(false, false, queries, width, keys, 1.0f, scores, value, k == 0 ? 0.0f : 1.0f, accumulated);
    }
    finish_softmax(queries, maximum, sum, accumulated, width, call.dtype,
                   element_at(call.dtype, call.out, head.row(q)), call.width, head.log_sum_exp(q));
  }
}

/// Scratch of backward for one head. `d_query` holds all queries when they fit, else one tile.
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
                   const BackwardScratch& s) {
  const std::int64_t width = head.width();
  float projection[attention_queries];
  project_rows(tile.queries, width, s.d_out, call.dtype,
               element_at(call.dtype, call.out, head.row(tile.first_query)), call.width, projection);
  gemm(false, true, tile.queries, tile.keys, width, head.scale(), s.query, s.key, 0.0f, s.scores);
  gemm(false, true, tile.queries, tile.keys, width, 1.0f, s.d_out, s.value, 0.0f, s.d_scores);
  softmax_backward_tile(tile, head.scale(), head.log_sum_exp(tile.first_query), projection, s.scores,
                        s.d_scores);
}

void load_query_tile(const AttentionCall& call, const AttentionHead& head, std::int64_t first,
                     std::int64_t queries, const BackwardScratch& s) {
  head.load(0, first, queries, s.query);
  widen_tile(call.dtype, element_at(call.dtype, call.d_out, head.row(first)), call.width, queries,
             head.width(), s.d_out, head.width());
}

/// Gradients of keys and values, tile of keys by tile of keys over ascending queries; with all_queries the
/// gradient of the queries is summed beside them, over ascending keys.
void backward_keys(const AttentionCall& call, const AttentionHead& head, bool all_queries,
                   const BackwardScratch& s) {
  const std::int64_t width = head.width(), time = call.time;
  for (std::int64_t k = 0; k < time; k += attention_keys) {
    const std::int64_t tile_keys = std::min(attention_keys, time - k);
    head.load(1, k, tile_keys, s.key);
    head.load(2, k, tile_keys, s.value);
    std::fill_n(s.d_key, tile_keys * width, 0.0f);
    std::fill_n(s.d_value, tile_keys * width, 0.0f);
    for (std::int64_t q = k; q < time; q += attention_queries) {
      const std::int64_t queries = queries_of(time, q);
      const std::int64_t keys = keys_of(k, q + queries);
      load_query_tile(call, head, q, queries, s);
      backward_tile(call, head, head.tile(q, queries, k, keys), s);
      gemm(true, false, keys, width, queries, 1.0f, s.scores, s.d_out, 1.0f, s.d_value);
      gemm(true, false, keys, width, queries, 1.0f, s.d_scores, s.query, 1.0f, s.d_key);
      if (all_queries) {
        gemm(false, false, queries, width, keys, 1.0f, s.d_scores, s.key, k == 0 ? 0.0f : 1.0f,
             s.d_query + q * width);
      }
    }
    head.store_gradient(1, k, tile_keys, s.d_key);
    head.store_gradient(2, k, tile_keys, s.d_value);
  }
  if (all_queries) head.store_gradient(0, 0, time, s.d_query);
}

/// The gradient of the queries where all of it does not fit: the tiles once more, the same sums in the same
/// order.
void backward_queries(const AttentionCall& call, const AttentionHead& head, const BackwardScratch& s) {
  const std::int64_t width = head.width();
  for (std::int64_t q = 0; q < call.time; q += attention_queries) {
    const std::int64_t queries = queries_of(call.time, q);
    load_query_tile(call, head, q, queries, s);
    for (std::int64_t k = 0; k < q + queries; k += attention_keys) {
      const std::int64_t keys = keys_of(k, q + queries);
      head.load(1, k, keys, s.key);
      head.load(2, k, keys, s.value);
      backward_tile(call, head, head.tile(q, queries, k, keys), s);
      gemm(false, false, queries, width, keys, 1.0f, s.d_scores, s.key, k == 0 ? 0.0f : 1.0f, s.d_query);
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
  if (call.time == 0 || call.width == 0) return;
  const std::int64_t width = call.head_width();
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
  if (call.time == 0 || call.width == 0) return;
  const std::int64_t width = call.head_width();
  const bool in_bf16 = attention_runs_in_bf16(call.dtype, width);
  const std::int64_t tiles = in_bf16 ? bf16_backward_floats(width) : BackwardScratch::floats(width);
  // One pass when the query gradient of a whole head fits beside the tiles for half the threads or more (two
  // passes take 7 GEMMs instead of 5); the same bits either way.
  const std::int64_t whole = tiles + call.time * width;
  const std::int64_t tasks = std::min<std::int64_t>(call.threads, call.batch * call.heads);
  const bool one_pass = call.workspace.bytes / bytes_of(whole) >= std::max<std::int64_t>(1, tasks / 2);
  const std::int64_t floats = one_pass ? whole : tiles + attention_queries * width;
  const std::int64_t space = call.workspace.bytes / bytes_of(floats);
  const int threads = static_cast<int>(std::min<std::int64_t>(call.threads, space));
  auto* scratch = static_cast<float*>(call.workspace.data);
  parallel_tasks(threads, call.batch * call.heads, [&](std::int64_t index, int slot) {
    const AttentionHead head(call, index);
    float* at = scratch + slot * floats;
    if (in_bf16) return bf16_backward_head(call, head, one_pass, at);
    const BackwardScratch own(at, width);
    backward_keys(call, head, one_pass, own);
    if (!one_pass) backward_queries(call, head, own);
  });
}

}  // namespace tranche::kernels::cpu
