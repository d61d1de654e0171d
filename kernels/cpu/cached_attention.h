#pragma once
#include "kernels/cached_attention_operands.h"

namespace tranche::kernels::cpu {

/// The number of queries that share a block of keys; their elements are widened on the stack.
inline constexpr std::int64_t cached_query_block = 8;
inline constexpr std::int64_t cached_query_elements = 2048;
static_assert(cached_query_elements >= cached_head_width);

/// Like kernels/cached_attention.h, on the calling thread and `threads` - 1 more.
void append_to_cache(const CacheAppend& call, int threads);
void attention_with_cache(const CachedAttention& call, int threads);

}  // namespace tranche::kernels::cpu
