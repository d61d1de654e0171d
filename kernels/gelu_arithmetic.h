#pragma once
/// GELU of one element: the scalar form of the vector code in cpu/gelu.cpp (the same bits where contraction
/// is off), which GPUs compute for fp32.
///
/// The tanh form is x / (1 + exp(-2u)) with u = sqrt(2 / pi) (x + 0.044715 x^3): it needs one exponential
/// and, unlike 1 + tanh(u), has no cancellation for negative x.

#include "kernels/exponential.h"

namespace tranche::kernels {

inline constexpr float gelu_two_root = -1.5957691216057308f;     ///< -2 sqrt(2 / pi)
inline constexpr float gelu_two_root_cubic = -0.0713548162726f;  ///< the same times 0.044715

/// exp(-2u), with the argument clamped to the exponential's range; beyond it 1 + exp(-2u) is 1 or the result
/// vanishes.
constexpr float gelu_exponential_of_minus_2u(float x) {
  const float argument = x * (gelu_two_root + gelu_two_root_cubic * (x * x));
  const float below = argument < 80.0f ? argument : 80.0f;
  return exponential_element(below > -80.0f ? below : -80.0f);
}

constexpr float gelu_element(float x) {
  // Below -16 gelu is smaller than every fp32 number; the product gives -0 there, and NaN for -infinity.
  if (x < -16.0f) return x * 0.0f;
  return x / (1.0f + gelu_exponential_of_minus_2u(x));
}

/// gelu' = s + x s (1 - s) 2u', where s = 1 / (1 + e), 1 - s = e s, 2u' = 2 sqrt(2 / pi) (1 + 3 * 0.044715
/// x^2).
constexpr float gelu_derivative_element(float given) {
  // Beyond 16 the derivative is 0 or 1 to the last bit; clamping keeps x^2 finite. NaNs stay NaNs.
  const float x = given > 16.0f ? 16.0f : given < -16.0f ? -16.0f : given;
  const float e = gelu_exponential_of_minus_2u(x);
  const float s = 1.0f / (1.0f + e);
  const float slope = -gelu_two_root - 3.0f * gelu_two_root_cubic * (x * x);
  return s + (x * s) * ((e * s) * slope);
}

}  // namespace tranche::kernels
