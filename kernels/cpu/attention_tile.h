#pragma once
/// The operations of attention on a tile of scores between two GEMMs: masking, softmax and dropout, row by
/// row.

#include <algorithm>
#include <cstdint>

#include "kernels/attention_operands.h"
#include "kernels/cpu/dropout_mask.h"
#include "tranche/core/dtype.h"

namespace tranche::kernels::cpu {

// Tiles start at multiples of these, whatever the number of threads and the size of the workspace. Key tiles
// are a multiple of query tiles, so under a causal mask alone each row of a tile that is not skipped sees its
// first key.
inline constexpr std::int64_t attention_queries = 64;
inline constexpr std::int64_t attention_keys = 256;

/// The position of a tile of scores [queries, keys]: rows are queries from first_query on, columns keys from
/// first_key on. Row `row` may see columns [hidden(row), visible(row)).
struct AttentionTile {
  std::int64_t first_query = 0, queries = 0, first_key = 0, keys = 0;
  AttentionMask mask;
  const DropoutMask* dropout = nullptr;  ///< null without dropout
  std::int64_t sample = 0;
  std::int64_t first_element = 0;  ///< index of the head's first score among the sample's mask elements
  std::int64_t time = 0;

  std::int64_t visible(std::int64_t row) const { return std::min(first_query + row - first_key + 1, keys); }
  std::int64_t hidden(std::int64_t row) const {
    if (mask.causal_only()) return 0;
    return std::clamp(mask.first(first_query + row) - first_key, std::int64_t{0}, visible(row));
  }
  std::int64_t element(std::int64_t row, std::int64_t column) const {
    return first_element + (first_query + row) * time + first_key + column;
  }
};

/// One step of the online softmax (Milakov and Gimelshein, 2018): scores become exp(score - maximum), dropped
/// out, zero where masked; `maximum` and `sum` [queries] are updated and the rows of `accumulated` [queries,
/// head_width] rescaled to the new maximum. `first` marks a row's first tile.
void softmax_tile(const AttentionTile& tile, bool first, float* scores, float* maximum, float* sum,
                  float* accumulated, std::int64_t head_width);

/// Writes accumulated / sum to `out` (rows `out_stride` elements apart), and maximum + log(sum).
void finish_softmax(std::int64_t queries, const float* maximum, const float* sum, float* accumulated,
                    std::int64_t head_width, DataType dtype, void* out, std::int64_t out_stride,
                    float* log_sum_exp);

/// projection[row] = dot(d_out, out) of each query.
void project_rows(std::int64_t queries, std::int64_t head_width, const float* d_out, DataType dtype,
                  const void* out, std::int64_t out_stride, float* projection);

/// The scores become the probabilities after dropout; d_probabilities, their gradient, becomes the gradient
/// of the unscaled scores, times `scale`.
void softmax_backward_tile(const AttentionTile& tile, float scale, const float* log_sum_exp,
                           const float* projection, float* scores, float* d_probabilities);

}  // namespace tranche::kernels::cpu
