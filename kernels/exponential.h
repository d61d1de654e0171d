#pragma once
/// The exponential of one element: the scalar form of cpu/exponential-inl.h (the same bits where contraction
/// is off), which GPUs compute for fp32.

#include <bit>
#include <cstdint>

namespace tranche::kernels {

/// exp(x) for x in [-80, 80], error within 2 units in the last place: 2^n times a polynomial on
/// [-ln 2 / 2, ln 2 / 2] (coefficients of Cephes' expf).
constexpr float exponential_element(float x) {
  const float rounder = 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer, which is then in the low bits
  const float shifted = x * 1.44269504088896341f + rounder;
  const float n = shifted - rounder;
  float r = x - n * 0.693359375f;  // ln 2 in two parts; the first product is exact
  r = r - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * (r * r) + r) + 1.0f;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(p) +
                              (std::bit_cast<std::uint32_t>(shifted) << 23));
}

/// 2^t with a relative error of 4e-6, for results in bf16: infinite from 128 on; for large negative t, any
/// number that vanishes beside 1. On [-1/2, 1/2] it is a polynomial that is 1 at 0.
constexpr float coarse_power_of_two_element(float t) {
  const float rounder = 12582912.0f;
  const float bounded = t > 128.0f ? 128.0f : t < -120.0f ? -120.0f : t;
  const float shifted = bounded + rounder;
  const float f = bounded - (shifted - rounder);
  float p = 9.78291221e-3f;
  p = p * f + 5.59768826e-2f;
  p = p * f + 2.40207106e-1f;
  p = p * f + 6.93113625e-1f;
  p = p * f + 1.0f;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(p) +
                              (std::bit_cast<std::uint32_t>(shifted) << 23));
}

}  // namespace tranche::kernels
