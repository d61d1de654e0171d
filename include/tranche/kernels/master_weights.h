#pragma once
/// Master weights in other formats than fp32. matmul.h says how calls run and how long operands stay valid.

#include <cstdint>

#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"

namespace tranche::kernels {

/// The way from an updated weight in fp32 to the one in fewer bits.
enum class WeightRounding : std::uint8_t {
  nearest_even,  ///< IEEE's, as kernels::cast
  half_away,     ///< to bf16, halves away from zero
  stochastic     ///< to bf16, up or down with the probability that makes the mean exact
};

/// Draws of stochastic rounding depend on it, on the tensor and on the element.
struct RoundingKey {
  std::uint64_t seed = 0;
  std::int64_t step = 0;  ///< number of the applied update
};

/// `high` (bf16) = `values` (fp32) rounded to nearest, halves away from zero, and `low` (uint16) = their
/// lower 16 bits, from which join_halves() restores the values bit for bit; NaNs become quiet. `low` may have
/// null data: nothing is written there.
void split_halves(Stream& stream, const ConstTensorView& values, const TensorView& high,
                  const TensorView& low);

/// `values` (fp32) = what split_halves() took apart.
void join_halves(Stream& stream, const ConstTensorView& high, const ConstTensorView& low,
                 const TensorView& values);

}  // namespace tranche::kernels
