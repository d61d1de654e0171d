#pragma once
/// Dropout masks, shared by dropout() and attention so that both make the same draws.

#include <cstdint>

#include "kernels/dropout_draws.h"
#include "tranche/core/random.h"

namespace tranche::kernels::cpu {

/// The mask of one (seed, step, site). It is cheap to make and copy and has no state, so any thread may query
/// any elements in any order.
class DropoutMask {
 public:
  /// `options.probability` is in [0, 1); options.samples is not read.
  explicit DropoutMask(const DropoutOptions& options) : draws_(dropout_draws(options)) {}

  /// Factor of kept elements, 1 / (1 - probability).
  float scale() const { return draws_.scale; }
  /// True when this element of this global sample is kept.
  bool keep(std::int64_t sample, std::int64_t element) const {
    return draws_.keeps(random_bits(draws_.key(sample), static_cast<std::uint64_t>(element)));
  }
  /// factors[i] = keep(sample, first_element + i) ? scale() : 0, computed faster than one by one.
  void factors(std::int64_t sample, std::int64_t first_element, std::int64_t count, float* factors) const;

 private:
  DropoutDraws draws_;
};

}  // namespace tranche::kernels::cpu
