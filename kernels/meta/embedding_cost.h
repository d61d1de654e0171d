#pragma once
#include <cstdint>

#include "kernels/meta/cost.h"
#include "tranche/core/dtype.h"

namespace tranche::kernels::meta {

/// One addition per element of out; a row of each table is read for each token. Without positions there is no
/// addition.
inline Cost embedding_forward_cost(std::int64_t tokens, std::int64_t width, DataType dtype, bool positions) {
  const auto rows = static_cast<double>(tokens);
  const double elements = rows * static_cast<double>(width);
  const auto bytes = static_cast<double>(size_of(dtype));
  const double additions = positions ? elements : 0.0;
  return {additions, (elements + additions) * bytes + 4.0 * rows, elements * bytes};
}

/// Two additions per element of d_out, into fp32; one without positions.
inline Cost embedding_backward_cost(std::int64_t tokens, std::int64_t width, DataType dtype, bool positions) {
  const auto rows = static_cast<double>(tokens);
  const double elements = rows * static_cast<double>(width);
  const double additions = (positions ? 2.0 : 1.0) * elements;
  return {additions, elements * static_cast<double>(size_of(dtype)) + 4.0 * additions + 4.0 * rows,
          4.0 * additions};
}

}  // namespace tranche::kernels::meta
