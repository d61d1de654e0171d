// A batch that changes between steps.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "on_ranks.h"
#include "saving_fixture.h"
#include "tests/core/rounds.h"

namespace tranche::test {
namespace {

using ::testing::HasSubstr;

/// Runs a step of the engine's present batch with samples that the run has not used yet.
StepResult batch_step(Engine& engine, Runtime& runtime) {
  const std::int64_t size = engine.config().micro_batch_size;
  const std::int64_t first = engine.samples();
  for (std::int64_t m = 0; m < engine.config().accumulation_steps; ++m) {
    odd_micro_batch(engine, first + (m * runtime.size() + runtime.rank()) * size, size);
  }
  return engine.step();
}

class Batch : public Saving {
 protected:
  struct Sizes {
    std::int64_t micro_batch, accumulation;
  };
  static constexpr Sizes small{2, 1}, ramped{4, 3}, last{1, 2};

  /// A ramp and a last short step, on one engine, or on several engines that continue through checkpoints.
  kernels::Digest trained(const OddRun& run, bool one_engine) {
    kernels::Digest digest;
    const auto with = [&](const Sizes& sizes, const std::function<void(Engine&, Runtime&)>& body) {
      on_ranks(run, body, [&](Config& config, RuntimeOptions&) {
        config.micro_batch_size = sizes.micro_batch;
        config.accumulation_steps = sizes.accumulation;
        config.train_batch_size = 0;
      });
    };
    const auto steps = [&](Engine& engine, Runtime& runtime, int count) {
      for (int step = 0; step < count; ++step) EXPECT_TRUE(batch_step(engine, runtime).applied);
    };
    const auto finish = [&](Engine& engine, Runtime& runtime) {
      steps(engine, runtime, 1);
      EXPECT_EQ(engine.samples(), run.ranks * (2 * 2 + 4 * 4 * 3 + 1 * 2));
      EXPECT_EQ(engine.steps(), 7);
      const kernels::Digest mine = engine.state_digest();
      if (runtime.rank() == 0) digest = mine;
    };
    if (one_engine) {
      with(small, [&](Engine& engine, Runtime& runtime) {
        steps(engine, runtime, 2);
        engine.set_batch(ramped.micro_batch, ramped.accumulation);
        EXPECT_EQ(engine.config().train_batch_size, 12 * run.ranks);
        for (int step = 0; step < 4; ++step) {
          const std::int64_t calls = runtime.memory_calls();
          steps(engine, runtime, 1);
          EXPECT_TRUE(step < 2 || runtime.memory_calls() == calls) << "step " << step << run.to_string();
        }
        engine.set_batch(last.micro_batch, last.accumulation);
        finish(engine, runtime);
      });
      return digest;
    }
    with(small, [&](Engine& engine, Runtime& runtime) {
      steps(engine, runtime, 2);
      engine.save(path("ramped"), {.wait = true});
    });
    with(ramped, [&](Engine& engine, Runtime& runtime) {
      engine.load(path("ramped"));
      steps(engine, runtime, 4);
      engine.save(path("last"), {.wait = true});
    });
    with(last, [&](Engine& engine, Runtime& runtime) {
      engine.load(path("last"));
      finish(engine, runtime);
    });
    std::filesystem::remove_all(path("ramped"));
    std::filesystem::remove_all(path("last"));
    return digest;
  }
};

TEST_F(Batch, ChangedHasTheBitsOfAnEngineMadeWithIt) {
  int point = 0;
  for (const int ranks : {1, 3}) {
    for (const int stage : {0, 1, 2, 3}) {
      for (const OffloadTier tier : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
        if (!swept(point++, 5)) continue;
        OddRun run;
        run.ranks = ranks;
        run.stage = stage;
        run.policy = point % 2 == 0 ? ReductionPolicy::boundary : ReductionPolicy::micro_batch;
        run.dtype = point / 2 % 2 == 0 ? DataType::bfloat16 : DataType::float32;
        run.poison = point % 3 == 0;
        run.offload.optimizer = tier;
        if (stage == 3) run.offload.parameters = tier;
        run.offload.nvme_path = std::filesystem::temp_directory_path().string();
        EXPECT_EQ(trained(run, true), trained(run, false)) << run.to_string();
      }
    }
  }
}

TEST_F(Batch, HoldsTheMemoryOfAnEngineMadeWithIt) {
  for (const Sizes to : {ramped, last, Sizes{8, 1}}) {
    for (const DeviceKind device : {DeviceKind::cpu, DeviceKind::meta}) {
      CategoryBytes persistent[2], current[2];
      for (const bool changed : {false, true}) {
        OddRun run;
        run.stage = 2;
        run.offload.optimizer = OffloadTier::cpu;
        run.accumulation = changed ? (to.accumulation == 1 ? 3 : 1) : to.accumulation;
        run.samples_per_micro_batch = changed ? 5 : to.micro_batch;
        on_ranks(
            run,
            [&](Engine& engine, Runtime& runtime) {
              if (changed) {
                for (int step = 0; step < 3; ++step) batch_step(engine, runtime);
                engine.set_batch(to.micro_batch, to.accumulation);
              }
              for (int step = 0; step < 3; ++step) batch_step(engine, runtime);
              persistent[changed] = runtime.ledger().account(Tier::device).persistent;
              current[changed] = runtime.ledger().account(Tier::device).current;
            },
            [&](Config&, RuntimeOptions& options) { options.device = device; });
      }
      EXPECT_EQ(persistent[0].bytes, persistent[1].bytes) << to.micro_batch << " x " << to.accumulation;
      EXPECT_EQ(current[0].bytes, current[1].bytes) << to.micro_batch << " x " << to.accumulation;
    }
  }
}

TEST_F(Batch, ScalesTheLossGradientByItsOwnTokens) {
  on_ranks({}, [](Engine& engine, Runtime& runtime) {
    engine.set_batch(8, 1);
    EXPECT_EQ(engine.loss_gradient_scale(), 1.0f / 8);
    batch_step(engine, runtime);
    engine.set_batch(8, 4);
    EXPECT_EQ(engine.loss_gradient_scale(), 1.0f / 32);
    EXPECT_EQ(batch_step(engine, runtime).tokens, 32);
  });
}

TEST_F(Batch, IsChangedBetweenStepsByAllRanksAlike) {
  OddRun run;
  run.ranks = 2;
  on_ranks(run, [](Engine& engine, Runtime& runtime) {
    EXPECT_THAT(
        message_of<InvalidArgument>([&] { engine.set_batch(2 + runtime.rank(), 3); }),
        HasSubstr("set_batch(): rank 1 asks for 3 x 3 samples a step, rank 0 for 3 x 2 samples; nothing "
                  "has changed"));
    EXPECT_THAT(message_of<InvalidArgument>([&] { engine.set_batch(2, 0); }),
                HasSubstr("set_batch() to 0 x 2 samples a step; both must be at least 1"));
    EXPECT_EQ(engine.config().micro_batch_size, 3);
    engine.begin_micro_batch();
    EXPECT_THAT(message_of<LogicError>([&] { engine.set_batch(2, 1); }),
                HasSubstr("set_batch() inside a step"));
    for (int unit = 0; unit < 4; ++unit) engine.skip_gradients({unit});
    end_with(engine, 0, 1);
    engine.step();
    engine.begin_evaluation();
    EXPECT_THAT(message_of<LogicError>([&] { engine.set_batch(2, 1); }),
                HasSubstr("set_batch() inside a step"));
    engine.end_evaluation();
    {
      StepBuffer held;
      for (int pass = 0; pass < 4; ++pass) {  // in the last pass its memory is a place in the packed block
        const InferenceScope scope(engine);
        held = engine.acquire(64, Category::activations, "kept");
        if (pass < 3) held.release();
      }
      EXPECT_THAT(message_of<LogicError>([&] { engine.set_batch(2, 1); }),
                  HasSubstr("while buffers are held"));
    }
    engine.set_batch(2, 1);
    EXPECT_TRUE(batch_step(engine, runtime).applied);
  });
}

}  // namespace
}  // namespace tranche::test
