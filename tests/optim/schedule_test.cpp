// Compares learning rates with figures computed by hand from DeepSpeed's formulas. Update number `step` uses
// iteration step - 1. Figures are exact or differ by a few roundings of double, which EXPECT_DOUBLE_EQ's 4
// ulp allow.
#include "tranche/optim/schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <iterator>
#include <limits>

#include "tests/core/error_text.h"
#include "tranche/core/error.h"

namespace tranche {
namespace {

using test::message_of;
using testing::HasSubstr;

TEST(ConstantSchedule, IsTheRateAtEveryStep) {
  const auto schedule = make_constant_schedule(3e-4);
  EXPECT_EQ(schedule->learning_rate(1), 3e-4);
  EXPECT_EQ(schedule->learning_rate(1'000'000), 3e-4);
  EXPECT_LT(schedule->momentum(1), 0) << "momentum is the optimizer's";
  EXPECT_EQ(schedule->describe(), R"({"type": "constant", "lr": 0.0003})");
}

TEST(WarmupLR, LinearRiseStartsAtTheMinimumAndReachesTheMaximumAfterItsSteps) {
  // iteration / 8 of 0.008: it grows by a thousandth with each update, from iteration 0 on.
  const auto schedule = make_warmup_schedule({0, 0.008, 8, WarmupType::linear});
  EXPECT_EQ(schedule->learning_rate(1), 0);
  EXPECT_DOUBLE_EQ(schedule->learning_rate(2), 0.001);
  EXPECT_DOUBLE_EQ(schedule->learning_rate(5), 0.004);
  EXPECT_DOUBLE_EQ(schedule->learning_rate(8), 0.007);
  EXPECT_DOUBLE_EQ(schedule->learning_rate(9), 0.008);
  EXPECT_DOUBLE_EQ(schedule->learning_rate(10'000), 0.008);
}

TEST(WarmupLR, LogarithmicRiseFollowsTheLogarithmOfIterationPlusOne) {
  // log(it + 1) / log(100): 0 at it 0, 1/2 at it 9, 1 at it 99; between 0.01 and 0.02.
  const auto schedule = make_warmup_schedule({0.01, 0.02, 100, WarmupType::logarithmic});
  EXPECT_DOUBLE_EQ(schedule->learning_rate(1), 0.01);
  EXPECT_DOUBLE_EQ(schedule->learning_rate(10), 0.015);
  EXPECT_DOUBLE_EQ(schedule->learning_rate(100), 0.02);
  EXPECT_DOUBLE_EQ(schedule->learning_rate(101), 0.02);
}

TEST(WarmupLR, FewerThanTwoStepsCountAsTwo) {
  // Iteration 1 of 2 is half way, as in DeepSpeed, which needs a logarithm above 0.
  const auto schedule = make_warmup_schedule({0, 1, 1, WarmupType::linear});
  EXPECT_EQ(schedule->learning_rate(1), 0);
  EXPECT_EQ(schedule->learning_rate(2), 0.5);
  EXPECT_EQ(schedule->learning_rate(3), 1);
}

TEST(WarmupDecayLR, RisesThenFallsInAStraightLineToTheMinimumAtTheEnd) {
  // Rise: it/20. Fall: (100 - it) / (100 - 20), 1 at it 20, 1/2 at it 60, 0 at it 100 and after.
  const auto schedule = make_warmup_decay_schedule({{0, 1, 20, WarmupType::linear}, 100});
  EXPECT_DOUBLE_EQ(schedule->learning_rate(11), 0.5);
  EXPECT_DOUBLE_EQ(schedule->learning_rate(21), 1);
  EXPECT_DOUBLE_EQ(schedule->learning_rate(61), 0.5);
  EXPECT_EQ(schedule->learning_rate(101), 0);
  EXPECT_EQ(schedule->learning_rate(5000), 0);
  // With a minimum of 0.2: 0.2 + 0.8 * share.
  const auto raised = make_warmup_decay_schedule({{0.2, 1, 20, WarmupType::linear}, 100});
  EXPECT_DOUBLE_EQ(raised->learning_rate(1), 0.2);
  EXPECT_DOUBLE_EQ(raised->learning_rate(61), 0.6);
  EXPECT_DOUBLE_EQ(raised->learning_rate(101), 0.2);
}

TEST(WarmupDecayLR, ARunShorterThanItsWarmupNeverDividesByZero) {
  // total 5, warm-up 10: after it the length of the line counts as 1, and 5 - 10 is below 0.
  const auto schedule = make_warmup_decay_schedule({{0, 1, 10, WarmupType::linear}, 5});
  EXPECT_DOUBLE_EQ(schedule->learning_rate(6), 0.5);
  EXPECT_EQ(schedule->learning_rate(11), 0);
}

TEST(WarmupCosineLR, RisesFromItsRatioThenFollowsHalfACosine) {
  const auto schedule = make_warmup_cosine_schedule({2, 110, 0.1, 10, 0.2, WarmupType::linear});
  // Rise: 0.1 + 0.9 it/10 of the rate 2.
  EXPECT_DOUBLE_EQ(schedule->learning_rate(1), 0.2);
  EXPECT_DOUBLE_EQ(schedule->learning_rate(6), 1.1);
  // At it 10 the fall has moved by 1 of 100: cos(pi/100) = 0.9995065603657316, (1 + cos) / 2 =
  // 0.9997532801828658, 0.2 + 0.8 * that = 0.9998026241462926, times 2.
  EXPECT_DOUBLE_EQ(schedule->learning_rate(11), 1.9996052482925853);
  // Half way (50 of 100): cos is 0, so 0.2 + 0.8 / 2 = 0.6.
  EXPECT_DOUBLE_EQ(schedule->learning_rate(60), 1.2);
  // At the end (100 of 100) and after it the minimum is 0.2.
  EXPECT_DOUBLE_EQ(schedule->learning_rate(110), 0.4);
  EXPECT_DOUBLE_EQ(schedule->learning_rate(1000), 0.4);
}

OneCycleOptions short_cycle() {
  OneCycleOptions options;
  options.cycle_min_lr = 1;
  options.cycle_max_lr = 5;
  options.cycle_first_step_size = 4;
  return options;
}

TEST(OneCycle, RisesAndFallsOnceWithMomentumTheOtherWayRound) {
  // Position = step within 8; height = position / 4 up to 4, then (8 - position) / 4. Rate 1 + 4 height,
  // momentum 0.9 - 0.1 height.
  const auto schedule = make_one_cycle_schedule(short_cycle());
  EXPECT_DOUBLE_EQ(schedule->learning_rate(1), 2);
  EXPECT_DOUBLE_EQ(schedule->learning_rate(4), 5);
  EXPECT_DOUBLE_EQ(schedule->learning_rate(5), 4);
  EXPECT_DOUBLE_EQ(schedule->learning_rate(8), 1);
  EXPECT_DOUBLE_EQ(schedule->momentum(1), 0.875);
  EXPECT_DOUBLE_EQ(schedule->momentum(4), 0.8);
  EXPECT_DOUBLE_EQ(schedule->momentum(8), 0.9);
  // No decay is configured, so the minimum stays.
  EXPECT_DOUBLE_EQ(schedule->learning_rate(9), 1);
  EXPECT_DOUBLE_EQ(schedule->momentum(9), 0.9);
  EXPECT_DOUBLE_EQ(schedule->learning_rate(9999), 1);
}

TEST(OneCycle, DecaysAfterTheCycle) {
  OneCycleOptions options = short_cycle();
  options.decay_step_size = 2;
  options.decay_lr_rate = 0.5;
  options.decay_mom_rate = 0.1;
  const auto schedule = make_one_cycle_schedule(options);
  EXPECT_DOUBLE_EQ(schedule->learning_rate(8), 1) << "the cycle's last update does not decay";
  // Update 9 is 1 past the cycle: half an interval. 1 / (1 + 0.5 * 0.5) = 0.8; 0.9 (1 + 0.1 * 0.5) = 0.945.
  EXPECT_DOUBLE_EQ(schedule->learning_rate(9), 0.8);
  EXPECT_DOUBLE_EQ(schedule->momentum(9), 0.945);
  // Update 12 is 4 past: two intervals. 1 / (1 + 0.5 * 2) = 0.5; 0.9 (1 + 0.1 * 2) = 1.08.
  EXPECT_DOUBLE_EQ(schedule->learning_rate(12), 0.5);
  EXPECT_DOUBLE_EQ(schedule->momentum(12), 1.08);
}

TEST(OneCycle, StairsHoldTheRateFlat) {
  OneCycleOptions options = short_cycle();
  options.cycle_second_step_size = 6;
  options.cycle_first_stair_count = 2;  // the second half uses the first's count
  const auto schedule = make_one_cycle_schedule(options);
  // Up: floor(position * 2 / 4) / 2 = 0, 1/2, 1/2, 1; down: floor((10 - position) * 2 / 6) / 2 =
  // 1/2 (5), 1/2 (6), 1/2 (7), 0 (8), 0 (9).
  const double expected[] = {1, 3, 3, 5, 3, 3, 3, 1, 1, 1};
  for (int step = 1; step <= 10; ++step) {
    EXPECT_DOUBLE_EQ(schedule->learning_rate(step), expected[step - 1]) << "step " << step;
  }
}

TEST(OneCycle, StairsReachThePeakOfAnUnevenCycle) {
  // 3 + 7 updates: the peak is at 3/10, where floating-point heights round below 1; the stair there must be
  // the top.
  OneCycleOptions options = short_cycle();
  options.cycle_first_step_size = 3;
  options.cycle_second_step_size = 7;
  options.cycle_first_stair_count = 3;
  EXPECT_DOUBLE_EQ(make_one_cycle_schedule(options)->learning_rate(3), 5);
}

TEST(OneCycle, MomentumCanBeLeftAlone) {
  OneCycleOptions options = short_cycle();
  options.cycle_momentum = false;
  EXPECT_LT(make_one_cycle_schedule(options)->momentum(3), 0);
}

TEST(Schedules, RefuseWhatCannotBe) {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(message_of<InvalidArgument>([] { make_constant_schedule(nan); }),
              HasSubstr("learning rate is nan"));
  EXPECT_THAT(message_of<InvalidArgument>([] {
                make_warmup_schedule({0, 1, 0});
              }),
              HasSubstr("warmup_num_steps is 0; it must be at least 1"));
  EXPECT_THAT(message_of<InvalidArgument>([] {
                make_warmup_schedule({nan, 1, 5});
              }),
              HasSubstr("warmup_min_lr is nan"));
  EXPECT_THAT(message_of<InvalidArgument>([] {
                make_warmup_decay_schedule({{0, 1, 5}, 0});
              }),
              HasSubstr("total_num_steps is 0; it must be at least 1"));
  EXPECT_THAT(message_of<InvalidArgument>([] {
                make_warmup_cosine_schedule({1, -3});
              }),
              HasSubstr("total_num_steps is -3"));
  OneCycleOptions cycle = short_cycle();
  cycle.cycle_first_step_size = 0;
  EXPECT_THAT(message_of<InvalidArgument>([&] { make_one_cycle_schedule(cycle); }),
              HasSubstr("cycle step sizes are 0 and 0"));
  cycle = short_cycle();
  cycle.cycle_second_stair_count = -1;
  EXPECT_THAT(message_of<InvalidArgument>([&] { make_one_cycle_schedule(cycle); }),
              HasSubstr("must not be negative"));
  cycle = short_cycle();
  cycle.cycle_max_mom = nan;
  EXPECT_THAT(message_of<InvalidArgument>([&] { make_one_cycle_schedule(cycle); }),
              HasSubstr("not a finite number"));
  for (const bool rate : {false, true}) {
    RangeTestOptions test;
    (rate ? test.step_rate : test.min_lr) = nan;
    EXPECT_EQ(message_of<InvalidArgument>([&] { make_range_test_schedule(test); }),
              std::string(rate ? "lr_range_test_step_rate" : "lr_range_test_min_lr") +
                  " is nan; it must be a finite number");
  }
}

TEST(Schedules, DescribeThemselves) {
  EXPECT_EQ(make_warmup_schedule({0, 0.5, 10, WarmupType::linear})->describe(),
            R"({"type": "WarmupLR", "warmup_min_lr": 0, "warmup_max_lr": 0.5, "warmup_num_steps": 10, )"
            R"("warmup_type": "linear"})");
  EXPECT_THAT(make_warmup_decay_schedule({{0, 1, 5}, 50})->describe(), HasSubstr(R"("total_num_steps": 50)"));
  EXPECT_THAT(make_warmup_cosine_schedule({1, 50})->describe(), HasSubstr(R"("cos_min_ratio": 0.0001)"));
  EXPECT_THAT(make_one_cycle_schedule(short_cycle())->describe(),
              HasSubstr(R"("cycle_second_step_size": 4)"));
}

TEST(LRRangeTest, GrowsByTheRateOverEachIntervalEvenlyOrAtItsEnd) {
  const auto evenly = make_range_test_schedule({0.5, 10, 2, false});
  const auto stairs = make_range_test_schedule({0.5, 10, 2, true});
  EXPECT_DOUBLE_EQ(evenly->learning_rate(1), 0.5 * (1 + 2 * 0.1));
  EXPECT_DOUBLE_EQ(evenly->learning_rate(25), 0.5 * (1 + 2 * 2.5));
  EXPECT_DOUBLE_EQ(stairs->learning_rate(9), 0.5);
  EXPECT_DOUBLE_EQ(stairs->learning_rate(10), 0.5 * 3);
  EXPECT_DOUBLE_EQ(stairs->learning_rate(19), 0.5 * 3);
  EXPECT_EQ(stairs->describe(),
            R"({"type": "LRRangeTest", "lr_range_test_min_lr": 0.5, "lr_range_test_step_size": 10, )"
            R"("lr_range_test_step_rate": 2, "lr_range_test_staircase": true})");
  EXPECT_THAT(message_of<InvalidArgument>([] {
                make_range_test_schedule({0.5, 0, 2, true});
              }),
              HasSubstr("lr_range_test_step_size is 0"));
}

// Factors of get_wsd_schedule and get_inverse_sqrt_schedule in transformers 5.24, at these iterations.
TEST(WSD, IsTransformers) {
  const std::int64_t iterations[] = {0, 3, 5, 11, 12, 15, 22, 23, 40};
  const double cosine[] = {0.125, 0.65, 1, 1, 1, 0.8490015711010623, 0.14272182404365746, 0.125, 0.125};
  const double linear[] = {0.125, 0.65, 1, 1, 1, 0.7613636363636364, 0.20454545454545459, 0.125, 0.125};
  const double root[] = {0.125, 0.65, 1, 1, 1, 0.5430461531162931, 0.1657202344101067, 0.125, 0.125};
  for (const auto& [type, factors] :
       {std::pair(DecayType::cosine, cosine), std::pair(DecayType::linear, linear),
        std::pair(DecayType::one_minus_root, root)}) {
    const auto schedule = make_stable_decay_schedule({0.5, 5, 7, 11, 0.125, type});
    for (std::size_t i = 0; i < std::size(iterations); ++i) {
      EXPECT_DOUBLE_EQ(schedule->learning_rate(iterations[i] + 1), 0.5 * factors[i])
          << name_of(type) << " in iteration " << iterations[i];
    }
  }
  EXPECT_EQ(
      make_stable_decay_schedule({0.5, 5, 7, 11, 0.125, DecayType::one_minus_root})->describe(),
      R"({"type": "WSD", "lr": 0.5, "num_warmup_steps": 5, "num_stable_steps": 7, "num_decay_steps": 11, )"
      R"("min_lr_ratio": 0.125, "decay_type": "1-sqrt"})");
  EXPECT_THAT(message_of<InvalidArgument>([] {
                make_stable_decay_schedule({0.5, 5, 7, 11, 2});
              }),
              HasSubstr("min_lr_ratio is 2"));
  EXPECT_THAT(message_of<InvalidArgument>([] {
                make_stable_decay_schedule({0.5, -1, 7, 11});
              }),
              HasSubstr("num_warmup_steps is -1"));
}

TEST(InverseSquareRoot, IsTransformers) {
  const auto with = make_inverse_root_schedule({0.5, 5, 9});
  const std::int64_t iterations[] = {0, 3, 5, 6, 40, 1000};
  const double factors[] = {0, 0.6, 1, 0.9486832980505138, 0.4522670168666454, 0.09467916046467048};
  for (std::size_t i = 0; i < std::size(iterations); ++i) {
    EXPECT_DOUBLE_EQ(with->learning_rate(iterations[i] + 1), 0.5 * factors[i]) << iterations[i];
  }
  const auto without = make_inverse_root_schedule({1});
  EXPECT_DOUBLE_EQ(without->learning_rate(4), 0.9998500337415648);
  EXPECT_DOUBLE_EQ(without->learning_rate(20001), 0.5773502691896258);
  EXPECT_EQ(without->describe(),
            R"({"type": "InverseSquareRoot", "lr": 1, "num_warmup_steps": 0, "timescale": 10000})");
  EXPECT_THAT(message_of<InvalidArgument>([] {
                make_inverse_root_schedule({0.5, 5, 0});
              }),
              HasSubstr("timescale is 0"));
}

}  // namespace
}  // namespace tranche
