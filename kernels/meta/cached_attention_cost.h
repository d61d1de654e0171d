#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels/cached_attention_operands.h"
#include "kernels/meta/cost.h"

namespace tranche::kernels::meta {

/// Keys and values are read and written; one length is read per batch entry.
inline Cost append_to_cache_cost(const CachedShape& of) {
  const double bytes = 2.0 * static_cast<double>(of.batch * of.time * of.key_value_heads * of.head_width) *
                       static_cast<double>(size_of(of.dtype));
  return {0.0, bytes + 4.0 * static_cast<double>(of.batch), bytes};
}

/// Like attention_forward_cost, for entries that have `most` keys each: all new tokens see the earlier keys.
/// Keys and values are read once.
inline Cost attention_with_cache_cost(const CachedAttention& of, std::int64_t most) {
  const std::int64_t before = most - of.time;
  std::int64_t pairs = 0, read = 0;
  for (std::int64_t t = 0; t < of.time; ++t) {
    const std::int64_t position = before + t;
    pairs += position - of.first_key(position) + 1;
  }
  if (of.time > 0) read = most - of.first_key(before);
  const auto element = static_cast<double>(size_of(of.dtype));
  const auto batch = static_cast<double>(of.batch), heads = static_cast<double>(of.heads),
             width = static_cast<double>(of.heads * of.head_width);
  const double queries = batch * static_cast<double>(of.time) * width * element;
  const double keys = batch * static_cast<double>(read * of.key_value_heads * of.head_width) * element;
  return {batch * static_cast<double>(pairs) * (4.0 * width + 5.0 * heads),
          queries + 2.0 * keys + 4.0 * batch, queries};
}

}  // namespace tranche::kernels::meta
