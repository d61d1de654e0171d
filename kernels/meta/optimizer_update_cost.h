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

inline Cost sgd_update(const SgdArguments& arguments, const ConstTensorView& gradient,
                       const TensorView& master, const TensorView& momentum_buffer,
                       const TensorView& weight) {
  const auto elements = static_cast<double>(master.elements());
  const auto state = static_cast<double>(master.bytes());
  const double buffer = arguments.momentum == 0 ? 0.0 : static_cast<double>(momentum_buffer.bytes());
  const double copy = weight.data == nullptr ? 0.0 : static_cast<double>(weight.bytes());
  const double per_element = 5 + (arguments.momentum == 0 ? 0 : 3) + (arguments.nesterov ? 2 : 0);
  return {per_element * elements,
          state + static_cast<double>(gradient.bytes()) + (arguments.first_step ? 0.0 : buffer),
          state + buffer + copy};
}

}  // namespace tranche::kernels::meta
