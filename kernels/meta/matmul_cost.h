#pragma once
#include <cstdint>

#include "kernels/meta/cost.h"
#include "kernels/meta/elementwise_cost.h"
#include "tranche/core/dtype.h"

namespace tranche::kernels::meta {

/// 2 m n k operations; every operand is moved once, and c is also read when it is accumulated.
inline Cost matmul_cost(std::int64_t m, std::int64_t n, std::int64_t k, DataType dtype, DataType c_dtype,
                        bool accumulate) {
  const auto rows = static_cast<double>(m), columns = static_cast<double>(n), depth = static_cast<double>(k);
  const double c_bytes = rows * columns * static_cast<double>(size_of(c_dtype));
  const double operand_bytes = (rows * depth + depth * columns) * static_cast<double>(size_of(dtype));
  return {2.0 * rows * columns * depth,
          operand_bytes + (accumulate ? c_bytes : 0.0),
          c_bytes,
          {m, n, k, dtype, false, false}};
}

/// The fused forms: the bytes that a fused kernel moves, and the operations of its parts.
inline Cost matmul_bias_cost(std::int64_t m, std::int64_t n, std::int64_t k, DataType dtype) {
  const double elements = static_cast<double>(m) * static_cast<double>(n);
  const Cost bias{elements, static_cast<double>(n * size_of(dtype)), 0.0};
  return matmul_cost(m, n, k, dtype, dtype, false) += bias;
}
inline Cost matmul_bias_gelu_cost(std::int64_t m, std::int64_t n, std::int64_t k, DataType dtype) {
  const double elements = static_cast<double>(m) * static_cast<double>(n);
  const Cost gelu{gelu_forward_operations * elements, 0.0, elements * static_cast<double>(size_of(dtype))};
  return matmul_bias_cost(m, n, k, dtype) += gelu;
}
inline Cost matmul_gelu_backward_cost(std::int64_t m, std::int64_t n, std::int64_t k, DataType dtype) {
  const double elements = static_cast<double>(m) * static_cast<double>(n);
  const Cost gelu{gelu_backward_operations * elements, elements * static_cast<double>(size_of(dtype)), 0.0};
  Cost cost = matmul_cost(m, n, k, dtype, dtype, false) += gelu;
  cost.gemm.transpose_b = true;
  return cost;
}

}  // namespace tranche::kernels::meta
