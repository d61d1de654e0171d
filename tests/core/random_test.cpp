#include "tranche/core/random.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "tranche/core/error.h"

namespace tranche {
namespace {

using Block = std::array<std::uint32_t, 4>;

constexpr std::uint64_t draws = std::uint64_t{1} << 20;
constexpr double count = static_cast<double>(draws);

RandomKey test_key(std::uint64_t seed, std::uint64_t subject = 0) {
  return {seed, RandomPurpose::test, subject};
}

TEST(Philox, PublishedKnownAnswers) {
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}), (Block{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}));
  EXPECT_EQ(philox4x32({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}),
            (Block{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}));
  EXPECT_EQ(philox4x32({0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}, {0xa4093822u, 0x299f31d0u}),
            (Block{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}));
}

TEST(RandomBits, CounterIsTheDocumentedOne) {
  // Weights drawn from a seed must never change, so this test fixes the mapping from key to counter.
  const RandomKey key{0x0123456789abcdefu, RandomPurpose::dropout, 0xfedcba9876543210u};
  const std::uint64_t block = 0x00a1b2c3d4e5f607u;
  EXPECT_EQ(random_block(key, block),
            philox4x32({0xd4e5f607u, 0x02a1b2c3u, 0x76543210u, 0xfedcba98u}, {0x89abcdefu, 0x01234567u}));
}

TEST(RandomBits, BlocksAreFourConsecutiveElements) {
  const RandomKey key = test_key(7, 3);
  for (const std::uint64_t block : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1} << 30,
                                    std::uint64_t{1} << 32, (std::uint64_t{1} << 56) - 1}) {
    const Block words = random_block(key, block);
    const auto normals = random_normal_block(key, block);
    for (std::uint64_t lane = 0; lane < 4; ++lane) {
      EXPECT_EQ(random_bits(key, 4 * block + lane), words[lane]) << block << " lane " << lane;
      EXPECT_EQ(random_normal(key, 4 * block + lane), normals[lane]) << block << " lane " << lane;
    }
  }
}

TEST(RandomBits, StreamsOfOneSeedNeverShareABlock) {
  // For one seed Philox is a bijection of the counter. So blocks are equal if and only if counters are, and
  // two equal blocks here would be a collision of the mapping rather than chance.
  std::vector<std::uint64_t> numbers{0, 3};
  for (int bit = 0; bit < 64; ++bit) numbers.push_back(std::uint64_t{1} << bit);
  std::set<Block> seen;
  std::size_t made = 0;
  for (const std::uint64_t subject : numbers) {
    for (const std::uint64_t block : numbers) {
      if (block >> 56 != 0) continue;
      for (std::uint32_t purpose : {0u, 1u, 2u, 3u, 4u, 5u, 128u, 255u}) {
        seen.insert(random_block({42, static_cast<RandomPurpose>(purpose), subject}, block));
        ++made;
      }
    }
  }
  EXPECT_EQ(seen.size(), made);
}

TEST(RandomBits, RefusesWhatWouldShareACounter) {
  const auto message_of = [](auto&& function) -> std::string {
    try {
      function();
    } catch (const InvalidArgument& error) {
      return error.message();
    }
    return "nothing was thrown";
  };
  EXPECT_NO_THROW(random_bits(test_key(1), random_stream_length - 1));
  const std::string too_far =
      "random number stream asked for block 72057594037927936 of four; a stream has 2^56 blocks (2^58 "
      "draws), "
      "so part the work by the key's subject";
  EXPECT_EQ(message_of([] { random_bits(test_key(1), random_stream_length); }), too_far);
  EXPECT_EQ(message_of([] { random_uniform(test_key(1), random_stream_length); }), too_far);
  EXPECT_EQ(message_of([] { random_normal(test_key(1), random_stream_length); }), too_far);
  EXPECT_EQ(message_of([] { random_normal_block(test_key(1), random_stream_length / 4); }), too_far);
  EXPECT_EQ(message_of([] {
              random_bits({1, static_cast<RandomPurpose>(256), 0}, 0);
            }),
            "random number purpose 256 does not fit 8 bits");
}

TEST(RandomUniform, IsTheTopBitsOfTheDraw) {
  const RandomKey key = test_key(5);
  for (std::uint64_t i = 0; i < 1000; ++i) {
    const float value = random_uniform(key, i);
    ASSERT_GE(value, 0.0f);
    ASSERT_LT(value, 1.0f);
    ASSERT_EQ(value * 0x1p24f, static_cast<float>(random_bits(key, i) >> 8));
  }
}

TEST(RandomUniform, BucketsAreEven) {
  // Chi-square over 256 buckets has mean 255 and standard deviation sqrt(2 * 255) = 22.6. The numbers are
  // fixed, so the bound of five deviations fails only if the generator changes.
  for (const std::uint64_t seed : {std::uint64_t{0}, std::uint64_t{1}, ~std::uint64_t{0}}) {
    std::array<std::int64_t, 256> buckets{};
    double sum = 0;
    for (std::uint64_t i = 0; i < draws; ++i) {
      const float value = random_uniform(test_key(seed), i);
      ++buckets[static_cast<std::size_t>(value * 256.0f)];
      sum += value;
    }
    double chi_square = 0;
    for (const std::int64_t bucket : buckets) {
      const double expected = count / 256;
      chi_square +=
          (static_cast<double>(bucket) - expected) * (static_cast<double>(bucket) - expected) / expected;
    }
    EXPECT_NEAR(chi_square, 255, 5 * 22.6) << "seed " << seed;
    EXPECT_NEAR(sum / count, 0.5, 5 * std::sqrt(1.0 / 12 / count)) << "seed " << seed;
  }
}

TEST(RandomUniform, NeighbouringStreamsAreUncorrelated) {
  // A correlation of n independent pairs has standard deviation 1 / sqrt(n).
  const auto correlation = [](const RandomKey& a, const RandomKey& b, std::uint64_t lag) {
    constexpr std::uint64_t pairs = 1 << 16;
    double sum = 0;
    for (std::uint64_t i = 0; i < pairs; ++i) {
      sum += (random_uniform(a, i) - 0.5) * (random_uniform(b, i + lag) - 0.5);
    }
    return std::fabs(sum / static_cast<double>(pairs) * 12);
  };
  const double bound = 5.0 / 256;
  EXPECT_LT(correlation(test_key(1), test_key(2), 0), bound);
  EXPECT_LT(correlation(test_key(1, 1), test_key(1, 2), 0), bound);
  EXPECT_LT(correlation(test_key(1), {1, RandomPurpose::dropout, 0}, 0), bound);
  EXPECT_LT(correlation(test_key(1, 2), test_key(2, 1), 0), bound);
  EXPECT_LT(correlation(test_key(1), test_key(1), 1), bound);
}

TEST(RandomNormal, HasTheMomentsOfTheNormal) {
  // Standard deviations of the estimates from n draws: first raw moment 1/sqrt(n), second sqrt(2/n),
  // third sqrt(15/n), fourth sqrt(96/n), correlation of the two of a pair 1/sqrt(n/2). Bounds are five of
  // each.
  const RandomKey key = test_key(11, 5);
  double first = 0;
  double second = 0;
  double third = 0;
  double fourth = 0;
  double partners = 0;
  std::int64_t tail = 0;
  float previous = 0;
  for (std::uint64_t i = 0; i < draws; ++i) {
    const float drawn = random_normal(key, i);
    const double value = drawn;
    ASSERT_LT(std::fabs(value), 6.67) << i;
    first += value;
    second += value * value;
    third += value * value * value;
    fourth += value * value * value * value;
    tail += std::fabs(value) > 3;
    if (i % 2 == 1) partners += value * previous;
    previous = drawn;
  }
  EXPECT_NEAR(first / count, 0, 5 / std::sqrt(count));
  EXPECT_NEAR(second / count, 1, 5 * std::sqrt(2 / count));
  EXPECT_NEAR(third / count, 0, 5 * std::sqrt(15 / count));
  EXPECT_NEAR(fourth / count, 3, 5 * std::sqrt(96 / count));
  EXPECT_NEAR(partners / (count / 2), 0, 5 / std::sqrt(count / 2));
  const double beyond_three = std::erfc(3 / std::sqrt(2.0));
  EXPECT_NEAR(static_cast<double>(tail) / count, beyond_three, 5 * std::sqrt(beyond_three / count));
}

TEST(RandomNormal, TheLeastWordGivesTheLargestNumberNotInfinity) {
  // The first word of this block, found by search, is 0, whose logarithm would be infinite.
  const std::uint64_t index = 4 * std::uint64_t{1844268960};
  ASSERT_EQ(random_bits(test_key(0), index), 0u);
  const double first = random_normal(test_key(0), index);
  const double second = random_normal(test_key(0), index + 1);
  EXPECT_NEAR(std::hypot(first, second), std::sqrt(64 * std::log(2.0)), 1e-5);
}

TEST(RandomNormal, EquallyLikelyBucketsAreEven) {
  // The distribution function maps normal draws to uniform ones: 64 buckets, 63 degrees of freedom, standard
  // deviation sqrt(126) = 11.2.
  std::array<std::int64_t, 64> buckets{};
  constexpr std::uint64_t blocks = 1 << 16;
  for (std::uint64_t block = 0; block < blocks; ++block) {
    for (const float value : random_normal_block(test_key(13), block)) {
      const double uniform = 0.5 * std::erfc(-static_cast<double>(value) / std::sqrt(2.0));
      ++buckets[std::min<std::size_t>(static_cast<std::size_t>(uniform * 64), 63)];
    }
  }
  double chi_square = 0;
  for (const std::int64_t bucket : buckets) {
    const double expected = 4.0 * static_cast<double>(blocks) / 64;
    chi_square +=
        (static_cast<double>(bucket) - expected) * (static_cast<double>(bucket) - expected) / expected;
  }
  EXPECT_NEAR(chi_square, 63, 5 * 11.2);
}

}  // namespace
}  // namespace tranche
