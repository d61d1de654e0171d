#include "kernels/cpu/attention_bf16.h"

#include <algorithm>

#include "kernels/cpu/bf16_tile.h"
#include "tranche/core/shape.h"

namespace tranche::kernels::cpu {

namespace {

/// Takes consecutive arrays from scratch memory that is counted in floats.
class Scratch {
 public:
  explicit Scratch(float* at) : at_(at) {}
  float* floats(std::int64_t count) {
    float* taken = at_;
    at_ += count;
    return taken;
  }
  bfloat16* halves(std::int64_t count) { return reinterpret_cast<bfloat16*>(floats((count + 1) / 2)); }

 private:
  float* at_;
};

std::int64_t even(std::int64_t count) {
  return count + count % 2;
}

const bfloat16* rows_of(const AttentionHead& head, int part, std::int64_t first) {
  return static_cast<const bfloat16*>(head.part(part, first));
}

const bfloat16* d_out_of(const AttentionCall& call, const AttentionHead& head, std::int64_t first) {
  return static_cast<const bfloat16*>(call.d_out) + head.row(first);
}

/// scores[queries, keys] = alpha a b, where b is the packed transpose of a tile of keys or values.
void score(const AttentionTile& tile, std::int64_t width, const bfloat16* a, std::int64_t stride_a,
           const bfloat16* b, float alpha, float* scores) {
  multiply({tile.queries, tile.keys, width, a, stride_a, b, attention_keys, scores, tile.keys, alpha, false});
}

/// The scratch of a task of backward.
struct BackwardTiles {
  float *scores, *d_scores, *d_out, *d_key, *d_value, *d_query;
  bfloat16 *key_columns, *value_columns, *key_rows;          // packed, of a tile of keys
  bfloat16 *query_transposed, *d_out_transposed;             // [width, queries]
  bfloat16 *packed_scores, *packed_d_scores, *d_score_rows;  // packed, of a tile of scores

  BackwardTiles(float* scratch, std::int64_t width) {
    constexpr std::int64_t tile = attention_queries * attention_keys;
    Scratch at(scratch);
    scores = at.floats(tile);
    d_scores = at.floats(tile);
    d_out = at.floats(attention_queries * width);
    d_key = at.floats(attention_keys * width);
    d_value = at.floats(attention_keys * width);
    key_columns = at.halves(attention_keys * width);
    value_columns = at.halves(attention_keys * width);
    key_rows = at.halves(attention_keys * width);
    query_transposed = at.halves(attention_queries * width);
    d_out_transposed = at.halves(attention_queries * width);
    packed_scores = at.halves(tile);
    packed_d_scores = at.halves(tile);
    d_score_rows = at.halves(tile);
    d_query = at.floats(0);
  }
};

void pack_keys(const AttentionHead& head, std::int64_t first, std::int64_t keys, const BackwardTiles& s) {
  const std::int64_t width = head.width();
  pack_transposed(rows_of(head, 1, first), head.stride(1), keys, width, s.key_columns, attention_keys);
  pack_transposed(rows_of(head, 2, first), head.stride(2), keys, width, s.value_columns, attention_keys);
  pack_rows(rows_of(head, 1, first), head.stride(1), keys, width, s.key_rows, width);
}

/// Computes the scores and their gradient for one tile; its first key is number `skipped` among the packed
/// keys.
void backward_tile(const AttentionCall& call, const AttentionHead& head, const AttentionTile& tile,
                   std::int64_t skipped, const BackwardTiles& s) {
  const std::int64_t width = head.width(), q = tile.first_query;
  float projection[attention_queries];
  widen_tile(call.dtype, d_out_of(call, head, q), call.width(), tile.queries, width, s.d_out, width);
  project_rows(tile.queries, width, s.d_out, call.dtype, element_at(call.dtype, call.out, head.row(q)),
               call.width(), projection);
  score(tile, width, rows_of(head, 0, q), head.stride(0), s.key_columns + 2 * skipped, head.scale(),
        s.scores);
  score(tile, width, d_out_of(call, head, q), call.width(), s.value_columns + 2 * skipped, 1.0f, s.d_scores);
  softmax_backward_tile(tile, head.scale(), head.log_sum_exp(q), projection, s.scores, s.d_scores);
}

/// d_query [queries, width] (+)= gradient of the scores times keys.
void add_query_gradient(const AttentionTile& tile, std::int64_t skipped, std::int64_t width,
                        const BackwardTiles& s, float* d_query, bool first) {
  narrow_rows(s.d_scores, tile.keys, tile.queries, tile.keys, s.d_score_rows, attention_keys);
  multiply({tile.queries, width, even(tile.keys), s.d_score_rows, attention_keys,
            s.key_rows + skipped * width, width, d_query, width, 1.0f, !first});
}

}  // namespace

bool attention_runs_in_bf16(DataType dtype, std::int64_t head_width) {
  return dtype == DataType::bfloat16 && head_width % bf16_head_multiple == 0 && bf16_tiles_are_fast();
}

std::int64_t bf16_forward_floats(std::int64_t head_width, std::int64_t keys) {
  const std::int64_t tile = attention_queries * attention_keys;
  return tile + tile / 2 + attention_queries * head_width + round_up(keys, attention_keys) * head_width;
}

void bf16_forward_head(const AttentionCall& call, const AttentionHead& head, bool keep_packed,
                       float* scratch) {
  const std::int64_t width = head.width();
  const std::int64_t tile_elements = attention_keys * width;
  const std::int64_t end_key = call.end_query(), kept = keep_packed ? divide_round_up(end_key, attention_keys) : 1;
  Scratch at(scratch);
  float* scores = at.floats(attention_queries * attention_keys);
  float* accumulated = at.floats(attention_queries * width);
  bfloat16* probabilities = at.halves(attention_queries * attention_keys);
  bfloat16* key_columns = at.halves(kept * tile_elements);
  bfloat16* value_rows = at.halves(kept * tile_elements);
  const auto pack = [&](std::int64_t k, std::int64_t keys, std::int64_t place) {
    pack_transposed(rows_of(head, 1, k), head.stride(1), keys, width, key_columns + place * tile_elements,
                    attention_keys);
    pack_rows(rows_of(head, 2, k), head.stride(2), keys, width, value_rows + place * tile_elements, width);
  };
  for (std::int64_t k = 0; keep_packed && k < end_key; k += attention_keys) {
    pack(k, std::min(attention_keys, end_key - k), k / attention_keys);
  }
  float maximum[attention_queries], sum[attention_queries];
  for (std::int64_t q = call.first_query, queries = 0; q < call.end_query(); q += queries) {
    queries = head.queries(q);
    const std::int64_t first = head.first_key_tile(q);
    for (std::int64_t k = first; k < q + queries; k += attention_keys) {
      const AttentionTile tile = head.tile(q, k);
      if (!keep_packed) pack(tile.first_key, tile.keys, 0);
      const std::int64_t packed = keep_packed ? k / attention_keys * tile_elements : 0;
      const std::int64_t skipped = keep_packed ? tile.first_key - k : 0;
      score(tile, width, rows_of(head, 0, q), head.stride(0), key_columns + packed + 2 * skipped,
            head.scale(), scores);
      softmax_tile(tile, k == first, scores, maximum, sum, accumulated, width);
      narrow_rows(scores, tile.keys, queries, tile.keys, probabilities, attention_keys);
      multiply({queries, width, even(tile.keys), probabilities, attention_keys,
                value_rows + packed + skipped * width, width, accumulated, width, 1.0f, k > first});
    }
    finish_softmax(queries, maximum, sum, accumulated, width, call.dtype,
                   element_at(call.dtype, call.out, head.row(q)), call.width(), head.log_sum_exp(q));
  }
}

std::int64_t bf16_backward_floats(std::int64_t head_width) {
  const std::int64_t tile = attention_queries * attention_keys;
  return 2 * tile + (attention_queries + 2 * attention_keys) * head_width +
         (3 * tile + (3 * attention_keys + 2 * attention_queries) * head_width) / 2;
}

/// The gradients of keys and values are summed as transposes [width, keys], so that the scores are the right
/// operands, which are packed without a transposition.
void bf16_backward_key_tile(const AttentionCall& call, std::int64_t first_head, std::int64_t k,
                            bool all_queries, float* scratch) {
  const std::int64_t width = call.head_width;
  const BackwardTiles s(scratch, width);
  const AttentionHead shared(call, first_head);
  const std::int64_t tile_keys = std::min(attention_keys, call.time - k);
  pack_keys(shared, k, tile_keys, s);
  std::fill_n(s.d_key, attention_keys * width, 0.0f);
  std::fill_n(s.d_value, attention_keys * width, 0.0f);
  for (std::int64_t g = 0; g < call.group(); ++g) {
    const AttentionHead head(call, first_head + g);
    for (std::int64_t q = std::max(k, call.first_query); q < call.end_query() && head.sees(q, k);
         q += head.queries(q)) {
      const AttentionTile tile = head.tile(q, k);
      const std::int64_t queries = tile.queries, keys = tile.keys, skipped = tile.first_key - k;
      backward_tile(call, head, tile, skipped, s);
      transpose_rows(rows_of(head, 0, q), head.stride(0), queries, width, s.query_transposed,
                     attention_queries);
      transpose_rows(d_out_of(call, head, q), call.width(), queries, width, s.d_out_transposed,
                     attention_queries);
      pack_rows(s.scores, keys, queries, keys, s.packed_scores, attention_keys);
      pack_rows(s.d_scores, keys, queries, keys, s.packed_d_scores, attention_keys);
      multiply({width, keys, even(queries), s.d_out_transposed, attention_queries, s.packed_scores,
                attention_keys, s.d_value + skipped, attention_keys, 1.0f, true});
      multiply({width, keys, even(queries), s.query_transposed, attention_queries, s.packed_d_scores,
                attention_keys, s.d_key + skipped, attention_keys, 1.0f, true});
      if (all_queries) {
        add_query_gradient(tile, skipped, width, s,
                           s.d_query + (g * call.queries + q - call.first_query) * width,
                           k == head.first_key_tile(q));
      }
    }
  }
  narrow_transposed(s.d_key, attention_keys, width, tile_keys, static_cast<bfloat16*>(shared.d_part(1, k)),
                    shared.d_stride(1));
  narrow_transposed(s.d_value, attention_keys, width, tile_keys, static_cast<bfloat16*>(shared.d_part(2, k)),
                    shared.d_stride(2));
}

void bf16_backward_query_tile(const AttentionCall& call, const AttentionHead& head, std::int64_t q,
                              float* scratch) {
  const BackwardTiles s(scratch, call.head_width);
  const std::int64_t queries = head.queries(q), first = head.first_key_tile(q);
  for (std::int64_t k = first; k < q + queries; k += attention_keys) {
    const AttentionTile tile = head.tile(q, k);
    pack_keys(head, tile.first_key, tile.keys, s);
    backward_tile(call, head, tile, 0, s);
    add_query_gradient(tile, 0, head.width(), s, s.d_query, k == first);
  }
  head.store_gradient(0, q, queries, s.d_query);
}

}  // namespace tranche::kernels::cpu
