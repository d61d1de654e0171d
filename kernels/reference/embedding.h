#pragma once
/// Plain fp64 statement of kernels/embedding.h, single-threaded. For tests and the fp64 reference trainer.

#include <cstdint>
#include <span>

namespace tranche::kernels::reference {

/// out[b, t, :] = token_table[tokens[b, t], :] + position_table[t, :]; tokens holds batch * time values. An
/// empty position_table, or gradient of it, means none. The tables hold tokens from first_token on; rows of
/// others become zero, and are left out of the gradients.
void embedding_forward(std::int64_t time, std::int64_t width, std::span<const std::int32_t> tokens,
                       std::span<const double> token_table, std::span<const double> position_table,
                       std::span<double> out, std::int64_t first_token = 0);

/// token_gradient and position_gradient are added to.
void embedding_backward(std::int64_t time, std::int64_t width, std::span<const std::int32_t> tokens,
                        std::span<const double> d_out, std::span<double> token_gradient,
                        std::span<double> position_gradient, std::int64_t first_token = 0);

}  // namespace tranche::kernels::reference
