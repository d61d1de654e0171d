#include "pipeline/schedule/simulate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "pipeline/schedule/certificate.h"
#include "pipeline/schedule/generators.h"
#include "pipeline/schedule/pipeline_schedule.h"
#include "pipeline/schedule/text.h"
#include "tests/pipeline/schedule/every_schedule.h"
#include "tranche/core/error.h"

namespace tranche::pipeline {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr double rounding = 1e-9;  // thirds and quarters are added some hundred times

double length_of(const std::string& name, int p, int m, int v = 0) {
  return simulate(generate(name, p, m, v), StageTimes::equal(p)).length;
}

TEST(Simulate, UtilizationOfFourStages) {
  for (const auto& [m, busy, cells] :
       {std::tuple(1, 12.0, 48.0), std::tuple(4, 48.0, 84.0), std::tuple(8, 96.0, 132.0)}) {
    const Simulation run = simulate(generate("afab", 4, m), StageTimes::equal(4));
    EXPECT_EQ(run.length, cells / 4);
    EXPECT_EQ(run.utilization, busy / cells);
  }
}

TEST(Simulate, PeaksOfFourStages) {
  for (const int m : {4, 8, 64}) {
    EXPECT_THAT(peak_activations(generate("1f1b", 4, m)), ElementsAre(4, 3, 2, 1));
    EXPECT_THAT(peak_activations(generate("afab", 4, m)), ElementsAre(m, m, m, m));
  }
  EXPECT_THAT(peak_activations(generate("1f1b", 4, 2)), ElementsAre(2, 2, 2, 1));
  EXPECT_THAT(peak_activations(generate("interleaved", 4, 8, 2)), ElementsAre(11, 9, 7, 5));
  EXPECT_THAT(peak_activations(generate("breadth-first", 4, 8, 2)), ElementsAre(16, 16, 16, 16));
  EXPECT_THAT(peak_activations(generate("zb-h1", 4, 8)), ElementsAre(4, 4, 4, 4));
  EXPECT_THAT(peak_activations(generate("zb-v", 4, 8)), ElementsAre(8, 8, 8, 8));
}

TEST(Simulate, LengthsOfFourStagesAndEightMicroBatches) {
  EXPECT_EQ(length_of("afab", 4, 8), 33);
  EXPECT_EQ(length_of("1f1b", 4, 8), 33);
  EXPECT_EQ(length_of("interleaved", 4, 8, 2), 28.5);
  EXPECT_EQ(length_of("breadth-first", 4, 8, 2), 28.5);
  EXPECT_EQ(length_of("zb-h1", 4, 8), 27);
  EXPECT_EQ(length_of("zb-v", 4, 8), 25.5);
  EXPECT_EQ(length_of("zb-v", 4, 4), 15);  // fewer micro-batches than the V needs to fill
}

TEST(Simulate, OneStageTwiceAsSlow) {
  for (std::size_t slow = 0; slow < 4; ++slow) {
    StageTimes times = StageTimes::equal(4);
    times.forward[slow] = times.input[slow] = times.weight[slow] = 2;
    EXPECT_EQ(simulate(generate("afab", 4, 8), times).length, 57);
    EXPECT_EQ(simulate(generate("1f1b", 4, 8), times).length, 51 + 2 * static_cast<double>(slow));
  }
}

// With equal stages the length is m forward and backward passes (3 each), plus the schedule's bubble.
TEST(Simulate, ClosedForms) {
  test::for_every_schedule(
      8, 8, 4, [](const std::string& name, const PipelineSchedule& schedule, int p, int m, int v) {
        const double length = simulate(schedule, StageTimes::equal(p)).length;
        const std::string what =
            name + " p " + std::to_string(p) + " m " + std::to_string(m) + " v " + std::to_string(v);
        if (name == "afab" || name == "1f1b") {
          EXPECT_EQ(length, (m + p - 1) * 3) << what;
        }
        if ((name == "interleaved" || name == "breadth-first") && m % p == 0) {
          EXPECT_NEAR(length, (m + (p - 1.0) / v) * 3, rounding) << what;
        }
        if (name == "zb-h1" && m >= p) {
          EXPECT_EQ(length, 3 * m + p - 1) << what;
        }
        if (name == "zb-v" && m >= 2 * p - 1) {
          EXPECT_EQ(length, 3 * m + (p - 1) / 2.0) << what;
        }
      });
}

TEST(Simulate, ClosedFormsOfOtherTimes) {
  const double forward = 1, input = 1.25, weight = 0.75;
  for (int p = 1; p <= 8; ++p) {
    for (int m = p; m <= 8; ++m) {
      const double length =
          simulate(generate("zb-h1", p, m), StageTimes::equal(p, forward, input, weight)).length;
      EXPECT_NEAR(length, m * (forward + input + weight) + (p - 1) * (forward + input - weight), rounding);
    }
  }
}

/// No schedule is shorter than its certificate, and these are as short.
TEST(Simulate, NoScheduleIsShorterThanItsCertificate) {
  test::for_every_schedule(
      8, 8, 4, [](const std::string& name, const PipelineSchedule& schedule, int p, int m, int v) {
        const std::string what =
            name + " p " + std::to_string(p) + " m " + std::to_string(m) + " v " + std::to_string(v);
        const double length = simulate(schedule, StageTimes::equal(p)).length;
        const double bound = lower_bounds(schedule, StageTimes::equal(p)).bound();
        EXPECT_GE(length, bound - rounding) << what;
        const bool optimal = name == "afab" || name == "1f1b" || name == "interleaved" ||
                             (name == "breadth-first" && m % p == 0) || (name == "zb-h1" && m >= p) ||
                             (name == "zb-v" && m >= 2 * p - 1);
        if (optimal) {
          EXPECT_NEAR(length, bound, rounding) << what;
        }
        StageTimes uneven = StageTimes::equal(p, 1, 1.5, 0.5);
        for (std::size_t rank = 0; rank < uneven.forward.size(); ++rank) {
          uneven.forward[rank] += 0.25 * static_cast<double>(rank * rank % 5);
          uneven.weight[rank] += 0.5 * static_cast<double>(rank % 3);
        }
        EXPECT_GE(simulate(schedule, uneven).length, lower_bounds(schedule, uneven).bound() - rounding)
            << what;
      });
}

TEST(Simulate, IdleTimeIsStartUpBubbleAndCoolDown) {
  const Simulation run = simulate(generate("1f1b", 4, 8), StageTimes::equal(4));
  for (std::size_t rank = 0; rank < 4; ++rank) {
    const RankTimes& times = run.ranks[rank];
    EXPECT_EQ(times.busy, 24);
    EXPECT_EQ(times.start_up, static_cast<double>(rank));
    EXPECT_EQ(times.cool_down, 2 * static_cast<double>(rank));
    EXPECT_EQ(times.bubble, 9 - 3 * static_cast<double>(rank));
  }
  EXPECT_EQ(run.spans[1].front().start, 1);
  EXPECT_EQ(run.spans[1].front().end, 2);
  EXPECT_EQ(run.spans[0].back().end, 33);
}

TEST(Simulate, ChunksShareTheirRanksTime) {
  StageTimes times = StageTimes::equal(2, 4, 6, 8);
  times.forward[1] = 2;
  const StageTimes chunks = times.by_chunk({0, 1, 1, 0});
  EXPECT_THAT(chunks.forward, ElementsAre(2, 1, 1, 2));
  EXPECT_THAT(chunks.input, ElementsAre(3, 3, 3, 3));
  EXPECT_THAT(chunks.weight, ElementsAre(4, 4, 4, 4));
}

std::string failure(const PipelineSchedule& schedule, const StageTimes& times) {
  try {
    (void)simulate(schedule, times);
  } catch (const InvalidArgument& error) {
    return error.message();
  }
  return "nothing was refused";
}

TEST(Simulate, WhatCannotBeSimulated) {
  const StageTimes times = StageTimes::equal(2);
  // Both ranks wait: rank 0 for the gradient of a forward that it has not run, rank 1 for that forward.
  EXPECT_THAT(failure(read_schedule("0F0,0B1,0F1,0B0\n1F0,1B0,1F1,1B1", "s.csv"), times),
              HasSubstr("does not come to its end: rank 0 waits at 0B1 for ever"));
  EXPECT_THAT(failure(read_schedule("0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1RECV_B0", "s.csv"), times),
              HasSubstr("rank 1 waits at 1RECV_B0"));
  EXPECT_THAT(failure(generate("1f1b", 3, 2), times), HasSubstr("2 times for 3 stages"));
  EXPECT_THAT(failure(generate("1f1b", 2, 2), StageTimes::equal(2, -1)), HasSubstr("negative or not finite"));
  EXPECT_THAT(failure(generate("1f1b", 2, 2), StageTimes::equal(2, std::numeric_limits<double>::quiet_NaN())),
              HasSubstr("negative or not finite"));
  PipelineSchedule wrong = generate("1f1b", 2, 2);
  wrong.ranks[1][0].micro_batch = 7;
  EXPECT_THAT(failure(wrong, times), HasSubstr("1F7 is no action of 2 chunks and 2 micro-batches"));
  wrong.micro_batches = std::int64_t{1} << 60;
  EXPECT_THAT(failure(wrong, times), HasSubstr("8 actions cannot be a schedule of"));
}

TEST(Simulate, OneRankIsNeverIdle) {
  EXPECT_EQ(length_of("afab", 1, 1), 3);
  EXPECT_EQ(simulate(generate("zb-v", 1, 3), StageTimes::equal(1)).utilization, 1);
}

}  // namespace
}  // namespace tranche::pipeline
