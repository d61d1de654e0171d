#pragma once
#include "kernels/meta/cost.h"
#include "tranche/kernels/reduction.h"

namespace tranche::kernels::meta {

inline Cost ordered_sum(std::size_t pieces, DataType piece_dtype, bool accumulate, const TensorView& out) {
  const auto elements = static_cast<double>(out.elements());
  const auto read = static_cast<double>(pieces) * static_cast<double>(size_of(piece_dtype));
  const auto held = static_cast<double>(out.bytes());
  return {elements * (static_cast<double>(pieces) - (accumulate ? 0.0 : 1.0)),
          elements * read + (accumulate ? held : 0.0), held};
}

inline Cost rounded_sum(const ConstTensorView& source, bool accumulate, const TensorView& out) {
  return ordered_sum(1, source.dtype, accumulate, out);
}

inline Cost gradient_statistics(const ConstTensorView& gradient) {
  return {2.0 * static_cast<double>(gradient.elements()), static_cast<double>(gradient.bytes()),
          static_cast<double>(sizeof(GradientStatistics))};
}

/// It does only integer work.
inline Cost add_digest(const ConstTensorView& values) {
  return {0.0, static_cast<double>(values.bytes()), static_cast<double>(sizeof(Digest))};
}

}  // namespace tranche::kernels::meta
