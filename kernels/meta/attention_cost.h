#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels/attention_operands.h"
#include "kernels/meta/cost.h"
#include "tranche/core/dtype.h"

namespace tranche::kernels::meta {

/// The number of pairs of a query and a key that it sees, over the batch, by the causal mask and the window.
inline double attention_pairs(const AttentionOperands& of) {
  const auto of_queries_before = [&](std::int64_t end) {
    const std::int64_t seen = of.window > 0 ? std::min(of.window, end) : end;  // keys seen by the last query
    const auto time = static_cast<double>(end), most = static_cast<double>(seen);
    return most * (most + 1) / 2.0 + (time - most) * most;
  };
  return static_cast<double>(of.batch) *
         (of_queries_before(of.end_query()) - of_queries_before(of.first_query));
}

/// The bytes of a tensor with `heads` heads for each of `tokens` tokens of every batch entry.
inline double attention_bytes(const AttentionOperands& of, std::int64_t tokens, std::int64_t heads) {
  return static_cast<double>(of.batch) * static_cast<double>(tokens) *
         static_cast<double>(heads * of.head_width) * static_cast<double>(size_of(of.dtype));
}

/// Each pair costs two dot products of all heads' width, and 5 operations per head for the softmax. Masked
/// pairs are not counted.
inline Cost attention_forward_cost(const AttentionOperands& of) {
  const auto w = static_cast<double>(of.width()), h = static_cast<double>(of.heads);
  const double rows = static_cast<double>(of.batch) * static_cast<double>(of.queries);
  const double queries = attention_bytes(of, of.queries, of.heads),
               keys = attention_bytes(of, of.time, of.key_value_heads);
  return {attention_pairs(of) * (4.0 * w + 5.0 * h), queries + 2.0 * keys, queries + 4.0 * rows * h};
}

/// Each pair costs five dot products of all heads' width (one recomputes the scores), and 6 operations per
/// head.
inline Cost attention_backward_cost(const AttentionOperands& of) {
  const auto w = static_cast<double>(of.width()), h = static_cast<double>(of.heads);
  const double rows = static_cast<double>(of.batch) * static_cast<double>(of.queries);
  const double queries = attention_bytes(of, of.queries, of.heads),
               keys = attention_bytes(of, of.time, of.key_value_heads);
  return {attention_pairs(of) * (10.0 * w + 6.0 * h) + 2.0 * rows * w,
          3.0 * queries + 2.0 * keys + 4.0 * rows * h, queries + 2.0 * keys};
}

}  // namespace tranche::kernels::meta
