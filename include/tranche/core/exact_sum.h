#pragma once
/// Sums without rounding. The result depends only on the set of summands: neither on their order, nor on
/// their distribution over blocks, threads and ranks.

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace tranche {

/// A fixed-point number: the sum over i of limbs[i] * 2^(lowest_exponent + 32 i). A limb has 64 bits and
/// receives 32 bits of each summand, so carries wait until normalize() (Kulisch's long accumulator; the
/// carry-save limbs are those of R. M. Neal, Fast Exact Summation Using Small and Large Superaccumulators,
/// 2015, section 3). At most 2^30 additions may pass between two calls of normalize(). It is plain memory:
/// kernels write the limbs, and ranks send them.
template <int lowest, int count>
struct ExactSum {
  static constexpr int lowest_exponent = lowest;
  static constexpr int limb_count = count;
  /// The highest limb of a finite sum stays below this value.
  static constexpr std::int64_t infinite = std::int64_t{1} << 40;
  std::int64_t limbs[count] = {};

  /// Adds integer * 2^exponent. The exponent is at least lowest_exponent and below
  /// lowest_exponent + 32 (limb_count - 2).
  constexpr void add(std::int64_t integer, int exponent) {
    const int position = exponent - lowest_exponent, shift = position % 32;
    std::int64_t* const limb = limbs + position / 32;
    const std::uint64_t low = static_cast<std::uint64_t>(integer) << shift;
    limb[0] += static_cast<std::int64_t>(low & 0xffffffff);
    limb[1] += static_cast<std::int64_t>(low >> 32);
    limb[2] += shift == 0 ? integer >> 63 : integer >> (64 - shift);
  }
  /// Adds a finite number whose last bit is not below lowest_exponent.
  void add(double number) {
    int exponent = 0;
    const double fraction = std::frexp(number, &exponent);  // 53 bits, or fewer where subnormal
    const int last = exponent - 53 < lowest_exponent ? lowest_exponent : exponent - 53;
    add(static_cast<std::int64_t>(std::ldexp(fraction, exponent - last)), last);
  }
  /// Adds the square of an fp32 number, or infinity where that is not finite.
  constexpr void add_square(float number) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(number) & 0x7fffffffu;
    if (bits >= 0x7f800000u) return add_infinity();
    const int exponent = bits < 0x800000u ? 1 : static_cast<int>(bits >> 23);
    const std::uint64_t mantissa = (bits & 0x7fffffu) | (bits < 0x800000u ? 0u : 0x800000u);
    add(static_cast<std::int64_t>(mantissa * mantissa), 2 * exponent - 300);
  }
  /// Records a summand that is not finite, whatever its sign: the sum's value is infinite from then on.
  constexpr void add_infinity() { limbs[limb_count - 1] += infinite; }
  constexpr ExactSum& operator+=(const ExactSum& other) {
    for (int i = 0; i < limb_count; ++i) limbs[i] += other.limbs[i];
    normalize();
    return *this;
  }
  /// Propagates carries: afterwards every limb but the last is in [0, 2^32), so that equal sums have equal
  /// limbs.
  constexpr void normalize() {
    for (int i = 0; i + 1 < limb_count; ++i) {
      limbs[i + 1] += limbs[i] >> 32;
      limbs[i] &= 0xffffffff;
    }
  }
  /// The sum, rounded once, to the nearest fp64 number (ties to even).
  double value() const {
    ExactSum sum = *this;
    sum.normalize();
    if (sum.limbs[limb_count - 1] >= infinite / 2) return std::numeric_limits<double>::infinity();
    const bool negative = sum.limbs[limb_count - 1] < 0;
    if (negative) {
      for (std::int64_t& limb : sum.limbs) limb = -limb;
      sum.normalize();
    }
    int top = limb_count - 1;
    while (top > 0 && sum.limbs[top] == 0) --top;
    // The 64 highest bits are used. One more bit records if any lower bit is set.
    const auto limb = [&sum](int i) { return i < 0 ? 0 : static_cast<std::uint64_t>(sum.limbs[i]); };
    std::uint64_t bits = limb(top) << 32 | limb(top - 1);
    const int shift = bits == 0 ? 0 : std::countl_zero(bits);
    bits = bits << shift | limb(top - 2) >> (32 - shift);
    bool below = (limb(top - 2) << shift & 0xffffffff) != 0;
    for (int i = 0; i < top - 2; ++i) below |= limb(i) != 0;
    const double magnitude =
        std::ldexp(static_cast<double>(bits | (below ? 1 : 0)), lowest_exponent + 32 * (top - 1) - shift);
    return negative ? -magnitude : magnitude;
  }
  friend bool operator==(const ExactSum&, const ExactSum&) = default;
};

/// A sum of squares of fp32 numbers. Each is a multiple of 2^-298 below 2^256; there is room for 2^64 of
/// them.
using SquareSum = ExactSum<-352, 21>;
/// A sum of any finite fp64 numbers.
using LossSum = ExactSum<-1074, 69>;

}  // namespace tranche
