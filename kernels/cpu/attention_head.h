#pragma once
/// The layout of one head of attention in memory, and its division into tiles.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attention.h"
#include "kernels/cpu/attention_tile.h"
#include "kernels/cpu/convert.h"

namespace tranche::kernels::cpu {

/// If a mask hides a key tile's first keys, the tile starts at a multiple of this.
inline constexpr std::int64_t attention_key_step = 16;

/// The position of one head of one batch entry in the operands, and the tiles of its scores: key tiles start
/// at multiples of attention_keys, query tiles at multiples of attention_queries and at the first query.
/// Queries and keys are identified by their token in the sequence.
class AttentionHead {
 public:
  AttentionHead(const AttentionCall& call, std::int64_t index)
      : call_(call),
        index_(index),
        batch_(index / call.heads),
        head_(index % call.heads),
        mask_(call.mask(batch_)) {}

  /// The address of row `first` of part 0 (query), 1 (key) or 2 (value); rows are stride(part) apart.
  const void* part(int part, std::int64_t first) const {
    const auto& rows = call_.parts[static_cast<std::size_t>(part)];
    return element_at(call_.dtype, rows.data, element(part, first, rows.stride));
  }
  std::int64_t stride(int part) const { return call_.parts[static_cast<std::size_t>(part)].stride; }
  /// The address in the gradient of the same part.
  void* d_part(int part, std::int64_t first) const {
    const auto& rows = call_.d_parts[static_cast<std::size_t>(part)];
    return element_at(call_.dtype, rows.data, element(part, first, rows.stride));
  }
  std::int64_t d_stride(int part) const { return call_.d_parts[static_cast<std::size_t>(part)].stride; }
  /// Widens rows [first, first + rows) of a part to fp32.
  void load(int part, std::int64_t first, std::int64_t rows, float* to) const {
    widen_tile(call_.dtype, this->part(part, first), stride(part), rows, width(), to, width());
  }
  /// Writes rows of a part's gradient.
  void store_gradient(int part, std::int64_t first, std::int64_t rows, const float* from) const {
    narrow_tile(from, width(), rows, width(), call_.dtype, d_part(part, first), d_stride(part));
  }
  /// The element of `out` and `d_out` at which query `first` of this head starts; rows are call.width()
  /// apart.
  std::int64_t row(std::int64_t first) const {
    return (batch_ * call_.queries + first - call_.first_query) * call_.width() + head_ * width();
  }
  float* log_sum_exp(std::int64_t first) const {
    return call_.log_sum_exp + index_ * call_.queries + first - call_.first_query;
  }
  float scale() const { return call_.scale; }
  std::int64_t width() const { return call_.head_width; }

  /// The number of queries in the tile that begins with query `first`.
  std::int64_t queries(std::int64_t first) const {
    return std::min(attention_queries - first % attention_queries, call_.end_query() - first);
  }
  /// The first key tile that a tile of queries sees.
  std::int64_t first_key_tile(std::int64_t query) const {
    return mask_.first(query) / attention_keys * attention_keys;
  }
  /// True if some query from `query` on sees a key of the tile. If not, no later query does.
  bool sees(std::int64_t query, std::int64_t key) const { return mask_.first(query) < key + attention_keys; }
  /// The scores of a query tile with the keys of a key tile that it may see.
  AttentionTile tile(std::int64_t query, std::int64_t key) const {
    AttentionTile made;
    made.first_query = query;
    made.queries = queries(query);
    made.first_key = std::max(key, mask_.first(query) / attention_key_step * attention_key_step);
    made.keys = std::min(key + attention_keys, query + made.queries) - made.first_key;
    made.mask = mask_;
    made.time = call_.time;
    made.first_element = (call_.first_head + head_) * call_.time * call_.time;
    if (call_.dropout) {
      made.dropout = &*call_.dropout;
      made.sample = call_.samples[static_cast<std::size_t>(batch_)];
    }
    return made;
  }

 private:
  std::int64_t element(int part, std::int64_t first, std::int64_t stride) const {
    if (part == 0) return (batch_ * call_.queries + first - call_.first_query) * stride + head_ * width();
    return (batch_ * call_.time + first) * stride + head_ / call_.group() * width();
  }
  const AttentionCall& call_;
  std::int64_t index_, batch_, head_;
  AttentionMask mask_;
};

}  // namespace tranche::kernels::cpu
