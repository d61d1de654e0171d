#pragma once
#include "kernels/meta/cost.h"
#include "tranche/core/tensor_view.h"

namespace tranche::kernels::meta {

inline Cost split_halves(const ConstTensorView& values, const ConstTensorView& high,
                         const ConstTensorView& low) {
  const double written =
      static_cast<double>(high.bytes()) + (low.data == nullptr ? 0.0 : static_cast<double>(low.bytes()));
  return {0, static_cast<double>(values.bytes()), written};
}

inline Cost join_halves(const ConstTensorView& high, const ConstTensorView& low,
                        const ConstTensorView& values) {
  return {0, static_cast<double>(high.bytes() + low.bytes()), static_cast<double>(values.bytes())};
}

}  // namespace tranche::kernels::meta
