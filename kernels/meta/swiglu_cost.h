#pragma once
#include "kernels/meta/cost.h"
#include "tranche/core/tensor_view.h"

namespace tranche::kernels::meta {

/// Per element: the exponential 14, 1 / (1 + e) 2, silu 1, the product 1.
inline Cost swiglu_forward_cost(const ConstTensorView& gate) {
  const auto bytes = static_cast<double>(gate.bytes());
  return {18.0 * static_cast<double>(gate.elements()), 2 * bytes, bytes};
}

/// Adds, per element: the derivative 4, d_gate 2, d_up 1.
inline Cost swiglu_forward_backward_cost(const ConstTensorView& gate) {
  const auto bytes = static_cast<double>(gate.bytes());
  return {25.0 * static_cast<double>(gate.elements()), 3 * bytes, 3 * bytes};
}

}  // namespace tranche::kernels::meta
