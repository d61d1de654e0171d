#pragma once
/// The layout of one head of attention in memory, and its division into tiles.

#include <algorithm>
#include <cmath>

#include "kernels/cpu/attention.h"
#include "kernels/cpu/attention_tile.h"
#include "kernels/cpu/convert.h"
#include "tranche/core/shape.h"

namespace tranche::kernels::cpu {

inline std::int64_t queries_of(std::int64_t time, std::int64_t first) {
  return std::min(attention_queries, time - first);
}

/// Keys from first_key on that some query below `end` sees, within one tile.
inline std::int64_t keys_of(std::int64_t first_key, std::int64_t end) {
  return std::min(attention_keys, end - first_key);
}

/// The layout of one head of one batch entry in the packed tensors.
class AttentionHead {
 public:
  AttentionHead(const AttentionCall& call, std::int64_t index)
      : call_(call), index_(index), batch_(index / call.heads), head_(index % call.heads) {}

  /// Rows from `first` on of part 0 (query), 1 (key) or 2 (value) where they lie, packed_stride() apart.
  const void* part(int part, std::int64_t first) const {
    return element_at(call_.dtype, call_.query_key_value, packed(part, first));
  }
  /// The same part of the gradient.
  void* d_part(int part, std::int64_t first) const {
    return element_at(call_.dtype, call_.d_query_key_value, packed(part, first));
  }
  std::int64_t packed_stride() const { return 3 * call_.width; }
  /// Widens rows [first, first + rows) of part 0 (query), 1 (key) or 2 (value).
  void load(int part, std::int64_t first, std::int64_t rows, float* to) const {
    widen_tile(call_.dtype, this->part(part, first), packed_stride(), rows, width(), to, width());
  }
  /// Writes rows of the gradient of a part.
  void store_gradient(int part, std::int64_t first, std::int64_t rows, const float* from) const {
    narrow_tile(from, width(), rows, width(), call_.dtype, d_part(part, first), packed_stride());
  }
  /// Element of `out` and `d_out` where row `first` of this head starts; rows are call.width apart.
  std::int64_t row(std::int64_t first) const {
    return (batch_ * call_.time + first) * call_.width + head_ * width();
  }
  float* log_sum_exp(std::int64_t first) const { return call_.log_sum_exp + index_ * call_.time + first; }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(width())); }
  std::int64_t width() const { return call_.head_width(); }

  AttentionTile tile(std::int64_t first_query, std::int64_t queries, std::int64_t first_key,
                     std::int64_t keys) const {
    AttentionTile made{first_query, queries, first_key, keys};
    made.time = call_.time;
    made.first_element = head_ * call_.time * call_.time;
    if (call_.dropout) {
      made.dropout = &*call_.dropout;
      made.sample = call_.samples[static_cast<std::size_t>(batch_)];
    }
    return made;
  }

 private:
  std::int64_t packed(int part, std::int64_t first) const {
    return (batch_ * call_.time + first) * 3 * call_.width + part * call_.width + head_ * width();
  }
  const AttentionCall& call_;
  std::int64_t index_, batch_, head_;
};

}  // namespace tranche::kernels::cpu
