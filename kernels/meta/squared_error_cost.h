#pragma once
#include "kernels/meta/cost.h"
#include "tranche/core/tensor_view.h"

namespace tranche::kernels::meta {

/// Per element: difference, square, sum.
inline Cost squared_error(const ConstTensorView& y) {
  return {3.0 * static_cast<double>(y.elements()), 2.0 * static_cast<double>(y.bytes()), 16.0};
}

inline Cost squared_error_gradient(const ConstTensorView& y) {
  const auto bytes = static_cast<double>(y.bytes());
  return {2.0 * static_cast<double>(y.elements()), 2.0 * bytes, bytes};
}

}  // namespace tranche::kernels::meta
