#pragma once
/// Master weights in formats other than fp32. matmul.h describes how calls run and how long operands stay
/// valid.

#include <cstdint>

#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"

namespace tranche::kernels {

/// The rounding from an updated weight in fp32 to fewer bits.
enum class WeightRounding : std::uint8_t {
  nearest_even,  ///< IEEE rounding, as in kernels::cast
  half_away,     ///< to bf16, with ties away from zero
  stochastic     ///< to bf16, up or down with probabilities that make the mean exact
};

/// The key of stochastic rounding's draws, beside the tensor and the element.
struct RoundingKey {
  std::uint64_t seed = 0;
  std::int64_t step = 0;  ///< number of the applied update
};

/// `high` (bf16) = `values` (fp32) rounded to nearest with ties away from zero, and `low` (uint16) = their
/// lower 16 bits, from which join_halves() restores the values bit for bit; NaNs become quiet. `low` may have
/// null data: it is then not written.
void split_halves(Stream& stream, const ConstTensorView& values, const TensorView& high,
                  const TensorView& low);

/// `values` (fp32) = the inverse of split_halves().
void join_halves(Stream& stream, const ConstTensorView& high, const ConstTensorView& low,
                 const TensorView& values);

}  // namespace tranche::kernels
