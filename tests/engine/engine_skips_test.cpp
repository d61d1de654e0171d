// Steps that are not applied: the reasons, the state that they leave unchanged, and the counters.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "on_ranks.h"

namespace tranche::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(EngineSkips, NonFiniteGradientsAreNamedAndNothingChanges) {
  for (int stage = 0; stage <= 3; ++stage) {
    OddRun run;
    run.ranks = 3;
    run.stage = stage;
    run.dtype = DataType::bfloat16;
    on_ranks(run, [&](Engine& engine, Runtime& runtime) {
      whole_step(engine, runtime, 0);
      EXPECT_TRUE(engine.step().applied);
      const kernels::Digest before = engine.state_digest();
      whole_step(engine, runtime, 1, runtime.rank() == 1 ? "mixed.g" : "");
      const StepResult skipped = engine.step();
      EXPECT_FALSE(skipped.applied);
      EXPECT_EQ(skipped.skipped_because, "gradient of mixed.g at element 2 is not finite")
          << "stage " << stage;
      EXPECT_EQ(engine.state_digest(), before);
      EXPECT_EQ(engine.applied_steps(), 1);
      whole_step(engine, runtime, 2);
      EXPECT_TRUE(engine.step().applied);
      EXPECT_FALSE(engine.state_digest() == before);
    });
  }
}

TEST(EngineSkips, TooManyInARowIsAnError) {
  on_ranks({}, [](Engine& first, Runtime&) {
    static_cast<void>(first);
    OddRun run;
    Config config = odd_config(run);
    config.maximum_consecutive_skips = 2;
    Runtime runtime(RuntimeOptions::from(config), make_self_communicator);
    Engine engine(runtime, odd_model(), config);
    whole_step(engine, runtime, 0, "prime.c");
    EXPECT_FALSE(engine.step().applied);
    whole_step(engine, runtime, 1, "prime.c");
    EXPECT_THAT(message_of<NumericalError>([&] { engine.step(); }),
                AllOf(HasSubstr("2 steps in a row were skipped"), HasSubstr("prime.c at element 2"),
                      HasSubstr("tranche.maximum_consecutive_skips")));
  });
}

TEST(EngineSkips, AnAppliedStepEndsTheRow) {
  OddRun run;
  Config config = odd_config(run);
  config.maximum_consecutive_skips = 2;
  Runtime runtime(RuntimeOptions::from(config), make_self_communicator);
  Engine engine(runtime, odd_model(), config);
  for (int step = 0; step < 5; ++step) {
    whole_step(engine, runtime, step, step % 2 == 0 ? "prime.c" : "");
    EXPECT_EQ(engine.step().applied, step % 2 == 1);
  }
}

TEST(EngineSkips, TheScheduleCountsAppliedStepsOnly) {
  OddRun run;
  Config config = odd_config(run);
  config.schedule.type = "WarmupLR";
  config.schedule.parameters_json =
      R"({"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 10, "warmup_type": "linear"})";
  Runtime runtime(RuntimeOptions::from(config), make_self_communicator);
  Engine engine(runtime, odd_model(), config);
  std::vector<double> rates;
  for (int step = 0; step < 4; ++step) {
    whole_step(engine, runtime, step, step == 1 ? "prime.c" : "");
    rates.push_back(engine.step().learning_rate);
  }
  EXPECT_LT(rates[0], rates[1]);
  EXPECT_EQ(rates[1], rates[2]) << "the skipped step's rate is used by the next";
  EXPECT_LT(rates[2], rates[3]);
}

TEST(EngineSkips, LossScaleHalvesOnOverflow) {
  OddRun run;
  run.dtype = DataType::float16;
  Config config = odd_config(run);
  config.loss_scaler.hysteresis = 1;
  Runtime runtime(RuntimeOptions::from(config), make_self_communicator);
  Engine engine(runtime, odd_model(), config);
  const float scale = engine.loss_gradient_scale();
  whole_step(engine, runtime, 0, "prime.c");
  const StepResult skipped = engine.step();
  EXPECT_FALSE(skipped.applied);
  EXPECT_EQ(skipped.loss_scale, 1024);
  EXPECT_EQ(engine.loss_gradient_scale(), scale / 2);
  whole_step(engine, runtime, 1);
  EXPECT_EQ(engine.step().loss_scale, 512);
}

}  // namespace
}  // namespace tranche::test
