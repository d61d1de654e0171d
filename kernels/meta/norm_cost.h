#pragma once
#include <cstdint>

#include "kernels/meta/cost.h"
#include "tranche/core/tensor_view.h"

namespace tranche::kernels::meta {

/// Per element: mean 1, variance 3, normalisation 2, weight and bias 2.
inline Cost layer_norm_forward_cost(std::int64_t rows, std::int64_t columns, DataType dtype) {
  const auto r = static_cast<double>(rows), c = static_cast<double>(columns);
  const auto width = static_cast<double>(size_of(dtype));
  return {8.0 * r * c, (r * c + 2.0 * c) * width, r * c * width + 8.0 * r};
}

/// Per element: mean square 2, normalisation 1, weight 1.
inline Cost rms_norm_forward_cost(std::int64_t rows, std::int64_t columns, DataType dtype) {
  const auto r = static_cast<double>(rows), c = static_cast<double>(columns);
  const auto width = static_cast<double>(size_of(dtype));
  return {4.0 * r * c, (r * c + c) * width, r * c * width + 4.0 * r};
}

/// Adds the residual sum to `forward`: one operation, one more element read and one more written.
inline Cost residual_norm_cost(Cost forward, const TensorView& sum) {
  const auto bytes = static_cast<double>(sum.bytes());
  return forward += {static_cast<double>(sum.elements()), bytes, bytes};
}

/// Per element: normalised x 2, two row sums 5, dx 5, weight and bias gradients 3.
inline Cost layer_norm_backward_cost(std::int64_t rows, std::int64_t columns, DataType dtype,
                                     bool accumulate_dx) {
  const auto r = static_cast<double>(rows), c = static_cast<double>(columns);
  const auto width = static_cast<double>(size_of(dtype));
  const double read = ((accumulate_dx ? 3.0 : 2.0) * r * c + c) * width + 8.0 * r + 8.0 * c;
  return {15.0 * r * c, read, r * c * width + 8.0 * c};
}

/// Per element: normalised x 1, row sum 3, dx 3, weight gradient 2.
inline Cost rms_norm_backward_cost(std::int64_t rows, std::int64_t columns, DataType dtype,
                                   bool accumulate_dx) {
  const auto r = static_cast<double>(rows), c = static_cast<double>(columns);
  const auto width = static_cast<double>(size_of(dtype));
  const double read = ((accumulate_dx ? 3.0 : 2.0) * r * c + c) * width + 4.0 * r + 4.0 * c;
  return {9.0 * r * c, read, r * c * width + 4.0 * c};
}

}  // namespace tranche::kernels::meta
