#pragma once
/// SiLU of one element, x / (1 + exp(-x)), and its derivative: the scalar form of the vector code in
/// cpu/swiglu.cpp (the same bits where contraction is off), which GPUs compute.

#include "kernels/exponential.h"

namespace tranche::kernels {

struct SiluElement {
  float value = 0, derivative = 0;
};

/// `Math` has exponential(x) for x in [-80, 80], and inverse(x). Beyond 80 SiLU is x or below every fp32
/// number, and its derivative 1 or 0, to the last bit. Below -80 the result is -0, and NaN for -infinity.
/// NaNs stay NaNs.
template <class Math>
constexpr SiluElement silu_element(float x) {
  const float bounded = x > 80.0f ? 80.0f : x < -80.0f ? -80.0f : x;
  const float e = Math::exponential(-bounded);
  const float s = Math::inverse(1.0f + e);
  return {x < -80.0f ? x * 0.0f : x * s, s + (bounded * s) * (e * s)};
}

/// The same for results that are rounded to bf16, on CPUs: for very negative x the exponential is infinite,
/// and SiLU -0.
constexpr SiluElement coarse_silu_element(float x) {
  const float bounded = x > 80.0f ? 80.0f : x < -80.0f ? -80.0f : x;
  const float s = 1.0f / (1.0f + coarse_power_of_two_element(x * -1.44269504088896341f));
  return {x * s, s + (bounded * s) * (1.0f - s)};
}

struct AccurateSilu {
  static constexpr float exponential(float x) { return exponential_element(x); }
  static constexpr float inverse(float x) { return 1.0f / x; }
};

}  // namespace tranche::kernels
