#pragma once
#include "kernels/meta/cost.h"
#include "tranche/kernels/optimizer_update.h"

namespace tranche::kernels::meta {

/// A masked update counts like any other: skipped steps issue the same work.
inline Cost adam_update(const ConstTensorView& gradient, const TensorView& master, const TensorView& exp_avg,
                        const TensorView& exp_avg_sq, const TensorView& weight) {
  const auto state = static_cast<double>(master.bytes() + exp_avg.bytes() + exp_avg_sq.bytes());
  const double copy = weight.data == nullptr ? 0.0 : static_cast<double>(weight.bytes());
  return {16.0 * static_cast<double>(master.elements()), state + static_cast<double>(gradient.bytes()),
          state + copy};
}

/// As a step that is neither the first nor nesterov; a buffer without data is no momentum.
inline Cost sgd_update(const ConstTensorView& gradient, const TensorView& master,
                       const TensorView& momentum_buffer, const TensorView& weight) {
  const bool has_momentum = momentum_buffer.data != nullptr;
  const auto state = static_cast<double>(master.bytes());
  const double buffer = has_momentum ? static_cast<double>(momentum_buffer.bytes()) : 0.0;
  const double copy = weight.data == nullptr ? 0.0 : static_cast<double>(weight.bytes());
  return {(has_momentum ? 8.0 : 5.0) * static_cast<double>(master.elements()),
          state + static_cast<double>(gradient.bytes()) + buffer, state + buffer + copy};
}

}  // namespace tranche::kernels::meta
