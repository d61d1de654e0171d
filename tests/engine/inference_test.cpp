// Forward passes without training.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <stdexcept>

#include "on_ranks.h"

namespace tranche::test {
namespace {

using ::testing::HasSubstr;

float first_value(const ConstTensorView& view) {
  return view.dtype == DataType::float32 ? view.as<float>()[0] : to_float(view.as<bfloat16>()[0]);
}

/// A pass over all units; returns the first value of the first tensor of each, through memory of the pass.
std::vector<float> forward(Engine& engine) {
  const InferenceScope scope(engine);
  StepBuffer values = engine.acquire(16, Category::activations, "values");
  for (int unit = 0; unit < 4; ++unit) {
    const GatheredUnit weights = engine.gather({unit});
    static_cast<float*>(values.data())[unit] = first_value(weights.tensor(0));
  }
  const auto* all = static_cast<const float*>(values.data());
  return {all, all + 4};
}

void expect_newest(Engine& engine, const std::vector<float>& seen) {
  for (std::size_t unit = 0; unit < 4; ++unit) {
    const float weight = engine.read_weight(engine.model().units()[unit].tensors[0].name)[0];
    EXPECT_EQ(seen[unit], engine.config().precision.compute == DataType::bfloat16
                              ? to_float(to_bfloat16(weight))
                              : weight);
  }
}

TEST(Inference, SeesTheNewestWeightsAndLeavesTrainingAlone) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (const OffloadTier tier : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
      OddRun run;
      run.ranks = 3;
      run.stage = stage;
      run.dtype = stage % 2 == 0 ? DataType::float32 : DataType::bfloat16;
      run.poison = true;
      run.offload.optimizer = tier;
      if (stage == 3) run.offload.parameters = tier;
      run.offload.nvme_path = std::filesystem::temp_directory_path().string();
      kernels::Digest digests[2];
      for (const bool inference : {false, true}) {
        on_ranks(run, [&](Engine& engine, Runtime& runtime) {
          for (int step = 0; step < 5; ++step) {
            const std::int64_t calls = runtime.memory_calls();
            if (inference) {
              const std::vector<float> seen = forward(engine);
              if (step >= 3) {
                EXPECT_EQ(runtime.memory_calls(), calls) << "stage " << stage << " step " << step;
              }
              expect_newest(engine, seen);
            }
            whole_step(engine, runtime, step);
            EXPECT_TRUE(engine.step().applied);
          }
          const kernels::Digest digest = engine.state_digest();
          if (runtime.rank() == 0) digests[inference] = digest;
        });
      }
      EXPECT_EQ(digests[0], digests[1]) << "stage " << stage << " " << name_of(tier);
    }
  }
}

TEST(Inference, IsApartFromStepsAndEvaluations) {
  OddRun run;
  run.ranks = 2;
  run.stage = 3;
  run.accumulation = 2;
  on_ranks(run, [](Engine& engine, Runtime& runtime) {
    const auto refused = [&] { return message_of<LogicError>([&] { InferenceScope scope(engine); }); };
    odd_micro_batch(engine, 0, 2);
    EXPECT_THAT(refused(), HasSubstr("an inference scope inside a step"));
    odd_micro_batch(engine, 0, 2);
    engine.step();
    engine.begin_evaluation();
    EXPECT_THAT(refused(), HasSubstr("inside an evaluation"));
    engine.end_evaluation();
    {
      const InferenceScope scope(engine);
      EXPECT_THAT(refused(), HasSubstr("inside another"));
      EXPECT_THAT(message_of<LogicError>([&] { engine.begin_micro_batch(); }),
                  HasSubstr("begin_micro_batch() inside an inference scope"));
      EXPECT_THAT(message_of<LogicError>([&] { end_with(engine, 0, 1); }),
                  HasSubstr("end_micro_batch() inside an inference scope, which has no loss"));
      EXPECT_THAT(message_of<LogicError>([&] { engine.gradients({0}); }), HasSubstr("outside a training"));
      EXPECT_THAT(message_of<LogicError>([&] { engine.step(); }), HasSubstr("step() inside a micro-batch"));
      EXPECT_THAT(message_of<LogicError>([&] { engine.begin_evaluation(); }),
                  HasSubstr("inside an evaluation"));
      EXPECT_THAT(message_of<LogicError>([&] { engine.end_evaluation(); }), HasSubstr("end_evaluation()"));
      EXPECT_THAT(message_of<LogicError>([&] { engine.save("nowhere"); }), HasSubstr("save() inside"));
    }
    EXPECT_THAT(message_of<LogicError>([&] { engine.gather({0}); }), HasSubstr("outside a micro-batch"));
    whole_step(engine, runtime, 1);
    EXPECT_TRUE(engine.step().applied);
  });
}

TEST(Inference, LeftByAnExceptionOrTooEarlyTheEngineGoesOn) {
  OddRun run;
  run.ranks = 2;
  run.stage = 3;
  on_ranks(run, [](Engine& engine, Runtime& runtime) {
    for (int pass = 0; pass < 3; ++pass) forward(engine);
    try {
      const InferenceScope scope(engine);
      const GatheredUnit weights = engine.gather({0});
      const StepBuffer memory = engine.acquire(64, Category::activations, "values");
      throw std::runtime_error("no more tokens");
    } catch (const std::runtime_error&) {
    }
    expect_newest(engine, forward(engine));
    {
      StepBuffer kept;
      GatheredUnit held;
      {
        const InferenceScope scope(engine);
        kept = engine.acquire(64, Category::activations, "kept too long");
        held = engine.gather({1});
      }
    }
    for (int pass = 0; pass < 3; ++pass) expect_newest(engine, forward(engine));
    whole_step(engine, runtime, 0);
    EXPECT_TRUE(engine.step().applied);
  });
}

// Scopes with different buffers have separate plans, keyed by their shapes.
TEST(Inference, ScopesOfManyKindsArePlannedUntilTheyAreTooMany) {
  OddRun run;
  ::testing::internal::CaptureStderr();
  on_ranks(
      run,
      [](Engine& engine, Runtime& runtime) {
        const auto calls_of = [&](std::int64_t kind) {
          const std::int64_t calls = runtime.memory_calls();
          const InferenceScope scope(engine, {kind});
          for (std::int64_t i = 0; i < kind; ++i) engine.acquire(256, Category::activations, "x").release();
          engine.acquire(256, Category::other, "end").release();
          return runtime.memory_calls() - calls;
        };
        for (int round = 0; round < 4; ++round) {
          for (const std::int64_t kind : {1, 5, 3}) {
            const std::int64_t calls = calls_of(kind);
            EXPECT_TRUE(round < 2 || calls == 0) << "kind " << kind << " round " << round;
          }
        }
        for (std::int64_t kind = 10; kind < 12 + static_cast<std::int64_t>(StepArena::most_shapes); ++kind) {
          calls_of(kind);
        }
        EXPECT_GT(calls_of(5), 0);
      },
      [](Config&, RuntimeOptions& options) { options.log_level = LogLevel::info; });
  const std::string text = ::testing::internal::GetCapturedStderr();
  const std::size_t said = text.find("passes of many shapes need different buffers");
  EXPECT_NE(said, std::string::npos) << text;
  EXPECT_EQ(text.find("passes of many shapes", said + 1), std::string::npos) << "once";
}

}  // namespace
}  // namespace tranche::test
