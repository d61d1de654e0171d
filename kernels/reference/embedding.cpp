#include "kernels/reference/embedding.h"

#include <cstddef>

namespace tranche::kernels::reference {

void embedding_forward(std::int64_t time, std::int64_t width, std::span<const std::int32_t> tokens,
                       std::span<const double> token_table, std::span<const double> position_table,
                       std::span<double> out, std::int64_t first_token) {
  const auto columns = static_cast<std::size_t>(width);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    // The unsigned difference for a token before the first is larger than any table.
    const std::size_t token = static_cast<std::size_t>(tokens[i] - first_token);
    const std::size_t position = i % static_cast<std::size_t>(time);
    const bool held = token < token_table.size() / columns;
    for (std::size_t c = 0; c < columns; ++c) {
      out[i * columns + c] = held ? token_table[token * columns + c] : 0.0;
      if (!held) continue;
      if (!position_table.empty()) out[i * columns + c] += position_table[position * columns + c];
    }
  }
}

void embedding_backward(std::int64_t time, std::int64_t width, std::span<const std::int32_t> tokens,
                        std::span<const double> d_out, std::span<double> token_gradient,
                        std::span<double> position_gradient, std::int64_t first_token) {
  const auto columns = static_cast<std::size_t>(width);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const std::size_t token = static_cast<std::size_t>(tokens[i] - first_token);
    const std::size_t position = i % static_cast<std::size_t>(time);
    if (token >= token_gradient.size() / columns) continue;
    for (std::size_t c = 0; c < columns; ++c) {
      token_gradient[token * columns + c] += d_out[i * columns + c];
      if (!position_gradient.empty()) position_gradient[position * columns + c] += d_out[i * columns + c];
    }
  }
}

}  // namespace tranche::kernels::reference
