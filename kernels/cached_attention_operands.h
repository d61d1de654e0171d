#pragma once
/// The operands of append_to_cache and attention_with_cache after the checks: the same on every device.

#include <cstdint>

#include "kernels/attention_operands.h"
#include "tranche/core/dtype.h"

namespace tranche::kernels {

/// The largest head width.
inline constexpr std::int64_t cached_head_width = 1024;

struct CachedShape {
  std::int64_t batch = 0, time = 0, key_value_heads = 1, head_width = 0, capacity = 0;
  DataType dtype = DataType::float32;
  const std::int32_t* lengths = nullptr;

  /// The element of the cache at which the tokens of a head begin.
  constexpr std::int64_t head(std::int64_t batch_entry, std::int64_t key_value_head) const {
    return (batch_entry * key_value_heads + key_value_head) * capacity * head_width;
  }
};

struct CacheAppend : CachedShape {
  HeadRows<const void> key, value;
  void* keys = nullptr;
  void* values = nullptr;
};

struct CachedAttention : CachedShape {
  std::int64_t heads = 1;
  float scale = 1;
  std::int64_t window = 0;  ///< 0: none
  HeadRows<const void> query;
  const void* keys = nullptr;
  const void* values = nullptr;
  void* out = nullptr;

  /// The number of heads that share a key and value.
  constexpr std::int64_t group() const { return heads / key_value_heads; }
  /// The first key that the query at `position` sees.
  constexpr std::int64_t first_key(std::int64_t position) const {
    return window > 0 && position >= window ? position - window + 1 : 0;
  }
};

}  // namespace tranche::kernels
