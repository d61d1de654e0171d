#pragma once
#include "kernels/meta/cost.h"
#include "tranche/core/tensor_view.h"
#include "tranche/kernels/newton_schulz.h"

namespace tranche::kernels::meta {

/// The block is read twice, once for its norm.
inline Cost newton_schulz_begin(DataType dtype, const ConstTensorView& x) {
  const auto elements = static_cast<double>(x.elements());
  return {3 * elements, 2 * elements * static_cast<double>(size_of(dtype)), static_cast<double>(x.bytes())};
}

inline Cost scaled_sum(const ConstTensorView& out) {
  const auto bytes = static_cast<double>(out.bytes());
  return {3 * static_cast<double>(out.elements()), 2 * bytes, bytes};
}

inline Cost newton_schulz_end(DataType dtype, const ConstTensorView& x) {
  const auto elements = static_cast<double>(x.elements());
  return {elements, static_cast<double>(x.bytes()), elements * static_cast<double>(size_of(dtype))};
}

inline Cost few_singular_values(DataType dtype, const MatrixBlock& block, std::size_t steps) {
  const double elements = static_cast<double>(block.rows * block.columns);
  const double bytes = elements * static_cast<double>(size_of(dtype));
  return {4 * elements + newton_schulz_operations(block.rows, block.columns, static_cast<int>(steps)), bytes,
          bytes};
}

}  // namespace tranche::kernels::meta
