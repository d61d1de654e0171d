#include "tranche/core/dtype.h"
#include "tests/core/rounds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <string>

#include "tranche/core/error.h"
#include "tranche/core/random.h"

namespace tranche {
namespace {

std::uint32_t bits_of(float value) {
  return std::bit_cast<std::uint32_t>(value);
}
float float_of(std::uint32_t bits) {
  return std::bit_cast<float>(bits);
}

/// The value of a 16-bit format with `mantissa` stored bits and the given smallest normal exponent. It
/// follows the definition of IEEE formats in double arithmetic, which is exact for all of them. The magnitude
/// is neither infinity nor NaN.
double value_of(std::uint32_t magnitude, int mantissa, int least_exponent) {
  const auto exponent = static_cast<int>(magnitude >> mantissa);
  const auto fraction = static_cast<double>(magnitude & ((1u << mantissa) - 1));
  const double one = std::ldexp(1.0, mantissa);
  if (exponent == 0) return std::ldexp(fraction / one, least_exponent);
  return std::ldexp(1.0 + fraction / one, least_exponent + exponent - 1);
}

/// Rounds slowly: finds the two neighbours in the ordered list of all finite magnitudes by bisection and
/// takes the nearer one in double, the even one of a tie. The value that would follow the largest number
/// represents infinity.
std::uint16_t round_slowly(float value, int mantissa, int least_exponent) {
  const std::uint32_t infinity = ((1u << (15 - mantissa)) - 1) << mantissa;
  const std::uint32_t sign = std::signbit(value) ? 0x8000u : 0;
  if (std::isnan(value)) {
    const std::uint32_t payload = (bits_of(value) & 0x007fffffu) >> (23 - mantissa);
    return static_cast<std::uint16_t>(sign | infinity | (1u << (mantissa - 1)) | payload);
  }
  if (std::isinf(value)) return static_cast<std::uint16_t>(sign | infinity);
  const double magnitude = std::fabs(static_cast<double>(value));
  std::uint32_t low = 0;
  std::uint32_t high = infinity;  // its value continues the sequence: twice the largest power of two
  while (high - low > 1) {
    const std::uint32_t middle = (low + high) / 2;
    (value_of(middle, mantissa, least_exponent) <= magnitude ? low : high) = middle;
  }
  const double below = magnitude - value_of(low, mantissa, least_exponent);
  const double above = value_of(high, mantissa, least_exponent) - magnitude;
  const bool up = above < below || (above == below && high % 2 == 0);
  return static_cast<std::uint16_t>(sign | (up ? high : low));
}

std::uint16_t half_slowly(float value) {
  return round_slowly(value, 10, -14);
}
std::uint16_t bfloat_slowly(float value) {
  return round_slowly(value, 7, -126);
}

/// Counts differences instead of making one assertion per value, because millions are compared.
struct Comparison {
  std::int64_t wrong = 0;
  std::string first;
  void check(float value) {
    note(value, "fp16", to_float16(value).bits, half_slowly(value));
    note(value, "bf16", to_bfloat16(value).bits, bfloat_slowly(value));
  }
  void note(float value, const char* format, unsigned got, unsigned wanted) {
    if (got == wanted) return;
    if (wrong++ == 0) {
      first = std::string(format) + " of fp32 bits " + std::to_string(bits_of(value)) + " is " +
              std::to_string(got) + ", should be " + std::to_string(wanted);
    }
  }
};

TEST(Float16, WidensEveryPatternExactly) {
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const float wide = to_float(float16{static_cast<std::uint16_t>(bits)});
    const std::uint32_t magnitude = bits & 0x7fffu;
    ASSERT_EQ(std::signbit(wide), (bits & 0x8000u) != 0) << bits;
    if (magnitude > 0x7c00u) {
      ASSERT_EQ(bits_of(wide) & 0x7fffffffu, 0x7fc00000u | (magnitude & 0x3ffu) << 13) << bits;
    } else if (magnitude == 0x7c00u) {
      ASSERT_TRUE(std::isinf(wide)) << bits;
    } else {
      ASSERT_EQ(std::fabs(static_cast<double>(wide)), value_of(magnitude, 10, -14)) << bits;
    }
  }
}

TEST(Float16, EveryPatternSurvivesTheRoundTrip) {
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const bool nan = (bits & 0x7fffu) > 0x7c00u;
    const std::uint32_t wanted = nan ? bits | 0x0200u : bits;
    ASSERT_EQ(to_float16(to_float(float16{static_cast<std::uint16_t>(bits)})).bits, wanted) << bits;
  }
}

TEST(Bfloat16, EveryPatternSurvivesTheRoundTrip) {
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const float wide = to_float(bfloat16{static_cast<std::uint16_t>(bits)});
    ASSERT_EQ(bits_of(wide), bits << 16);
    const bool nan = (bits & 0x7fffu) > 0x7f80u;
    const std::uint32_t wanted = nan ? bits | 0x0040u : bits;
    ASSERT_EQ(to_bfloat16(wide).bits, wanted) << bits;
  }
}

TEST(Conversions, KnownValues) {
  static_assert(to_float16(1.0f).bits == 0x3c00u && to_bfloat16(1.0f).bits == 0x3f80u);
  static_assert(to_float(float16{0x0001}) == 0x1p-24f && to_float(float16{0x7bff}) == 65504.0f);
  EXPECT_EQ(to_float16(65504.0f).bits, 0x7bffu);
  EXPECT_EQ(to_float16(std::nextafter(65520.0f, 0.0f)).bits, 0x7bffu);
  EXPECT_EQ(to_float16(65520.0f).bits, 0x7c00u);
  EXPECT_EQ(to_float16(-65520.0f).bits, 0xfc00u);
  EXPECT_EQ(to_float16(0x1p-24f).bits, 0x0001u);
  EXPECT_EQ(to_float16(0x1p-25f).bits, 0x0000u);
  EXPECT_EQ(to_float16(std::nextafter(0x1p-25f, 1.0f)).bits, 0x0001u);
  EXPECT_EQ(to_float16(0x1.8p-24f).bits, 0x0002u);
  EXPECT_EQ(to_float16(-0.0f).bits, 0x8000u);
  EXPECT_EQ(to_float16(0x1.ffep-15f).bits, 0x0400u);  // the upper tie of the largest subnormal becomes normal
  EXPECT_EQ(to_bfloat16(std::numeric_limits<float>::max()).bits, 0x7f80u);
  EXPECT_EQ(to_bfloat16(float_of(0x7f7f7fffu)).bits, 0x7f7fu);
  EXPECT_EQ(to_bfloat16(-0.0f).bits, 0x8000u);
  // A NaN whose payload is only in the dropped bits must not become infinity.
  EXPECT_EQ(to_float16(float_of(0x7f800001u)).bits, 0x7e00u);
  EXPECT_EQ(to_bfloat16(float_of(0xff800001u)).bits, 0xffc0u);
}

TEST(Conversions, AllBoundariesMatchTheSlowReference) {
  // Tests a few fp32 numbers on each side of every 16-bit number and of every midpoint between two of them.
  // The midpoints of both formats are checked for both.
  Comparison comparison;
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const std::uint32_t half = bits_of(to_float(float16{static_cast<std::uint16_t>(bits)}));
    for (const std::uint32_t base : {half, half + 0x1000u, bits << 16, (bits << 16) + 0x8000u}) {
      for (const std::uint32_t step : {0xffffffffu, 0u, 1u}) comparison.check(float_of(base + step));
    }
  }
  // Midpoints of fp16 subnormals lie at odd multiples of 2^-25.
  for (int odd = 1; odd < 2050; odd += 2) {
    const float middle = std::ldexp(static_cast<float>(odd), -25);
    for (const float value : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 1.0f)}) {
      comparison.check(value);
      comparison.check(-value);
    }
  }
  EXPECT_EQ(comparison.wrong, 0) << comparison.first;
}

TEST(Conversions, RandomPatternsMatchTheSlowReference) {
  Comparison comparison;
  const RandomKey anywhere{1, RandomPurpose::test, 0};
  const RandomKey near_half{1, RandomPurpose::test, 1};
  for (const int round : test::rounds(125)) {
    const auto first = static_cast<std::uint64_t>(round) * 1000;
    for (std::uint64_t block = first; block < first + 1000; ++block) {
      for (const std::uint32_t bits : random_block(anywhere, block)) comparison.check(float_of(bits));
      // Only exponents from 2^-27 to 2^17, where fp16 is neither zero nor infinite.
      for (const std::uint32_t bits : random_block(near_half, block)) {
        const std::uint32_t exponent = 100 + (bits >> 23 & 0xffu) % 45;
        comparison.check(float_of((bits & 0x807fffffu) | exponent << 23));
      }
    }
  }
  EXPECT_EQ(comparison.wrong, 0) << comparison.first;
}

TEST(DataTypes, NamesAndSizes) {
  const std::array all{DataType::float32, DataType::bfloat16, DataType::float16, DataType::float64,
                       DataType::int32,   DataType::int64,    DataType::uint16,  DataType::uint8};
  for (const DataType dtype : all) EXPECT_EQ(parse_data_type(name_of(dtype)), dtype) << name_of(dtype);
  EXPECT_EQ(name_of(DataType::bfloat16), "bf16");
  EXPECT_EQ(parse_data_type("float32"), DataType::float32);
  EXPECT_EQ(parse_data_type("bfloat16"), DataType::bfloat16);
  EXPECT_EQ(parse_data_type("float16"), DataType::float16);
  EXPECT_EQ(parse_data_type("half"), DataType::float16);
  EXPECT_EQ(parse_data_type("float64"), DataType::float64);
  EXPECT_EQ(size_of(data_type_of<double>()), 8);
  EXPECT_EQ(size_of(data_type_of<std::int64_t>()), 8);
  EXPECT_EQ(size_of(data_type_of<float>()), 4);
  EXPECT_EQ(size_of(data_type_of<std::int32_t>()), 4);
  EXPECT_EQ(size_of(data_type_of<bfloat16>()), 2);
  EXPECT_EQ(size_of(data_type_of<float16>()), 2);
  EXPECT_EQ(size_of(data_type_of<std::uint16_t>()), 2);
  EXPECT_EQ(size_of(data_type_of<std::uint8_t>()), 1);
  EXPECT_TRUE(is_floating(DataType::float16));
  EXPECT_FALSE(is_floating(DataType::uint16));
}

TEST(DataTypes, UnknownNamesAreRefused) {
  try {
    (void)parse_data_type("fp8");
    FAIL();
  } catch (const ConfigurationError& error) {
    EXPECT_EQ(error.message(),
              "unknown data type 'fp8'; accepted are fp32, bf16, fp16, fp64, int32, int64, uint16, uint8, "
              "float32, bfloat16, float16, half, float64");
  }
  try {
    (void)name_of(static_cast<DataType>(99));
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(error.message(), "no data type has the number 99");
  }
}

}  // namespace
}  // namespace tranche
