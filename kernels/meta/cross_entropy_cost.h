#pragma once
#include <cstdint>

#include "kernels/meta/cost.h"
#include "tranche/core/dtype.h"

namespace tranche::kernels::meta {

inline Cost cross_entropy_begin_cost(std::int64_t rows) {
  return {0, 0, 12.0 * static_cast<double>(rows)};
}

/// Per logit: maximum, difference, exponential, sum (an exponential counts as one operation).
inline Cost cross_entropy_accumulate_cost(std::int64_t rows, std::int64_t columns) {
  const auto r = static_cast<double>(rows), c = static_cast<double>(columns);
  return {4.0 * r * c, 4.0 * r * c + 16.0 * r, 12.0 * r};
}

/// Per row and rank: maximum, two exponentials, two products, a sum.
inline Cost cross_entropy_combine_cost(std::int64_t rows, std::int64_t ranks) {
  const auto r = static_cast<double>(rows), t = static_cast<double>(ranks);
  return {6.0 * r * t, 12.0 * r * t, 12.0 * r};
}

inline Cost cross_entropy_finish_cost(std::int64_t rows) {
  const auto r = static_cast<double>(rows);
  return {4.0 * r, 16.0 * r + 16.0, 16.0};
}

/// Per logit: difference, exponential, two factors.
inline Cost cross_entropy_gradient_cost(std::int64_t rows, std::int64_t columns, DataType gradient_dtype) {
  const auto r = static_cast<double>(rows), c = static_cast<double>(columns);
  return {4.0 * r * c, 4.0 * r * c + 12.0 * r, r * c * static_cast<double>(size_of(gradient_dtype))};
}

}  // namespace tranche::kernels::meta
