#pragma once
/// Dropout masks; shared by dropout() and attention so that both draw the same way.

#include <cmath>
#include <cstdint>

#include "tranche/core/random.h"
#include "tranche/kernels/elementwise.h"

namespace tranche::kernels::cpu {

/// The mask of one (seed, step, site). Cheap to make and copy; drawing needs no state, so any thread may ask
/// for any elements in any order.
class DropoutMask {
 public:
  /// `options.probability` is in [0, 1); options.samples is not looked at.
  explicit DropoutMask(const DropoutOptions& options)
      : seed_(mix(options.seed + options.step * 0x9e3779b97f4a7c15u)),
        site_(std::uint64_t{options.site} << 40),
        threshold_(static_cast<std::uint32_t>(std::llround(std::ldexp(double{options.probability}, 32)))),
        scale_(1.0f / (1.0f - options.probability)) {}

  /// Factor of kept elements, 1 / (1 - probability).
  float scale() const { return scale_; }
  /// Whether this element of this global sample is kept.
  bool keep(std::int64_t sample, std::int64_t element) const {
    return random_bits(key(sample), static_cast<std::uint64_t>(element)) >= threshold_;
  }
  /// factors[i] = keep(sample, first_element + i) ? scale() : 0. The fast way to many elements.
  void factors(std::int64_t sample, std::int64_t first_element, std::int64_t count, float* factors) const;

 private:
  /// A bijection (the finalizer of SplitMix64), so the steps of one seed have keys of their own.
  static constexpr std::uint64_t mix(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  /// One stream of draws for each site and sample: they never meet while samples stay below 2^40 and sites
  /// below 2^24.
  RandomKey key(std::int64_t sample) const {
    return {seed_, RandomPurpose::dropout, site_ + static_cast<std::uint64_t>(sample)};
  }

  std::uint64_t seed_;
  std::uint64_t site_;
  std::uint32_t threshold_;  ///< draws below it are dropped
  float scale_;
};

}  // namespace tranche::kernels::cpu
