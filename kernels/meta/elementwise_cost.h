#pragma once
#include "kernels/meta/cost.h"
#include "tranche/kernels/elementwise.h"

namespace tranche::kernels::meta {

/// `per_element` operations on elements read from `inputs` and written to `out`.
template <class... Inputs>
Cost elementwise(double per_element, const TensorView& out, const Inputs&... inputs) {
  return {per_element * static_cast<double>(out.elements()),
          (0.0 + ... + static_cast<double>(inputs.bytes())), static_cast<double>(out.bytes())};
}

/// The operations of one element. An exponential counts as the fourteen of its polynomial and range
/// reduction.
inline constexpr double gelu_forward_operations = 21;
inline constexpr double gelu_backward_operations = 32;
inline constexpr double gelu_forward_backward_operations = 36;  ///< both need exp(-2u), 17 operations, once
/// Scaling and adding a draw; the draw itself is integer work.
inline constexpr double fill_random_operations = 2;

inline Cost bias_gradient(const ConstTensorView& gradient, const TensorView& bias_gradient) {
  return {static_cast<double>(gradient.elements()),
          static_cast<double>(gradient.bytes() + bias_gradient.bytes()),
          static_cast<double>(bias_gradient.bytes())};
}

}  // namespace tranche::kernels::meta
