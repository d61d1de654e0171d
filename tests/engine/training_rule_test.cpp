// A program's own parts of the training rule: a schedule, and a rate set between steps.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "on_ranks.h"
#include "saving_fixture.h"

namespace tranche::test {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class Formula final : public Schedule {
 public:
  explicit Formula(std::function<double(std::int64_t)> rate, std::string name = "formula")
      : rate_(std::move(rate)), name_(std::move(name)) {}
  double learning_rate(std::int64_t step) const override { return rate_(step); }
  std::string describe() const override { return R"({"type": ")" + name_ + R"("})"; }

 private:
  std::function<double(std::int64_t)> rate_;
  std::string name_;
};

double falling(std::int64_t step) {
  return 0.05 / static_cast<double>(step);
}

EngineOptions with_schedule(std::function<double(std::int64_t)> rate, std::string name = "formula") {
  return {.schedule = std::make_unique<Formula>(std::move(rate), std::move(name))};
}

/// Runs body on thread ranks with an engine whose schedule is the program's own.
void on_scheduled_ranks(const OddRun& run, const std::function<EngineOptions(int)>& options,
                        const std::function<void(Engine&, Runtime&)>& body) {
  CommonStart start(run.ranks);
  run_thread_ranks(run.ranks, [&](int rank, const CommunicatorFactory& factory) {
    CommonStart::Rank started(start);
    const Config config = odd_config(run);
    RuntimeOptions runtime_options = RuntimeOptions::from(config);
    runtime_options.log_level = LogLevel::off;
    Runtime runtime(runtime_options, factory);
    Engine engine(runtime, odd_model(), config, options(rank));
    started.await_others();
    body(engine, runtime);
  });
}

StepResult ruled_step(Engine& engine, Runtime& runtime, const std::string& poison = {}) {
  whole_step(engine, runtime, engine.steps(), poison);
  return engine.step();
}

TEST(OwnSchedule, IsAskedByTheNumberOfTheUpdate) {
  for (int stage = 0; stage <= 3; ++stage) {
    OddRun run;
    run.ranks = 2;
    run.stage = stage;
    on_scheduled_ranks(
        run, [](int) { return with_schedule(falling); },
        [](Engine& engine, Runtime& runtime) {
          EXPECT_EQ(ruled_step(engine, runtime).learning_rate, 0.05);
          EXPECT_EQ(ruled_step(engine, runtime, "prime.c").learning_rate, 0.025) << "skipped";
          EXPECT_EQ(ruled_step(engine, runtime).learning_rate, 0.025);
          EXPECT_EQ(ruled_step(engine, runtime).learning_rate, 0.05 / 3);
        });
  }
}

TEST(OwnSchedule, HasTheBitsOfTheSameOneFromTheConfiguration) {
  OddRun run;
  run.ranks = 2;
  run.stage = 3;
  const OddResult configured = train_odd(run);
  on_scheduled_ranks(
      run, [](int) { return with_schedule([](std::int64_t) { return 0.05; }); },
      [&](Engine& engine, Runtime& runtime) {
        for (int step = 0; step < run.steps; ++step) {
          const std::int64_t block = engine.steps() * 2 + runtime.rank();
          odd_micro_batch(engine, block * 3, runtime.rank() == 1 ? 2 : 3);
          engine.step();
        }
        EXPECT_EQ(engine.state_digest(), configured.state);
      });
}

TEST(OwnSchedule, ReplacesOneThatCouldNotBeMade) {
  Config config = odd_config({});
  config.schedule.type = "WarmupDecayLR";  // this schedule must know the last step
  Runtime runtime(RuntimeOptions::from(config), make_self_communicator);
  EXPECT_THAT(message_of<ConfigurationError>([&] { Engine engine(runtime, odd_model(), config); }),
              HasSubstr("must know where the run ends"));
  Engine engine(runtime, odd_model(), config, with_schedule(falling));
  EXPECT_EQ(ruled_step(engine, runtime).learning_rate, 0.05);
}

TEST(OwnSchedule, MustBeOneOnAllRanks) {
  OddRun run;
  run.ranks = 2;
  EXPECT_THAT(message_of<ConfigurationError>([&] {
                on_scheduled_ranks(
                    run, [](int rank) { return rank == 0 ? EngineOptions() : with_schedule(falling); },
                    [](Engine&, Runtime&) {});
              }),
              HasSubstr("another schedule than rank 0"));
  on_scheduled_ranks(
      run,
      [](int rank) {
        return with_schedule([rank](std::int64_t step) { return step == 2 ? 0.5 + rank : 0.05; });
      },
      [](Engine& engine, Runtime& runtime) {
        ruled_step(engine, runtime);
        const kernels::Digest before = engine.state_digest();
        whole_step(engine, runtime, 1);
        EXPECT_THAT(message_of<CommunicationError>([&] { engine.step(); }),
                    AllOf(HasSubstr("rank 1 has a learning rate of 1.5 for step 2, rank 0 one of 0.5"),
                          HasSubstr("set_learning_rate()")));
        EXPECT_FALSE(before == kernels::Digest());
      });
}

TEST(OwnSchedule, MustGiveNumbers) {
  OddRun run;
  run.ranks = 2;
  on_scheduled_ranks(
      run, [](int) { return with_schedule([](std::int64_t) { return std::nan(""); }); },
      [](Engine& engine, Runtime& runtime) {
        whole_step(engine, runtime, 0);
        EXPECT_THAT(message_of<ConfigurationError>([&] { engine.step(); }),
                    AllOf(HasSubstr(R"({"type": "formula"} gives a learning rate of nan)"),
                          HasSubstr("for step 1; both must be finite")));
      });
}

TEST(OwnSchedule, MustNotAscendNorOverflow) {
  for (const auto& [rate, text] : {std::pair(-0.5, "-0.5"), {1e39, "1e+39"}}) {
    OddRun run;
    run.ranks = 2;
    on_scheduled_ranks(
        run,
        [rate = rate](int) {
          return with_schedule([rate](std::int64_t step) { return step == 2 ? rate : 0.05; });
        },
        [text = text](Engine& engine, Runtime& runtime) {
          ruled_step(engine, runtime);
          whole_step(engine, runtime, 1);
          EXPECT_THAT(message_of<ConfigurationError>([&] { engine.step(); }),
                      AllOf(HasSubstr(R"({"type": "formula"} gives a learning rate of )" + std::string(text)),
                            HasSubstr("for step 2; both must be finite, and the rate from 0 to 3.4e+38")));
        });
  }
  Config config = odd_config({});
  config.group_rules.push_back({.pattern = "prime.*", .learning_rate_factor = 1e30, .decay = {}});
  Runtime runtime(RuntimeOptions::from(config), make_self_communicator);
  Engine engine(runtime, odd_model(), config, with_schedule([](std::int64_t) { return 1e10; }));
  whole_step(engine, runtime, 0);
  EXPECT_THAT(
      message_of<ConfigurationError>([&] { engine.step(); }),
      HasSubstr("the parameter group 'prime.*' has a learning rate of 1e+40 in step 1; it must be from 0 "
                "to 3.4e+38"));
}

TEST(SetLearningRate, HoldsUntilItIsTakenBack) {
  for (int stage = 0; stage <= 3; ++stage) {
    OddRun run;
    run.ranks = 2;
    run.stage = stage;
    kernels::Digest scheduled, set;
    on_scheduled_ranks(
        run, [](int) { return with_schedule([](std::int64_t step) { return step == 2 ? 0.5 : 0.05; }); },
        [&](Engine& engine, Runtime& runtime) {
          for (int step = 0; step < 4; ++step) ruled_step(engine, runtime);
          const kernels::Digest digest = engine.state_digest();
          if (runtime.rank() == 0) scheduled = digest;
        });
    on_ranks(run, [&](Engine& engine, Runtime& runtime) {
      EXPECT_EQ(ruled_step(engine, runtime).learning_rate, 0.05);
      engine.set_learning_rate(0.5);
      EXPECT_EQ(ruled_step(engine, runtime).learning_rate, 0.5);
      engine.set_learning_rate(std::nullopt);
      EXPECT_EQ(ruled_step(engine, runtime).learning_rate, 0.05);
      ruled_step(engine, runtime);
      const kernels::Digest digest = engine.state_digest();
      if (runtime.rank() == 0) set = digest;
    });
    EXPECT_EQ(scheduled, set) << "stage " << stage;
  }
}

TEST(SetLearningRate, RefusesWhatIsNoRate) {
  on_ranks({}, [](Engine& engine, Runtime& runtime) {
    EXPECT_THAT(message_of<InvalidArgument>([&] { engine.set_learning_rate(-0.5); }),
                HasSubstr("set_learning_rate(-0.5): it must be finite and not negative"));
    EXPECT_THAT(message_of<InvalidArgument>(
                    [&] { engine.set_learning_rate(std::numeric_limits<double>::infinity()); }),
                HasSubstr("set_learning_rate(inf)"));
    EXPECT_THAT(
        message_of<InvalidArgument>([&] { engine.set_learning_rate(1e300); }),
        HasSubstr("set_learning_rate(1e+300): it must be finite and not negative, and at most 3.4e+38"));
    EXPECT_EQ(ruled_step(engine, runtime).learning_rate, 0.05) << "nothing has changed";
  });
}

TEST(SetLearningRate, MustBeSetOnAllRanks) {
  OddRun run;
  run.ranks = 3;
  on_ranks(run, [](Engine& engine, Runtime& runtime) {
    if (runtime.rank() == 2) engine.set_learning_rate(0.25);
    whole_step(engine, runtime, 0);
    EXPECT_THAT(message_of<CommunicationError>([&] { engine.step(); }),
                HasSubstr("rank 2 has a learning rate of 0.25 for step 1, rank 0 one of 0.05"));
  });
}

using SavedRule = Saving;

TEST_F(SavedRule, ASetRateIsPartOfTheRun) {
  OddRun run;
  run.ranks = 2;
  run.stage = 2;
  kernels::Digest expected;
  on_ranks(run, [&](Engine& engine, Runtime& runtime) {
    engine.set_learning_rate(0.01);
    ruled_step(engine, runtime);
    engine.save(path(), {.wait = true});
    ruled_step(engine, runtime);
    const kernels::Digest digest = engine.state_digest();
    if (runtime.rank() == 0) expected = digest;
  });
  on_ranks(run, [&](Engine& engine, Runtime& runtime) {
    EXPECT_TRUE(engine.load(path()).notes.empty());
    EXPECT_EQ(ruled_step(engine, runtime).learning_rate, 0.01);
    EXPECT_EQ(engine.state_digest(), expected);
    engine.set_learning_rate(0.125);
    engine.load(path(), {.weights_only = true});
    EXPECT_EQ(ruled_step(engine, runtime).learning_rate, 0.125) << "of this run, not of the weights'";
    engine.set_learning_rate(std::nullopt);
    engine.save(path("later"), {.wait = true});
    engine.set_learning_rate(0.125);
    engine.load(path("later"));
    EXPECT_EQ(ruled_step(engine, runtime).learning_rate, 0.05) << "nothing was set then";
  });
}

TEST_F(SavedRule, ChangedSettingsAreTold) {
  const OddRun run;
  Config config = odd_config(run);
  config.optimizer = {.type = "AdamW"};
  const auto on_one_rank = [](const Config& settings, EngineOptions options,
                              const std::function<void(Engine&)>& body) {
    Runtime runtime(RuntimeOptions::from(settings), make_self_communicator);
    Engine engine(runtime, odd_model(), settings, std::move(options));
    body(engine);
  };
  const auto changes = [&](const Config& settings, EngineOptions options = {}, LoadOptions how = {}) {
    std::vector<std::string> told;
    on_one_rank(settings, std::move(options),
                [&](Engine& engine) { told = engine.load(path(), how).changes; });
    return told;
  };
  on_one_rank(config, {}, [&](Engine& engine) { engine.save(path(), {.wait = true}); });
  EXPECT_THAT(changes(config), IsEmpty());
  Config other = config;
  other.optimizer.learning_rate = 0.25;
  other.stage = 1;
  other.threads = 1;
  EXPECT_THAT(changes(other),
              ElementsAre("optimizer.params.lr is 0.25, was 0.001", "zero_optimization.stage is 1, was 0"))
      << "threads change no result";
  EXPECT_THAT(changes(other, {}, {.weights_only = true}), IsEmpty());
  const auto other_betas = AllOf(HasSubstr("the optimizer's betas is [0.9"), HasSubstr("0.5], was [0.9"));
  EXPECT_THAT(changes(config, {.optimizer = make_adam({.beta2 = 0.5f})}), ElementsAre(other_betas));
  EXPECT_THAT(
      changes(other, {.optimizer = make_adam({.beta2 = 0.5f})}),
      ElementsAre(HasSubstr("optimizer.params.lr"), HasSubstr("zero_optimization.stage"), other_betas));
}

TEST_F(SavedRule, AnotherScheduleIsTold) {
  const OddRun run;
  const auto load = [&](EngineOptions options) {
    std::vector<std::string> notes;
    Config config = odd_config(run);
    Runtime runtime(RuntimeOptions::from(config), make_self_communicator);
    Engine engine(runtime, odd_model(), config, std::move(options));
    return engine.load(path()).notes;
  };
  on_scheduled_ranks(
      run, [](int) { return with_schedule(falling); },
      [&](Engine& engine, Runtime&) { engine.save(path(), {.wait = true}); });
  EXPECT_TRUE(load(with_schedule(falling)).empty());
  EXPECT_THAT(load(with_schedule(falling, "other")),
              Contains(R"(the program's schedule is {"type":"other"}, was {"type":"formula"})"));
  EXPECT_THAT(load({}),
              Contains(R"(the schedule is the configuration's, was the program's own {"type":"formula"})"));
}

}  // namespace
}  // namespace tranche::test
