// How a run's progress is counted, when its weights count as sound, and the end of an engine through an
// error.

#include "engine/run_progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <exception>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "engine/breakdown.h"
#include "engine/step_rule.h"
#include "rank_state.h"
#include "tests/core/error_text.h"

namespace tranche::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// A RunProgress and the parts that it needs, on one rank.
struct Progress {
  Config config = [] {
    Config with = plain_config(0);
    with.train_batch_size = 4;
    with.maximum_consecutive_skips = 2;
    return with;
  }();
  std::unique_ptr<Communicator> alone = make_self_communicator();
  RankState rank{config, *alone};
  Logger log{0, LogLevel::off};
  detail::CheckpointSession session{
      rank.store, config, *alone, *rank.device, rank.host, detail::posix_file_system(), log, nullptr};
  detail::RunProgress of{config, session};
};

StepResult step(bool applied, double loss) {
  StepResult result;
  result.applied = applied;
  result.loss = loss;
  result.tokens = 10;
  if (!applied) result.skipped_because = "a reason";
  return result;
}
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

TEST(RunProgress, StepsAreCountedAndSkippedOnesAreToldUntilOneIsApplied) {
  Progress progress;
  progress.of.take_step(step(true, 1), false);
  progress.of.take_step(step(false, 1), false);
  EXPECT_EQ(progress.of.too_many_skips(step(false, 1)), nullptr);
  progress.of.take_step(step(false, nan), false);
  EXPECT_EQ(progress.of.steps(), 3);
  EXPECT_EQ(progress.of.applied(), 1);
  EXPECT_EQ(progress.of.samples(), 12);
  EXPECT_EQ(progress.of.skipped_at_end(), 2);
  EXPECT_TRUE(progress.of.in_doubt());
  EXPECT_THAT(message_of<NumericalError>(
                  [&] { std::rethrow_exception(progress.of.too_many_skips(step(false, nan))); }),
              HasSubstr("2 steps in a row were skipped; the last because a reason"));
  progress.of.take_step(step(true, 1), false);
  EXPECT_EQ(progress.of.too_many_skips(step(true, 1)), nullptr);
  EXPECT_EQ(progress.of.skipped_at_end(), 0);
  EXPECT_FALSE(progress.of.in_doubt());
}

TEST(RunProgress, WhatTheProgramWroteSaysNothingOfTheTraining) {
  Progress progress;
  progress.of.take_evaluation({.loss = 1, .tokens = 3});
  EXPECT_TRUE(progress.of.proven());
  progress.of.weights_written();
  EXPECT_FALSE(progress.of.proven());
  progress.of.take_evaluation({.loss = nan, .tokens = 3});
  EXPECT_FALSE(progress.of.in_doubt());
  progress.of.take_step(step(true, 1), false);
  progress.of.take_evaluation({.loss = nan, .tokens = 3});
  EXPECT_TRUE(progress.of.in_doubt());
}

TEST(RunProgress, ARunGoesOnFromWhatItDescribed) {
  Progress before, after;
  before.of.take_step(step(true, 1), false);
  before.of.take_step(step(false, nan), false);
  checkpoint::RunState saved;
  before.of.describe(saved);
  saved.step = before.of.steps();
  std::vector<std::string> notes;
  after.of.go_on_from(saved, notes);
  EXPECT_THAT(notes, ElementsAre());
  EXPECT_EQ(after.of.steps(), 2);
  EXPECT_EQ(after.of.applied(), 1);
  EXPECT_EQ(after.of.samples(), 8);
  EXPECT_EQ(after.of.skipped_at_end(), 1);
  EXPECT_TRUE(after.of.in_doubt());
  EXPECT_EQ(after.of.too_many_skips(step(false, 1)), nullptr) << "those of this engine alone count";
}

TEST(Breakdown, ALaterErrorDoesNotReplaceTheFirst) {
  const Runtime runtime(RuntimeOptions{.threads = 1, .log_level = LogLevel::off}, make_self_communicator);
  detail::Breakdown breakdown(runtime);
  breakdown.throw_if_ended();
  breakdown.end(std::make_exception_ptr(IoError("the first", 5)));
  breakdown.end(std::make_exception_ptr(IoError("the second", 5)));
  EXPECT_THAT(message_of<IoError>([&] { breakdown.throw_if_ended(); }), HasSubstr("the first"));
  EXPECT_TRUE(detail::Breakdown::stays_usable(std::make_exception_ptr(LogicError("misuse"))));
  EXPECT_FALSE(detail::Breakdown::stays_usable(std::make_exception_ptr(IoError("a disk", 5))));
}

TEST(StepRule, TheProgramsRateIsSavedAndAnotherScheduleIsNoted) {
  const Runtime runtime(RuntimeOptions{.threads = 1, .log_level = LogLevel::off}, make_self_communicator);
  detail::Breakdown breakdown(runtime);
  const Config config = plain_config(0);
  detail::StepRule own(runtime, config, make_constant_schedule(0.5), breakdown);
  EXPECT_EQ(own.update(7).learning_rate, 0.5);
  own.set_rate(0.125);
  EXPECT_EQ(own.update(7).learning_rate, 0.125);
  EXPECT_EQ(own.update(7).step, 7);
  detail::StepRule configured(runtime, config, nullptr, breakdown);
  EXPECT_EQ(configured.schedule(), "the configuration's");
  std::vector<std::string> notes;
  configured.take_saved(own.saved(), notes);
  EXPECT_EQ(configured.update(1).learning_rate, 0.125);
  EXPECT_THAT(notes, ElementsAre(HasSubstr("the schedule is the configuration's, was the program's own")));
  EXPECT_THAT(message_of<InvalidArgument>([&] { own.set_rate(-1); }), HasSubstr("not negative"));
}

/// A learning rate of NaN, which only a program's own schedule can return.
class NoRate final : public Schedule {
  double learning_rate(std::int64_t) const override { return nan; }
  std::string describe() const override { return "none"; }
};

TEST(StepRule, AStepThatRanksWouldMakeDifferentlyIsRefused) {
  const Runtime runtime(RuntimeOptions{.threads = 1, .log_level = LogLevel::off}, make_self_communicator);
  detail::Breakdown breakdown(runtime);
  const Config config = plain_config(0);
  detail::StepRule rule(runtime, config, std::make_unique<NoRate>(), breakdown);
  detail::StepRecord mine;
  rule.declare(rule.update(1), mine);
  EXPECT_THAT(message_of<ConfigurationError>([&] { rule.check({mine}, 3); }),
              HasSubstr("gives a learning rate of nan and a momentum of -1 for step 3"));
  EXPECT_TRUE(breakdown.ended());
}

}  // namespace
}  // namespace tranche::test
