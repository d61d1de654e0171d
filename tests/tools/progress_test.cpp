#include "tools/train/progress.h"

#include <gmock/gmock.h>

#include <limits>
#include <sstream>

#include "core/printable.h"
#include "tools/terminal.h"

namespace tranche::tools {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

StepResult step(std::int64_t number, double seconds = 0.5) {
  StepResult result;
  result.step = number;
  result.applied = true;
  result.loss = 2.5;
  result.gradient_norm = 1.25;
  result.learning_rate = 0.001;
  result.tokens = result.positions = 1000;
  result.seconds = seconds;
  return result;
}

struct Shown {
  std::string text;
  Progress progress;
  explicit Shown(const ProgressOptions& options)
      : progress(options, [this](std::string_view written) { text += written; }) {}
};

TEST(FormatStepTimes, NamesEveryPart) {
  StepResult result;
  result.step = 7;
  result.forward_seconds = 0.01211;
  result.backward_seconds = 0.024;
  result.update_seconds = 0.003056;
  result.exposed_gather_seconds = 0.0012;
  result.exposed_reduce_seconds = 0.00041;
  result.seconds = 0.0412;
  result.between_seconds = 0.005034;
  EXPECT_EQ(
      format_step_times(result),
      "step 7 in ms: forward 12.1, backward 24, update 3.06; waited for parameters 1.2, gradients 0.41, "
      "offload 0; 41.2 in all, 5.03 before it");
}

TEST(Progress, LineSaysAllThatMatters) {
  ProgressOptions options;
  options.steps = 100;
  options.flops_per_token = 1e6;
  options.peak_flops = 1e10;
  Shown shown(options);
  shown.progress.step(step(1), 0.5);
  EXPECT_THAT(shown.text, AllOf(StartsWith("step   1/100"), HasSubstr("loss 2.5000"), HasSubstr("norm 1.25"),
                                HasSubstr("lr 0.001"), HasSubstr("2000 tokens/s"), HasSubstr("20% of peak"),
                                HasSubstr("50 s to go"), Not(HasSubstr("\r"))));
  EXPECT_EQ(shown.text.back(), '\n');
}

TEST(Progress, ColumnsStayWhereTheyAre) {
  ProgressOptions options;
  options.steps = 9;
  Shown shown(options);
  for (int i = 1; i <= 2; ++i) {
    StepResult result = step(i);
    if (i == 2) {
      result.loss = 11.0924;
      result.gradient_norm = 0.00123;
      result.learning_rate = 1.25e-5;
      result.tokens = result.positions = 7;
    }
    shown.progress.step(result, 0.5 * i);
  }
  const std::string first = shown.text.substr(0, shown.text.find('\n')),
                    second = shown.text.substr(first.size() + 1);
  for (const char* column : {" loss ", " norm ", " lr ", " tokens/s"})
    EXPECT_EQ(first.find(column), second.find(column)) << shown.text;
}

TEST(Progress, ShowsTheNoiseOfGradientsWhereItWasMeasured) {
  ProgressOptions options;
  options.steps = 9;
  Shown shown(options);
  StepResult noisy = step(1);
  shown.progress.step(noisy, 0.5);
  EXPECT_THAT(shown.text, Not(HasSubstr("noise")));
  noisy.noise = {.measured = true, .variance = 6, .squares = 2, .scale = 1234};
  shown.progress.step(noisy, 1);
  EXPECT_THAT(shown.text, HasSubstr("  noise 1234      "));
}

TEST(Progress, ClippedStepsSayByHowMuch) {
  ProgressOptions options;
  options.steps = 9;
  Shown shown(options);
  shown.progress.step(step(1), 0.5);
  EXPECT_THAT(shown.text, Not(HasSubstr("clipped")));
  StepResult clipped = step(2);
  clipped.clip_coefficient = 0.00526;
  shown.progress.step(clipped, 1);
  EXPECT_THAT(shown.text, HasSubstr(" to go  clipped x0.0053\n"));
}

TEST(Progress, ANormFarFromItsMedianIsUnusualAndStays) {
  ProgressOptions options;
  options.steps = 100;
  options.log_every = 50;
  Shown shown(options);
  const auto take = [&](int number, double norm) {
    StepResult result = step(number);
    result.gradient_norm = norm;
    shown.text.clear();
    shown.progress.step(result, 0.5 * number);
    return shown.text;
  };
  EXPECT_THAT(take(1, 100), Not(HasSubstr("UNUSUAL"))) << "there is nothing to compare it with";
  for (int i = 2; i <= 4; ++i) EXPECT_EQ(take(i, 2), "");
  EXPECT_EQ(take(5, 15.9), "") << "8 medians are unusual, less is not";
  EXPECT_THAT(take(6, 22.5), testing::EndsWith("  UNUSUAL: norm is 11x the recent median\n"));
  // A norm that stays high becomes usual again.
  int said = 0;
  for (int i = 7; i <= 49; ++i) said += take(i, 200).empty() ? 0 : 1;
  EXPECT_GT(said, 0);
  EXPECT_EQ(take(51, 200), "");

  options.terminal = true;
  Shown terminal(options);
  for (int i = 1; i <= 5; ++i) terminal.progress.step(step(i), 0.5 * i);
  EXPECT_THAT(terminal.text, Not(HasSubstr("\n")));
  StepResult large = step(6);
  large.gradient_norm = 100;
  terminal.progress.step(large, 3);
  EXPECT_EQ(terminal.text.back(), '\n') << "the next step does not overwrite it";
}

TEST(Progress, SkippedStepsAreNotCompared) {
  ProgressOptions options;
  options.steps = 100;
  options.log_every = 50;
  Shown shown(options);
  for (int i = 1; i <= 5; ++i) shown.progress.step(step(i), 0.5 * i);
  StepResult skipped = step(6);
  skipped.applied = false;
  skipped.skipped_because = "inf or nan";
  skipped.gradient_norm = std::numeric_limits<double>::infinity();
  shown.progress.step(skipped, 3);
  EXPECT_THAT(shown.text, AllOf(testing::EndsWith("  SKIPPED: inf or nan\n"), Not(HasSubstr("UNUSUAL"))));
}

TEST(Progress, AValidationIsDrawnInATerminal) {
  ProgressOptions options;
  options.terminal = true;
  Shown shown(options);
  shown.progress.validating(0, 500, 0);
  shown.progress.validating(100, 500, 2);
  EXPECT_THAT(shown.text,
              AllOf(StartsWith("\rvalidating: 0 of 500 windows"),
                    HasSubstr("\rvalidating: 100 of 500 windows, 8 s to go"), Not(HasSubstr("\n"))));
  shown.progress.say("step 5: validation loss 1");
  EXPECT_THAT(shown.text, testing::EndsWith("validation loss 1" + std::string(16, ' ') + "\n"));
}

TEST(Progress, ALongValidationSaysSoInAFileEveryTenSeconds) {
  Shown shown(ProgressOptions{});
  for (int second = 0; second <= 25; ++second) shown.progress.validating(second * 4, 100, second);
  EXPECT_EQ(shown.text,
            "validating: 40 of 100 windows, 15 s to go\nvalidating: 80 of 100 windows, 5 s to go\n");
  shown.text.clear();
  for (int second = 0; second <= 12; second += 2) shown.progress.validating(second * 4, 100, second);
  EXPECT_EQ(shown.text, "validating: 40 of 100 windows, 15 s to go\n") << "the next validation begins anew";
}

TEST(Progress, InAFileItLogsAtIntervals) {
  ProgressOptions options;
  options.steps = 10;
  options.log_every = 4;
  Shown shown(options);
  for (int i = 1; i <= 10; ++i) shown.progress.step(step(i), 0.5 * i);
  EXPECT_EQ(std::count(shown.text.begin(), shown.text.end(), '\n'), 4)
      << shown.text;  // lines of steps 1, 4, 8 and 10
  EXPECT_THAT(shown.text, AllOf(HasSubstr("step  8/10"), Not(HasSubstr("step  5/10"))));
}

TEST(Progress, AResumedRunCountsItsOwnSteps) {
  ProgressOptions options;
  options.begin = 90;
  options.steps = 100;
  options.log_every = 50;
  Shown shown(options);
  shown.progress.step(step(91), 0.5);
  EXPECT_THAT(shown.text,
              AllOf(HasSubstr("step  91/100"), HasSubstr("5 s to go")));  // 9 steps of 0.5 s, rounded
}

TEST(Progress, InATerminalItRedrawsOneLine) {
  ProgressOptions options;
  options.steps = 10;
  options.terminal = true;
  Shown shown(options);
  for (int i = 1; i <= 3; ++i) shown.progress.step(step(i), 0.5 * i);
  EXPECT_EQ(std::count(shown.text.begin(), shown.text.end(), '\n'), 0);
  EXPECT_EQ(std::count(shown.text.begin(), shown.text.end(), '\r'), 3);
  shown.progress.say("step 3: validation loss 2.0");
  shown.progress.step(step(4), 2);
  shown.progress.finish();
  EXPECT_EQ(std::count(shown.text.begin(), shown.text.end(), '\n'), 2);
  // The permanent line covers the whole redrawn line that it replaces.
  const std::size_t said = shown.text.find("step 3: validation");
  EXPECT_GE(shown.text.find('\n', said) - said, 60u);
}

TEST(Progress, SaysWhyAStepWasSkippedAndShowsALossScale) {
  ProgressOptions options;
  options.steps = 1000;
  options.log_every = 500;
  Shown shown(options);
  StepResult skipped = step(7);
  skipped.applied = false;
  skipped.skipped_because = "h.0.attn.c_attn.weight[5] is not finite";
  skipped.loss_scale = 65536;
  shown.progress.step(skipped, 1);
  EXPECT_THAT(shown.text, AllOf(HasSubstr("SKIPPED: h.0.attn.c_attn.weight[5]"), HasSubstr("scale 65536")));
}

TEST(Progress, TimeToGoEndsWithTheSecondsButNotBeforeTheLeastSteps) {
  ProgressOptions options;
  options.steps = 1000;
  options.maximum_seconds = 60;
  options.minimum_steps = 10;
  Shown bounded(options);
  bounded.progress.step(step(1, 1), 1);
  EXPECT_THAT(bounded.text, HasSubstr("59 s to go"));
  options.minimum_steps = 200;
  Shown least(options);
  least.progress.step(step(1, 1), 1);
  EXPECT_THAT(least.text, HasSubstr("3 min 19 s to go"));
}

TEST(Progress, MeanSpeedLeavesOutTheFirstTwoSteps) {
  ProgressOptions options;
  options.steps = 4;
  options.flops_per_token = 10;
  options.peak_flops = 100000;
  Shown shown(options);
  shown.progress.step(step(1, 100), 100);
  EXPECT_DOUBLE_EQ(shown.progress.mean_rate().positions, 10);
  shown.progress.step(step(2, 100), 200);
  shown.progress.step(step(3, 0.25), 200);
  shown.progress.step(step(4, 0.25), 200);
  EXPECT_DOUBLE_EQ(shown.progress.mean_rate().positions, 4000);
  EXPECT_DOUBLE_EQ(shown.progress.mean_peak_share(), 0.4);
}

TEST(Progress, PeakIsOfPositionsAndLearnedTokensAreToldApart) {
  ProgressOptions options;
  options.steps = 4;
  options.flops_per_token = 10;
  options.peak_flops = 100000;
  Shown shown(options);
  StepResult masked = step(1);
  masked.tokens = 68;
  shown.progress.step(masked, 0.5);
  EXPECT_THAT(shown.text, HasSubstr("  2000 tokens/s (136 learned)   20% of peak"));
  EXPECT_DOUBLE_EQ(shown.progress.mean_rate().learned, 136);
  EXPECT_DOUBLE_EQ(shown.progress.mean_peak_share(), 0.2);
  EXPECT_EQ(format_rate({.positions = 5, .learned = 5}), "5 tokens/s");
}

TEST(Duration, IsReadable) {
  EXPECT_EQ(format_duration(0.4), "0 s");
  EXPECT_EQ(format_duration(59.4), "59 s");
  EXPECT_EQ(format_duration(200), "3 min 20 s");
  EXPECT_EQ(format_duration(7500), "2 h 05 min");
  EXPECT_EQ(format_duration(-3), "0 s");
}

TEST(Draw, OnlyTheProgramsOwnCarriageReturnsReachTheTerminal) {
  std::ostringstream to;
  detail::PrintableBuffer buffer(*to.rdbuf());
  std::ostream out(&buffer);
  draw(out, "\rstep 1 of a\rb \x1b[2J  \r");
  draw(out, "\r");
  draw(out, "");
  draw(out, "end\n");
  EXPECT_EQ(to.str(), "\rstep 1 of a\\u000db \\u001b[2J  \r\rend\n");
}

}  // namespace
}  // namespace tranche::tools
