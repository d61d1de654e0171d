#pragma once
/// Attention of new tokens over keys and values that were kept, as generation needs it.

#include <cstdint>

#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"
#include "tranche/kernels/attention.h"

namespace tranche::kernels {

/// The keys and values of the tokens so far, [batch, key_value_heads, capacity, head width] each, both of one
/// dtype: a head's tokens lie side by side, so that a query reads them as one stream. `lengths`, int32
/// [batch] in memory of the stream's device, is the number of tokens that a batch entry has, the new ones
/// among them; 0 for an entry that rests. It is not checked here: 0, or from the number of new tokens to the
/// capacity.
struct CachedKeys {
  TensorView keys, values;
  ConstTensorView lengths;
  /// No length is above it. Nothing but the cost, which shapes and not values say, depends on it.
  std::int64_t most = 0;
};

/// Copies the heads of the new tokens, rows [batch, time, n] or [batch * time, n], to where `lengths` says
/// that they belong: the last `time` tokens of each entry. An entry that rests is left alone. Throws
/// InvalidArgument when shapes or dtypes disagree.
void append_to_cache(Stream& stream, const ConstHeads& key, const ConstHeads& value, const CachedKeys& cache);

/// out[b, t] = attention of the new token t of entry b, the (lengths[b] - time + t)-th, over the keys up to
/// its own, `options.window` of them at most; the cache holds those of the new tokens already. query holds
/// `heads` heads; out [batch, time, heads * head width] is in the compute dtype; an entry that rests gets
/// zeros. Softmax and sums in fp32, in an order that depends on the token's place alone: an entry's result
/// is the same bits in every batch, for any number of threads and of new tokens. Heads have 1024 elements at
/// most. Throws InvalidArgument on options.dropout and options.document_begin, and as attention_forward does.
///
/// The memory of the keys bounds it: they are read once for all the queries that share them.
void attention_with_cache(Stream& stream, const AttentionOptions& options, const ConstHeads& query,
                          const CachedKeys& cache, const TensorView& out);

}  // namespace tranche::kernels
