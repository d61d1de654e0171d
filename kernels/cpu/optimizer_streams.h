#pragma once
/// The operands of an optimizer's pass, as untyped views and as pointers of one combination of dtypes, and
/// the figures of its way through memory. Internal to optimizer_update.cpp.

#include <cstdint>

#include "kernels/cpu/optimizer_update.h"
#include "tranche/core/tensor_view.h"
#include "tranche/kernels/optimizer_update.h"

namespace tranche::kernels::cpu {

/// Ranges of at least this many elements write their weights with non-temporal stores: such a range moves so
/// much data (28 bytes an element, 7 MiB) that its first weights are evicted from the caches before the last
/// are written.
inline constexpr std::int64_t streaming_elements = 262144;

/// `second` and `weight` may be absent; so may `first`, of SGD without momentum.
struct UpdateViews {
  ConstTensorView gradient;
  TensorView master, first, second, weight;
  UpdateTuning tuning;
};

template <class Gradient, class Moment>
struct UpdateStreams {
  const Gradient* gradient;
  float* master;
  Moment *first, *second;
  void* weight;
  DataType weight_type;
  std::int64_t ahead;  ///< UpdateTuning::prefetch_bytes
};

template <class Gradient, class Moment>
UpdateStreams<Gradient, Moment> streams_of(const UpdateViews& views) {
  return {static_cast<const Gradient*>(views.gradient.data),
          static_cast<float*>(views.master.data),
          static_cast<Moment*>(views.first.data),
          static_cast<Moment*>(views.second.data),
          views.weight.data,
          views.weight.dtype,
          views.tuning.prefetch_bytes};
}

}  // namespace tranche::kernels::cpu
