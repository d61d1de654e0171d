#include "tranche/kernels/cpu/known_divisor.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>

namespace tranche::kernels::testing {
namespace {

/// The steps of quotient-inl.h, one lane.
float quotient(float x, const cpu::KnownDivisor& by) {
  const float guess = std::fma(x, by.reciprocal_high, x * by.reciprocal_low);
  const float remainder = std::fma(-guess, by.divisor, x);
  return x < INFINITY ? std::fma(remainder, by.reciprocal_high, guess) : x;
}

/// Number of fractions of x, from the first in steps, for which the quotient is not the division's.
int wrong(float y, int first, int step) {
  const cpu::KnownDivisor by(y);
  int count = 0;
  for (int fraction = first; fraction < (1 << 23); fraction += step) {
    const float x = 1.0f + static_cast<float>(fraction) * 0x1p-23f;
    if (quotient(x, by) != x / y) ++count;
  }
  return count;
}

TEST(KnownDivisor, DividesEveryFractionExactly) {
  EXPECT_EQ(wrong(static_cast<float>(std::sqrt(1 - 0.999)), 0, 1), 0);
  EXPECT_EQ(wrong(0x1.fffffep-1f, 0, 1), 0);  // the fraction for which reciprocals by iteration go wrong
}

TEST(KnownDivisor, DividesByManyNumbersExactly) {
  std::mt19937 engine(3);
  for (int i = 0; i < 300; ++i) {
    const float y = std::ldexp(1.0f + static_cast<float>(engine() % (1u << 23)) * 0x1p-23f,
                               -static_cast<int>(engine() % 20));
    EXPECT_EQ(wrong(y, static_cast<int>(engine() % 1009), 1009), 0) << y;
  }
  for (int bits = 0; bits < 64; ++bits) {  // the ends of the fractions
    EXPECT_EQ(wrong(1.0f + static_cast<float>(bits) * 0x1p-23f, bits, 997), 0) << bits;
    EXPECT_EQ(wrong(1.0f - static_cast<float>(bits) * 0x1p-24f, bits, 997), 0) << bits;
  }
}

TEST(KnownDivisor, HoldsAtTheEndsOfItsRange) {
  std::mt19937 engine(4);
  for (const float y : {0x1p-20f, 0x1.fffffep-20f, 0x1.35a3p0f, 0x1.fffffep19f, 0x1p20f}) {
    ASSERT_TRUE(cpu::KnownDivisor::covers(y)) << y;
    const cpu::KnownDivisor by(y);
    for (const int exponent : {-80, -75, 0, 64, 80}) {
      for (int i = 0; i < 1000; ++i) {
        const float x = std::ldexp(1.0f + static_cast<float>(engine() % (1u << 23)) * 0x1p-23f, exponent);
        EXPECT_EQ(quotient(x, by), x / y) << x << " / " << y;
      }
    }
    EXPECT_EQ(std::signbit(quotient(0.0f, by)), false);
    EXPECT_EQ(quotient(0.0f, by), 0.0f);
    EXPECT_TRUE(std::isnan(quotient(NAN, by)));
  }
  for (const float y : {0.0f, -1.0f, 0x1p-21f, 0x1p21f, INFINITY, NAN}) {
    EXPECT_FALSE(cpu::KnownDivisor::covers(y)) << y;
  }
}

TEST(KnownDivisor, AnInfinityStaysOne) {
  for (const float y : {1.0f, 0.03162277f, 0.0547f, 0.7f, 0.9f, 3.0f}) {
    EXPECT_EQ(quotient(INFINITY, cpu::KnownDivisor(y)), INFINITY) << y;
  }
}

}  // namespace
}  // namespace tranche::kernels::testing
