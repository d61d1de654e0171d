#pragma once
#include <cstdint>

#include "kernels/meta/cost.h"
#include "tranche/core/dtype.h"

namespace tranche::kernels::meta {

/// One addition an element of out; a table row is read for each token.
inline Cost embedding_forward_cost(std::int64_t tokens, std::int64_t width, DataType dtype) {
  const auto rows = static_cast<double>(tokens);
  const double elements = rows * static_cast<double>(width);
  const auto bytes = static_cast<double>(size_of(dtype));
  return {elements, 2.0 * elements * bytes + 4.0 * rows, elements * bytes};
}

/// Two additions an element of d_out, into fp32.
inline Cost embedding_backward_cost(std::int64_t tokens, std::int64_t width, DataType dtype) {
  const auto rows = static_cast<double>(tokens);
  const double elements = rows * static_cast<double>(width);
  return {2.0 * elements, elements * (static_cast<double>(size_of(dtype)) + 8.0) + 4.0 * rows,
          8.0 * elements};
}

}  // namespace tranche::kernels::meta
