#pragma once
#include <cstdint>

#include "kernels/meta/cost.h"
#include "tranche/core/tensor_view.h"

namespace tranche::kernels::meta {

/// Per pair: the angle 1, its cosine and its sine 14 each.
inline Cost rope_table_cost(const TensorView& table, const ConstTensorView& positions) {
  const double pairs = static_cast<double>(table.elements()) / 2;
  const double read = positions.shape.rank() == 0 ? 0.0 : static_cast<double>(positions.bytes());
  return {29.0 * pairs, read, static_cast<double>(table.bytes())};
}

/// 6 operations per pair; a row's angles are read once for all its heads.
inline Cost rope_cost(const ConstTensorView& table, std::int64_t heads, DataType dtype) {
  const double elements = static_cast<double>(table.elements()) * static_cast<double>(heads);
  const double bytes = elements * static_cast<double>(size_of(dtype));
  return {3.0 * elements, bytes + static_cast<double>(table.bytes()), bytes};
}

}  // namespace tranche::kernels::meta
