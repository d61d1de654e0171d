#include "kernels/reference/rope.h"

#include <cmath>
#include <cstddef>

namespace tranche::kernels::reference {

void rope_table(std::span<const double> frequencies, std::span<const std::int64_t> positions,
                std::span<double> table) {
  const std::size_t half = frequencies.size();
  for (std::size_t row = 0; row < positions.size(); ++row) {
    for (std::size_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(positions[row]) * frequencies[i];
      table[row * 2 * half + i] = std::cos(angle);
      table[row * 2 * half + half + i] = std::sin(angle);
    }
  }
}

void rope(bool inverse, std::span<const double> table, std::int64_t width, std::int64_t heads,
          std::int64_t head_dim, std::span<double> x) {
  const auto columns = static_cast<std::size_t>(width), half = columns / 2;
  const auto size = static_cast<std::size_t>(head_dim);
  for (std::size_t head = 0; head * size < x.size(); ++head) {
    const std::size_t row = head / static_cast<std::size_t>(heads);
    for (std::size_t i = 0; i < half; ++i) {
      const double cosine = table[row * columns + i];
      const double sine = (inverse ? -1 : 1) * table[row * columns + half + i];
      const double a = x[head * size + i], b = x[head * size + half + i];
      x[head * size + i] = a * cosine - b * sine;
      x[head * size + half + i] = b * cosine + a * sine;
    }
  }
}

}  // namespace tranche::kernels::reference
