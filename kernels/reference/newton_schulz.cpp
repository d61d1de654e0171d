#include "kernels/reference/newton_schulz.h"

#include <cmath>
#include <cstddef>

#include "kernels/reference/matmul.h"

namespace tranche::kernels::reference {

std::vector<double> newton_schulz(std::span<const std::array<double, 3>> steps, double norm_factor,
                                  std::int64_t rows, std::int64_t columns, std::span<const double> matrix) {
  std::vector<double> x(matrix.begin(), matrix.end());
  double squares = 0;
  for (const double value : x) squares += value * value;
  for (double& value : x) value /= norm_factor * std::sqrt(squares);
  std::vector<double> a(static_cast<std::size_t>(rows * rows)), b = a, y(x.size());
  for (const auto& [linear, cubic, quintic] : steps) {
    matmul({.m = rows, .n = rows, .k = columns, .transpose_b = true}, x, x, false, a);
    matmul({.m = rows, .n = rows, .k = rows}, a, a, false, b);
    for (std::size_t i = 0; i < b.size(); ++i) b[i] = cubic * a[i] + quintic * b[i];
    matmul({.m = rows, .n = columns, .k = rows}, b, x, false, y);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = linear * x[i] + y[i];
  }
  return x;
}

}  // namespace tranche::kernels::reference
