#pragma once
/// The arithmetic of dropout masks, for any device. kernels/elementwise.h documents the key of a draw.

#include <array>
#include <cmath>
#include <cstdint>

#include "core/philox.h"
#include "tranche/kernels/elementwise.h"

namespace tranche::kernels {

/// The mask of one (seed, step, site). It is a plain value without state, so any thread may draw any elements
/// in any order.
struct DropoutDraws {
  std::uint64_t seed = 0;       ///< seed and step, mixed
  std::uint64_t site = 0;       ///< in the subject's upper bits
  std::uint32_t threshold = 0;  ///< draws below it are dropped
  float scale = 1;              ///< factor of kept elements, 1 / (1 - probability)

  /// Each site and sample has one stream of draws: they never meet while samples stay below 2^40 and sites
  /// below 2^24.
  constexpr RandomKey key(std::int64_t sample) const {
    return {seed, RandomPurpose::dropout, site + static_cast<std::uint64_t>(sample)};
  }
  /// The four draws from element 4 * block of a sample on.
  constexpr std::array<std::uint32_t, 4> block(std::int64_t sample, std::int64_t block) const {
    return detail::unchecked_random_block(key(sample), static_cast<std::uint64_t>(block));
  }
  constexpr bool keeps(std::uint32_t draw) const { return draw >= threshold; }
};

/// The finalizer of SplitMix64, a bijection, so the steps of one seed have distinct keys.
constexpr std::uint64_t dropout_mix(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

/// `options.probability` is in [0, 1); options.samples is not read.
inline DropoutDraws dropout_draws(const DropoutOptions& options) {
  return {dropout_mix(options.seed + options.step * 0x9e3779b97f4a7c15u), std::uint64_t{options.site} << 40,
          static_cast<std::uint32_t>(std::llround(std::ldexp(double{options.probability}, 32))),
          1.0f / (1.0f - options.probability)};
}

}  // namespace tranche::kernels
