#pragma once
/// The optimizer updates of one element: the scalar definition that every device's loop computes, operation
/// by operation. Sources that include it forbid contraction.

#include "tranche/kernels/optimizer_update.h"

namespace tranche::kernels {

/// One element of adam_update. `square_root` is IEEE's, which has no constexpr spelling.
template <class SquareRoot>
constexpr void adam_element(const AdamArguments& a, float g, float& w, float& m, float& v,
                            const SquareRoot& square_root) {
  g = g * a.gradient_scale;
  if (a.decoupled) {
    w = w - (a.learning_rate * a.weight_decay) * w;
  } else {
    g = g + a.weight_decay * w;
  }
  m = a.beta1 * m + (1.0f - a.beta1) * g;
  v = a.beta2 * v + ((1.0f - a.beta2) * g) * g;
  w = w - a.step_size * (m / (square_root(v) + a.corrected_epsilon));
}

/// One element of sgd_update with momentum; the buffer's old value is not read in the first step.
constexpr void sgd_momentum_element(const SgdArguments& a, float g, float& w, float& buffer) {
  g = g * a.gradient_scale + a.weight_decay * w;
  buffer = a.first_step ? g : a.momentum * buffer + (1.0f - a.dampening) * g;
  const float direction = a.nesterov ? g + a.momentum * buffer : buffer;
  w = w - a.learning_rate * direction;
}
/// One element of sgd_update without.
constexpr void sgd_element(const SgdArguments& a, float g, float& w) {
  g = g * a.gradient_scale + a.weight_decay * w;
  w = w - a.learning_rate * g;
}

}  // namespace tranche::kernels
