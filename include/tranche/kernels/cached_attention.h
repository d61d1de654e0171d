#pragma once
/// Attention of new tokens over cached keys and values, for generation.

#include <cstdint>

#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"
#include "tranche/kernels/attention.h"

namespace tranche::kernels {

/// The keys and values of the tokens so far, [batch, key_value_heads, capacity, head width] each, both of one
/// dtype: a head's tokens lie side by side, so that a query reads them as one stream. `lengths`, int32
/// [batch] in memory of the stream's device, is the number of tokens of each batch entry, including the new
/// ones; 0 for an inactive entry. It is not checked here: 0, or from the number of new tokens to the
/// capacity.
struct CachedKeys {
  TensorView keys, values;
  ConstTensorView lengths;
  /// An upper bound of the lengths. Only the cost depends on it, because costs use shapes, not values.
  std::int64_t most = 0;
};

/// Copies the heads of the new tokens, rows [batch, time, n] or [batch * time, n], to the last `time` tokens
/// of each entry, as `lengths` gives them. Inactive entries are left unchanged. Throws InvalidArgument when
/// shapes or dtypes disagree.
void append_to_cache(Stream& stream, const ConstHeads& key, const ConstHeads& value, const CachedKeys& cache);

/// out[b, t] = attention of the new token t of entry b, the (lengths[b] - time + t)-th, over the keys up to
/// its own, `options.window` of them at most; the cache already holds those of the new tokens. query holds
/// `heads` heads; out [batch, time, heads * head width] is in the compute dtype; an inactive entry gets
/// zeros. The softmax and sums are in fp32, in an order that depends only on the token's position: an entry's
/// result is the same bits in every batch, for any number of threads and of new tokens. Heads have at most
/// 1024 elements. Throws InvalidArgument on options.dropout and options.document_begin, and as
/// attention_forward does.
///
/// It is bound by memory: keys are read once for all the queries that share them.
void attention_with_cache(Stream& stream, const AttentionOptions& options, const ConstHeads& query,
                          const CachedKeys& cache, const TensorView& out);

}  // namespace tranche::kernels
