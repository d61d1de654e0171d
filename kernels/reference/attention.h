#pragma once
/// Plain fp64 statement of kernels/attention.h, single-threaded. For tests and the fp64 reference trainer.

#include <cstddef>
#include <cstdint>
#include <span>

namespace tranche::kernels::reference {

struct AttentionShape {
  std::int64_t batch = 0, time = 0, heads = 1, key_value_heads = 1, head_width = 0;
  std::int64_t window = 0;                       ///< 0: none
  double scale = 0;                              ///< 0: 1 / sqrt(head_width)
  std::span<const std::int32_t> document_begin;  ///< [batch, time], or empty
};

/// Heads lie side by side in each token's row; a row is `stride` elements after the previous token's.
template <class T>
struct HeadRows {
  std::span<T> elements;
  std::int64_t stride = 0;
};
template <class T>
struct QueryKeyValue {
  HeadRows<T> query, key, value;
};
/// The parts of rows into which GPT-2 packs them, `width` elements each.
template <class T>
QueryKeyValue<T> packed(std::span<T> rows, std::int64_t width) {
  const auto part = [&](std::size_t index) {
    const std::size_t first = index * static_cast<std::size_t>(width);
    return HeadRows<T>{rows.subspan(rows.empty() ? 0 : first), 3 * width};
  };
  return {part(0), part(1), part(2)};
}

/// Causal self-attention as kernels/attention.h says; out [batch, time, heads * head_width] and log_sum_exp
/// [batch, heads, time] are written. `keep_scale` [batch, heads, time, time] multiplies the probabilities (0
/// or 1 / (1 - p) for dropout); empty means no dropout.
void attention_forward(const AttentionShape& shape, const QueryKeyValue<const double>& operands,
                       std::span<const double> keep_scale, std::span<double> out,
                       std::span<double> log_sum_exp);

/// Writes the heads of `gradients`. It recomputes the probabilities and needs no result of forward.
void attention_backward(const AttentionShape& shape, std::span<const double> d_out,
                        const QueryKeyValue<const double>& operands, std::span<const double> keep_scale,
                        const QueryKeyValue<double>& gradients);

}  // namespace tranche::kernels::reference
