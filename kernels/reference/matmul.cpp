#include "kernels/reference/matmul.h"

#include <cstddef>

namespace tranche::kernels::reference {

void matmul(const MatmulShape& shape, std::span<const double> a, std::span<const double> b, bool accumulate,
            std::span<double> c) {
  const auto [m, n, k, transpose_a, transpose_b] = shape;
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      double sum = accumulate ? c[static_cast<std::size_t>(i * n + j)] : 0.0;
      for (std::int64_t p = 0; p < k; ++p) {
        sum += a[static_cast<std::size_t>(transpose_a ? p * m + i : i * k + p)] *
               b[static_cast<std::size_t>(transpose_b ? j * k + p : p * n + j)];
      }
      c[static_cast<std::size_t>(i * n + j)] = sum;
    }
  }
}

}  // namespace tranche::kernels::reference
