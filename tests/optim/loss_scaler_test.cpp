// The scaler's state machine, driven by scripts: '.' is a clean step, 'o' an overflow.
#include "tranche/optim/loss_scaler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string_view>
#include <vector>

#include "tests/core/error_text.h"
#include "tranche/core/error.h"

namespace tranche {
namespace {

using test::message_of;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

LossScalerOptions small(int hysteresis = 2) {
  LossScalerOptions options;
  options.initial_scale = 16;
  options.window = 4;
  options.hysteresis = hysteresis;
  return options;
}

/// The scale after each step of the script.
std::vector<double> run(LossScaler& scaler, std::string_view script) {
  std::vector<double> scales;
  for (const char step : script) {
    scaler.update(step == 'o');
    scales.push_back(scaler.scale());
  }
  return scales;
}

TEST(LossScaler, StartsAsDeepSpeedDoes) {
  const LossScaler scaler{LossScalerOptions{}};
  EXPECT_EQ(scaler.scale(), 65536);
  EXPECT_EQ(scaler.options().window, 1000);
  EXPECT_EQ(scaler.state(), (LossScalerState{65536, 0, 2}));
}

TEST(LossScaler, SpendsHysteresisOnceThenHalvesAtEveryOverflow) {
  LossScaler scaler(small());
  EXPECT_THAT(run(scaler, "oooo"), ElementsAre(16, 8, 4, 2));
}

TEST(LossScaler, CleanStepsShortOfTheWindowDoNotRefillHysteresis) {
  LossScaler scaler(small());
  EXPECT_THAT(run(scaler, "o...o"), ElementsAre(16, 16, 16, 16, 8));
}

TEST(LossScaler, AWindowOfCleanStepsDoublesAndRefillsHysteresis) {
  LossScaler scaler(small());
  EXPECT_THAT(run(scaler, "oo"), ElementsAre(16, 8));
  EXPECT_THAT(run(scaler, "...."), ElementsAre(8, 8, 8, 16));
  EXPECT_THAT(run(scaler, "oo"), ElementsAre(16, 8));
  EXPECT_THAT(run(scaler, "........"), ElementsAre(8, 8, 8, 16, 16, 16, 16, 32));
}

TEST(LossScaler, TheWindowCountsFromTheLastOverflow) {
  LossScaler scaler(small());
  EXPECT_THAT(run(scaler, "...o...o...."), ElementsAre(16, 16, 16, 16, 16, 16, 16, 8, 8, 8, 8, 16));
}

TEST(LossScaler, ConsecutiveHysteresisRefillsAtEveryCleanStep) {
  LossScalerOptions options = small();
  options.consecutive_hysteresis = true;
  LossScaler scaler(options);
  EXPECT_THAT(run(scaler, "o.o.o.oo"), ElementsAre(16, 16, 16, 16, 16, 16, 16, 8));
}

TEST(LossScaler, HysteresisOfOneHalvesAtOnceAndOfThreeAtTheThird) {
  LossScaler one(small(1));
  EXPECT_THAT(run(one, "oo"), ElementsAre(8, 4));
  LossScaler three(small(3));
  EXPECT_THAT(run(three, "oooo"), ElementsAre(16, 16, 8, 4));
}

TEST(LossScaler, AnOverflowAtTheMinimumEndsTheRun) {
  LossScalerOptions options = small(1);
  options.initial_scale = 4;
  LossScaler scaler(options);
  EXPECT_THAT(run(scaler, "oo"), ElementsAre(2, 1));
  try {
    scaler.update(true);
    FAIL() << "the minimum was passed";
  } catch (const NumericalError& error) {
    EXPECT_THAT(error.message(), AllOf(HasSubstr("overflow at a loss scale of 1, the minimum"),
                                       HasSubstr("fp16.min_loss_scale"), HasSubstr("train in bf16")));
    EXPECT_EQ(error.exit_status(), ExitStatus::numerical);
  }
  EXPECT_EQ(scaler.scale(), 1);
}

TEST(LossScaler, HysteresisIsSpentAtTheMinimumToo) {
  LossScalerOptions options = small(2);
  options.initial_scale = options.minimum_scale = 4;
  LossScaler scaler(options);
  EXPECT_THAT(run(scaler, "o"), ElementsAre(4));
  EXPECT_THROW(scaler.update(true), NumericalError);
}

TEST(LossScaler, AMinimumBetweenPowersOfTwoIsReachedExactly) {
  LossScalerOptions options = small(1);
  options.initial_scale = 4;
  options.minimum_scale = 3;
  LossScaler scaler(options);
  EXPECT_THAT(run(scaler, "o"), ElementsAre(3));
  EXPECT_THROW(scaler.update(true), NumericalError);
}

TEST(LossScaler, StaysWithinWhatFloatsHold) {
  // A minimum of 0, as in some configurations, must not let the scale reach 0, nor may the scale grow to
  // infinity.
  LossScalerOptions options = small(1);
  options.minimum_scale = 0;
  options.window = 1;
  LossScaler falling(options);
  EXPECT_THROW(run(falling, std::string(300, 'o')), NumericalError);
  EXPECT_EQ(falling.scale(), 0x1p-80);
  LossScaler rising(options);
  run(rising, std::string(300, '.'));
  EXPECT_EQ(rising.scale(), 0x1p80);
}

TEST(LossScaler, AFixedScaleNeverMoves) {
  LossScalerOptions options = small();
  options.dynamic = false;
  options.initial_scale = 1000;
  LossScaler scaler(options);
  EXPECT_THAT(run(scaler, "oooo......"), testing::Each(1000.0));
}

TEST(LossScaler, ARestoredScalerGoesOnAsTheSavedOneWould) {
  const std::string_view script = "..o...o.....o.......o..";
  for (std::size_t cut = 0; cut <= script.size(); ++cut) {
    LossScaler whole(small());
    LossScaler first(small());
    const std::vector<double> expected = run(whole, script);
    run(first, script.substr(0, cut));
    LossScaler second(small());
    second.restore(first.state());
    const std::vector<double> got = run(second, script.substr(cut));
    EXPECT_EQ(got, std::vector<double>(expected.begin() + static_cast<std::ptrdiff_t>(cut), expected.end()))
        << "cut at " << cut;
    EXPECT_EQ(second.state(), whole.state()) << "cut at " << cut;
  }
}

TEST(LossScaler, TheNewConfigurationRulesARestoredState) {
  LossScaler narrow(small(1));  // window 4, hysteresis 1
  narrow.restore({64, 900, 5});
  EXPECT_EQ(narrow.state(), (LossScalerState{64, 3, 1}));
  EXPECT_THAT(run(narrow, "."), ElementsAre(128));
  LossScalerOptions fixed = small();
  fixed.dynamic = false;
  LossScaler scaler(fixed);
  scaler.restore({64, 0, 1});
  EXPECT_EQ(scaler.scale(), 16);
}

TEST(LossScaler, RefusesWhatCannotBe) {
  const auto with = [](auto change) {
    LossScalerOptions options = small();
    change(options);
    return message_of<Error>([&] { LossScaler scaler(options); });
  };
  EXPECT_THAT(with([](auto& o) { o.initial_scale = 0; }), HasSubstr("initial scale of the loss scaler is 0"));
  EXPECT_THAT(with([](auto& o) { o.minimum_scale = -1; }),
              HasSubstr("minimum scale of the loss scaler is -1"));
  EXPECT_THAT(with([](auto& o) { o.minimum_scale = 32; }),
              HasSubstr("minimum scale 32 is above its initial scale 16"));
  EXPECT_THAT(with([](auto& o) { o.window = 0; }), HasSubstr("window 0 and hysteresis 2"));
  EXPECT_THAT(with([](auto& o) { o.hysteresis = 0; }), HasSubstr("window 4 and hysteresis 0"));
  LossScaler scaler(small());
  EXPECT_THAT(message_of<Error>([&] {
                scaler.restore({0, 0, 1});
              }),
              HasSubstr("restored scale of the loss scaler is 0"));
  EXPECT_THAT(message_of<Error>([&] { scaler.restore({8, -1, 1}); }), HasSubstr("-1 clean steps"));
  EXPECT_THAT(message_of<Error>([&] {
                scaler.restore({8, 0, 0});
              }),
              HasSubstr("hysteresis 0 cannot be restored"));
}

}  // namespace
}  // namespace tranche
