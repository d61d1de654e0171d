#include "tranche/models/sampling.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace tranche::models {
namespace {

const std::vector<float> logits{0.5f, -1.0f, 2.0f, 2.0f, -30.0f, 1.0f, 0.0f};

std::vector<int> histogram(const SamplingOptions& options, int draws) {
  std::vector<int> counts(logits.size(), 0);
  for (int i = 0; i < draws; ++i) ++counts[static_cast<std::size_t>(draw_token(logits, options, i))];
  return counts;
}

TEST(TokenSampler, ZeroTemperatureIsTheFirstLikeliest) {
  for (std::int64_t position = 0; position < 20; ++position)
    EXPECT_EQ(draw_token(logits, {0, 0, 1, 1}, position), 2);
}

TEST(TokenSampler, DrawsAreThoseOfSoftmax) {
  for (const double temperature : {0.5, 1.0, 3.0}) {
    constexpr int draws = 40000;
    const std::vector<int> counts = histogram({temperature, 0, 1, 99}, draws);
    double sum = 0;
    for (const float logit : logits) sum += std::exp(logit / temperature);
    for (std::size_t i = 0; i < logits.size(); ++i) {
      const double p = std::exp(logits[i] / temperature) / sum;
      // The bound is five standard deviations of a binomial count; the draws are the same in every run.
      EXPECT_NEAR(counts[i], draws * p, 5 * std::sqrt(draws * p * (1 - p)) + 1) << i << " at " << temperature;
    }
  }
}

TEST(TokenSampler, TopKLeavesOutTheRest) {
  const std::vector<int> two = histogram({5, 2, 1, 7}, 2000), three = histogram({5, 3, 1, 7}, 2000);
  for (const std::size_t i : {0u, 1u, 4u, 5u, 6u}) EXPECT_EQ(two[i], 0);
  EXPECT_GT(two[2], 900);
  EXPECT_GT(two[3], 900);
  EXPECT_GT(three[5], 300);
  EXPECT_EQ(three[0] + three[1] + three[4] + three[6], 0);
  // Among equal values the first is drawn; a top-k above the vocabulary has no effect.
  for (std::int64_t position = 0; position < 50; ++position) {
    EXPECT_EQ(draw_token(logits, {5, 1, 1, 7}, position), 2);
    EXPECT_EQ(draw_token(logits, {5, 100, 1, 7}, position), draw_token(logits, {5, 0, 1, 7}, position));
  }
}

TEST(TokenSampler, TopPLeavesTheLeastThatHaveTheProbability) {
  // Probabilities at temperature 1: 0.36 of tokens 2 and 3 each, 0.13 of 5, 0.08 of 0, 0.05 of 6, 0.02 of 1.
  const auto drawn = [](double top_p, std::int64_t top_k = 0) {
    const std::vector<int> counts = histogram({1, top_k, top_p, 7}, 4000);
    std::vector<std::size_t> tokens;
    for (std::size_t i = 0; i < counts.size(); ++i) {
      if (counts[i] > 0) tokens.push_back(i);
    }
    return tokens;
  };
  EXPECT_EQ(drawn(0.01), (std::vector<std::size_t>{2})) << "the first of equals, and always one";
  EXPECT_EQ(drawn(0.3), (std::vector<std::size_t>{2}));
  EXPECT_EQ(drawn(0.5), (std::vector<std::size_t>{2, 3}));
  EXPECT_EQ(drawn(0.75), (std::vector<std::size_t>{2, 3, 5}));
  EXPECT_EQ(drawn(0.9), (std::vector<std::size_t>{0, 2, 3, 5}));
  EXPECT_EQ(drawn(0.75, 2), (std::vector<std::size_t>{2, 3})) << "of the top two";
  for (std::int64_t position = 0; position < 50; ++position) {
    EXPECT_EQ(draw_token(logits, {1, 0, 1, 7}, position), draw_token(logits, {1, 7, 1 - 1e-16, 7}, position));
  }
}

TEST(TokenSampler, IsAFunctionOfSeedAndPosition) {
  std::vector<std::int32_t> first, again, other;
  for (std::int64_t i = 0; i < 50; ++i) {
    first.push_back(draw_token(logits, {1, 0, 1, 3}, i));
    again.push_back(draw_token(logits, {1, 0, 1, 3}, i));
    other.push_back(draw_token(logits, {1, 0, 1, 4}, i));
  }
  EXPECT_EQ(first, again);
  EXPECT_NE(first, other);
}

}  // namespace
}  // namespace tranche::models
