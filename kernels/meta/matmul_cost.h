#pragma once
#include <cstdint>

#include "tranche/core/dtype.h"
#include "tranche/kernels/meta/cost.h"

namespace tranche::kernels::meta {

/// 2 m n k operations; every operand passes once, c also inwards when it is added to.
inline Cost matmul_cost(std::int64_t m, std::int64_t n, std::int64_t k, DataType dtype, DataType c_dtype,
                        bool accumulate) {
  const auto rows = static_cast<double>(m), columns = static_cast<double>(n), depth = static_cast<double>(k);
  const double c_bytes = rows * columns * static_cast<double>(size_of(c_dtype));
  const double operand_bytes = (rows * depth + depth * columns) * static_cast<double>(size_of(dtype));
  return {2.0 * rows * columns * depth, operand_bytes + (accumulate ? c_bytes : 0.0), c_bytes};
}

}  // namespace tranche::kernels::meta
