#include "device/packing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>

#include "tests/device/lifetimes.h"
#include "tranche/core/error.h"
#include "tranche/device/memory.h"

namespace tranche {
namespace {

using detail::pack_intervals;
using detail::Packing;
using detail::PackingInterval;
using ::testing::HasSubstr;
using testing_support::random_lifetimes;
using testing_support::step_lifetimes;
using testing_support::StepShape;

// Checks a packing independently of the packer: sweeps over bytes instead of times.
void expect_valid(const std::vector<PackingInterval>& intervals, const Packing& packing) {
  ASSERT_EQ(packing.offsets.size(), intervals.size());
  std::vector<std::pair<std::int64_t, std::int64_t>> changes;
  for (std::size_t i = 0; i < intervals.size(); ++i) {
    EXPECT_EQ(packing.offsets[i] % memory_alignment, 0);
    EXPECT_GE(packing.offsets[i], 0);
    if (intervals[i].begin < intervals[i].end) {
      EXPECT_LE(packing.offsets[i] + intervals[i].bytes, packing.bytes);
      changes.emplace_back(intervals[i].begin, aligned_bytes(intervals[i].bytes));
      changes.emplace_back(intervals[i].end, -aligned_bytes(intervals[i].bytes));
    }
  }
  std::sort(changes.begin(), changes.end());
  std::int64_t live = 0, peak = 0;
  for (const auto& change : changes) peak = std::max(peak, live += change.second);
  EXPECT_EQ(packing.live_peak, peak);
  EXPECT_GE(packing.bytes, peak);

  std::vector<std::size_t> order(intervals.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return packing.offsets[a] < packing.offsets[b]; });
  for (std::size_t a = 0; a < order.size(); ++a) {
    const PackingInterval& lower = intervals[order[a]];
    for (std::size_t b = a + 1; b < order.size(); ++b) {
      const PackingInterval& upper = intervals[order[b]];
      if (packing.offsets[order[b]] >= packing.offsets[order[a]] + lower.bytes) break;
      const bool together = std::max(lower.begin, upper.begin) < std::min(lower.end, upper.end);
      ASSERT_FALSE(together && upper.bytes > 0)
          << "intervals " << order[a] << " and " << order[b] << " share bytes while both live";
    }
  }
}

double ratio(const Packing& packing) {
  return packing.live_peak == 0 ? 1.0
                                : static_cast<double>(packing.bytes) / static_cast<double>(packing.live_peak);
}

TEST(Packing, EmptyAndTrivial) {
  const Packing nothing = pack_intervals({});
  EXPECT_EQ(nothing.bytes, 0);
  EXPECT_EQ(nothing.live_peak, 0);

  const std::vector<PackingInterval> trivial{{0, 5, 0}, {1, 1, 100}, {0, 3, 1}, {3, 9, 257}, {2, 3, 256}};
  const Packing packing = pack_intervals(trivial);
  expect_valid(trivial, packing);
  EXPECT_EQ(packing.live_peak, 512);
  EXPECT_EQ(packing.bytes, 512);
}

TEST(Packing, NamesBadIntervals) {
  const auto text_of = [](std::vector<PackingInterval> intervals) {
    try {
      pack_intervals(intervals);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string("nothing was thrown");
  };
  EXPECT_THAT(text_of({{0, 1, 1}, {0, 1, -7}}), HasSubstr("packing interval 1 has -7 bytes"));
  EXPECT_THAT(text_of({{4, 3, 1}}), HasSubstr("packing interval 0 ends at 3, before it begins at 4"));
}

TEST(Packing, EndIsExclusive) {
  const std::vector<PackingInterval> intervals{{0, 4, 1000}, {4, 8, 1000}, {8, 12, 1000}};
  EXPECT_EQ(pack_intervals(intervals).bytes, 1024);
}

// A greedy choice by size alone places this one badly; the best packing must still be found.
TEST(Packing, FindsTheBestOfSmallProblems) {
  constexpr std::int64_t unit = memory_alignment;
  const std::vector<PackingInterval> nested{{0, 10, 3 * unit}, {2, 9, unit},      {3, 5, 4 * unit},
                                            {5, 8, 4 * unit},  {9, 14, 5 * unit}, {10, 12, 3 * unit}};
  const Packing packing = pack_intervals(nested);
  expect_valid(nested, packing);
  EXPECT_EQ(packing.bytes, packing.live_peak);
}

TEST(Packing, EqualMicroBatchesGetEqualPlaces) {
  StepShape shape;
  shape.blocks = 5;
  shape.depth = 2;
  const auto one = step_lifetimes(shape);
  shape.micro_batches = 3;
  const auto three = step_lifetimes(shape);
  const Packing packed_one = pack_intervals(one);
  const Packing packed_three = pack_intervals(three);
  EXPECT_EQ(packed_one.bytes, packed_three.bytes);
  for (std::size_t i = 0; i < three.size(); ++i) {
    ASSERT_EQ(packed_three.offsets[i], packed_one.offsets[i % one.size()]) << "interval " << i;
  }
}

TEST(Packing, WhatLivesThroughEverythingCostsNothingExtra) {
  StepShape shape;
  shape.blocks = 4;
  shape.micro_batches = 2;
  auto intervals = step_lifetimes(shape);
  const Packing without = pack_intervals(intervals);
  const std::int64_t last = intervals.size() * 2;
  intervals.insert(intervals.begin() + 7, {-1, last, 12345});
  const Packing with = pack_intervals(intervals);
  expect_valid(intervals, with);
  EXPECT_EQ(with.bytes, without.bytes + aligned_bytes(12345));
}

struct StepCase {
  StepShape shape;
  std::string line;
};

// Every kind of step: stack-like activations, recomputation, gather windows of depth 1 to 3 in both
// directions, gradient slots, and communication buffers that outlive them; sizes from tiny models to GPT-2
// XL.
std::vector<StepCase> step_cases() {
  std::vector<StepCase> cases;
  for (const int blocks : {1, 2, 5, 12, 48}) {
    for (const bool checkpointing : {false, true}) {
      for (const int depth : {0, 1, 2, 3}) {
        for (const auto& [width, tokens, vocabulary] :
             {std::tuple<std::int64_t, std::int64_t, std::int64_t>{64, 1024, 256},
              {768, 512, 50257},
              {1600, 8192, 50257}}) {
          StepShape shape;
          shape.blocks = blocks;
          shape.checkpointing = checkpointing;
          shape.depth = depth;
          shape.wires_in_flight = depth == 0 ? 1 : depth;
          shape.width = width;
          shape.tokens = tokens;
          shape.heads = std::max<std::int64_t>(1, width / 64);
          shape.vocabulary = vocabulary;
          cases.push_back({shape, "blocks " + std::to_string(blocks) + " checkpointing " +
                                      std::to_string(checkpointing) + " depth " + std::to_string(depth) +
                                      " width " + std::to_string(width) + " tokens " +
                                      std::to_string(tokens)});
        }
      }
    }
  }
  return cases;
}

TEST(Packing, StepsOfTrainingWithinTwoPercent) {
  double worst = 0;
  for (const StepCase& test : step_cases()) {
    SCOPED_TRACE(test.line);
    const auto intervals = step_lifetimes(test.shape);
    const Packing packing = pack_intervals(intervals);
    expect_valid(intervals, packing);
    EXPECT_LE(ratio(packing), 1.02);
    worst = std::max(worst, ratio(packing));
  }
  RecordProperty("worst_ratio", std::to_string(worst));
}

// 48 blocks and four micro-batches make thousands of intervals; the search uses one micro-batch.
TEST(Packing, LargeStepsAreNoWorseAndRepeatable) {
  StepShape shape;
  shape.blocks = 48;
  shape.micro_batches = 4;
  shape.depth = 2;
  shape.wires_in_flight = 2;
  const auto intervals = step_lifetimes(shape);
  ASSERT_GT(intervals.size(), 5000u);
  const Packing first = pack_intervals(intervals);
  expect_valid(intervals, first);
  EXPECT_LE(ratio(first), 1.02);
  const Packing second = pack_intervals(intervals);
  EXPECT_EQ(first.offsets, second.offsets);
}

// Two percent are not guaranteed here, because the live peak is not reachable in general. Greedy placement
// stays within a quarter of it on such draws; the search must do at least as well on every one.
TEST(Packing, RandomLifetimesAreValidAndNotFarOff) {
  for (const int count : {1, 2, 3, 7, 31, 64, 257, 1000}) {
    for (std::uint64_t seed = 1; seed <= 4; ++seed) {
      for (const std::int64_t span :
           {std::int64_t{1}, std::int64_t{count} / 4 + 1, std::int64_t{4} * count}) {
        SCOPED_TRACE("random_lifetimes(" + std::to_string(seed) + ", " + std::to_string(count) + ", " +
                     std::to_string(span) + ")");
        const auto intervals = random_lifetimes(seed, count, span);
        const Packing packing = pack_intervals(intervals);
        expect_valid(intervals, packing);
        EXPECT_LE(ratio(packing), 1.25);
      }
    }
  }
}

}  // namespace
}  // namespace tranche
