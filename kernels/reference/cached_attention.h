#pragma once
/// Plain fp64 statement of kernels/cached_attention.h, single-threaded. For tests.

#include <cstdint>
#include <span>

namespace tranche::kernels::reference {

struct CachedAttentionShape {
  std::int64_t time = 0, heads = 1, key_value_heads = 1, head_width = 0, capacity = 0;
  std::int64_t window = 0;  ///< 0: none
  double scale = 0;         ///< 0: 1 / sqrt(head_width)
};

/// One batch entry with `length` tokens: query [time, heads, head_width] for the last `time` of them; keys
/// and values [key_value_heads, capacity, head_width]; out is like query. A length of 0 gives zeros.
void attention_with_cache(const CachedAttentionShape& shape, std::int64_t length,
                          std::span<const double> query, std::span<const double> keys,
                          std::span<const double> values, std::span<double> out);

}  // namespace tranche::kernels::reference
