#pragma once
/// Attention's operands after the checks, and the keys that a query sees; the same on every device.

#include <array>
#include <cstdint>
#include <vector>

#include "tranche/core/dtype.h"

namespace tranche::kernels {

/// Query t sees keys [first(t), t]. It holds plain values, so that devices run the code that the host tests.
struct AttentionMask {
  std::int64_t window = 0;                       ///< 0: none
  const std::int32_t* document_begin = nullptr;  ///< [time] of one batch entry, or null

  /// True when a query sees every key before it.
  constexpr bool causal_only() const { return window == 0 && document_begin == nullptr; }
  /// The result never decreases with the query, because document_begin does not. It is in [0, query] for any
  /// contents.
  constexpr std::int64_t first(std::int64_t query) const {
    std::int64_t begin = window > 0 && query >= window ? query - window + 1 : 0;
    if (document_begin != nullptr && document_begin[query] > begin) begin = document_begin[query];
    return begin < query ? begin : query;
  }
};

/// Rows of tokens in which heads lie side by side: the first token's are at `data`, each further token's
/// `stride` elements later.
template <class Data>
struct HeadRows {
  Data* data = nullptr;
  std::int64_t stride = 0;
};

/// Forward leaves d_out and d_parts null.
struct AttentionOperands {
  std::int64_t batch = 0, heads = 1, key_value_heads = 1, head_width = 0;
  std::int64_t time = 0;                      ///< tokens of a sequence, which are the keys
  std::int64_t first_query = 0, queries = 0;  ///< the tokens whose queries are given
  DataType dtype = DataType::float32;
  float scale = 1;
  std::int64_t window = 0;
  std::int64_t first_head = 0;                   ///< for the index in the dropout mask
  const std::int32_t* document_begin = nullptr;  ///< [batch, time], or null
  std::array<HeadRows<const void>, 3> parts;     ///< query, key, value
  void* out = nullptr;                           ///< written by forward, read by backward
  float* log_sum_exp = nullptr;                  ///< written by forward, read by backward
  const void* d_out = nullptr;
  std::array<HeadRows<void>, 3> d_parts;
  std::vector<std::int64_t> samples;  ///< global sample of each batch entry, with dropout

  std::int64_t width() const { return heads * head_width; }
  std::int64_t end_query() const { return first_query + queries; }
  /// The number of heads that share a key and value.
  std::int64_t group() const { return heads / key_value_heads; }
  AttentionMask mask(std::int64_t batch_entry) const {
    return {window, document_begin == nullptr ? nullptr : document_begin + batch_entry * time};
  }
};

}  // namespace tranche::kernels
