#pragma once
#include "kernels/meta/cost.h"
#include "tranche/kernels/quantization.h"

namespace tranche::kernels::meta {

/// A maximum, a product and a rounding per element.
inline Cost quantize(const ConstTensorView& values) {
  return {3.0 * static_cast<double>(values.elements()), static_cast<double>(values.bytes()),
          static_cast<double>(quantized_bytes(values.elements()))};
}

/// A product per element of each rank, and the additions.
inline Cost quantized_sum(int ranks, bool accumulate, const TensorView& out) {
  const auto elements = static_cast<double>(out.elements());
  const auto held = static_cast<double>(out.bytes());
  return {elements * (2.0 * ranks - (accumulate ? 0.0 : 1.0)),
          ranks * static_cast<double>(quantized_bytes(out.elements())) + (accumulate ? held : 0.0), held};
}

}  // namespace tranche::kernels::meta
