#pragma once
/// Plain fp64 statement of kernels/matmul.h, single-threaded. For tests and the fp64 reference trainer.

#include <cstdint>
#include <span>

namespace tranche::kernels::reference {

/// Sizes of c[m, n] = op(a)[m, k] op(b)[k, n], and how the operands are stored.
struct MatmulShape {
  std::int64_t m = 0, n = 0, k = 0;
  bool transpose_a = false;  ///< a is stored [k, m]
  bool transpose_b = false;  ///< b is stored [n, k]
};

/// c = op(a) op(b), or c += op(a) op(b) with accumulate.
void matmul(const MatmulShape& shape, std::span<const double> a, std::span<const double> b, bool accumulate,
            std::span<double> c);

}  // namespace tranche::kernels::reference
