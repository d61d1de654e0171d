#pragma once
/// Plain fp64 statement of kernels/attention.h, single-threaded. For tests and the fp64 reference trainer.

#include <cstdint>
#include <span>

namespace tranche::kernels::reference {

struct AttentionShape {
  std::int64_t batch = 0, time = 0, width = 0, heads = 1;
};

/// Causal self-attention on query_key_value [batch, time, 3 * width]; out [batch, time, width] and
/// log_sum_exp [batch, heads, time] are written. `keep_scale` [batch, heads, time, time] multiplies the
/// probabilities (0 or 1 / (1 - p) for dropout); empty means no dropout.
void attention_forward(const AttentionShape& shape, std::span<const double> query_key_value,
                       std::span<const double> keep_scale, std::span<double> out,
                       std::span<double> log_sum_exp);

/// d_query_key_value is written. Recomputes the probabilities; needs nothing that forward wrote.
void attention_backward(const AttentionShape& shape, std::span<const double> d_out,
                        std::span<const double> query_key_value, std::span<const double> keep_scale,
                        std::span<double> d_query_key_value);

}  // namespace tranche::kernels::reference
