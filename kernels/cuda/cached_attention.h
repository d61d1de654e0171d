#pragma once
#include "kernels/cached_attention_operands.h"
#include "tranche/device/stream.h"

namespace tranche::kernels::cuda {

/// Like kernels/cached_attention.h, with checked arguments.
void append_to_cache(Stream& stream, const CacheAppend& call);
void attention_with_cache(Stream& stream, const CachedAttention& call);

}  // namespace tranche::kernels::cuda
