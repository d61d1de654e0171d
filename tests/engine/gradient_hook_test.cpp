// The gradient hook between the last micro-batch and the update: it reads or writes gradients, or skips the
// step.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <stdexcept>

#include "device/cuda_probe.h"
#include "on_ranks.h"
#include "saving_fixture.h"
#include "tests/core/rounds.h"

namespace tranche::test {
namespace {

using ::testing::AllOf;      // NOLINT(misc-unused-using-decls): generic lambdas use it
using ::testing::HasSubstr;  // NOLINT(misc-unused-using-decls): generic lambdas use it

/// Runs all micro-batches of a step. The number of samples is a power of two, so that means are exact.
void micro_batches(Engine& engine, Runtime& runtime, const std::string& poison = {}) {
  const std::int64_t count = engine.config().accumulation_steps;
  for (std::int64_t m = 0; m < count; ++m) {
    const std::int64_t block = (engine.steps() * count + m) * runtime.size() + runtime.rank();
    odd_micro_batch(engine, block * 2, 2, poison);
  }
}

/// Doubles every trainable tensor's gradient.
void double_gradients(Engine& engine) {
  for (const UnitSpec& unit : engine.model().units()) {
    for (const TensorSpec& tensor : unit.tensors) {
      if (engine.frozen(tensor.name)) continue;
      std::vector<float> values = engine.read_gradient(tensor.name);
      for (float& value : values) value *= 2;
      engine.write_gradient(tensor.name, values);
    }
  }
}

class Gradients : public Saving {
 protected:
  enum class When { never, before_step, in_hook };

  static kernels::Digest trained(const OddRun& run, When when, double rate, std::vector<double>& norms) {
    kernels::Digest digest;
    on_ranks(
        run,
        [&](Engine& engine, Runtime& runtime) {
          if (when == When::in_hook) {
            engine.set_gradient_hook([&](const StepResult&) {
              double_gradients(engine);
              return std::string();
            });
          }
          for (int step = 0; step < run.steps; ++step) {
            micro_batches(engine, runtime);
            if (when == When::before_step) double_gradients(engine);
            const StepResult result = engine.step();
            EXPECT_TRUE(result.applied) << result.skipped_because;
            if (runtime.rank() == 0) norms.push_back(result.gradient_norm);
          }
          const kernels::Digest mine = engine.weights_digest();
          if (runtime.rank() == 0) digest = mine;
        },
        [&](Config& config, RuntimeOptions& options) {
          config.optimizer.parameters.erase("momentum");
          config.optimizer.learning_rate = rate;
          options.device = run.device;
        });
    return digest;
  }

  /// Expects a step of SGD with doubled gradients to equal one with a doubled rate.
  void expect_doubled(OddRun run) {
    run.clipping = 0;
    run.optimizer = "SGD";
    run.steps = 3;
    run.offload.nvme_path = std::filesystem::temp_directory_path().string();
    std::vector<double> norms, norms_before, norms_in_hook;
    const kernels::Digest expected = trained(run, When::never, 0.1, norms);
    EXPECT_EQ(trained(run, When::before_step, 0.05, norms_before), expected) << run.to_string();
    EXPECT_EQ(trained(run, When::in_hook, 0.05, norms_in_hook), expected) << run.to_string();
    for (double& norm : norms) norm *= 2;
    EXPECT_EQ(norms_before, norms) << "the step sees what was written before it: " << run.to_string();
    for (double& norm : norms) norm /= 2;
    EXPECT_EQ(norms_in_hook, norms) << "the norm is agreed before the hook: " << run.to_string();
  }

  void expect_doubled_of_all(DeviceKind device) {
    int point = 0;
    for (const int ranks : {1, 2, 4}) {
      for (const int stage : {0, 1, 2, 3}) {
        for (const OffloadTier tier : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
          for (const ReductionPolicy policy : {ReductionPolicy::boundary, ReductionPolicy::micro_batch}) {
            if (!swept(point++, 5)) continue;
            OddRun run;
            run.device = device;
            run.ranks = ranks;
            run.stage = stage;
            run.policy = policy;
            run.dtype = point % 3 == 0 ? DataType::bfloat16 : DataType::float32;
            run.accumulation_dtype = point % 7 == 0 ? DataType::bfloat16 : DataType::float32;
            run.accumulation = 1 + point / 2 % 2;
            run.offload.optimizer = tier;
            if (stage == 3) run.offload.parameters = tier;
            run.offload.ratio = point % 4 == 0 ? 0.5 : 1;
            expect_doubled(run);
          }
        }
      }
    }
  }
};

#if defined(TRANCHE_ENGINE_TESTS_ON_GPU)
TEST_F(Gradients, WrittenAreWhatTheStepUsesOnAGpu) {
  const detail::CudaProbe probe = detail::probe_cuda();
  if (probe.devices.empty()) GTEST_SKIP() << probe.problem;
  expect_doubled_of_all(DeviceKind::cuda);
}
#else
StepResult even_step(Engine& engine, Runtime& runtime, const std::string& poison = {}) {
  micro_batches(engine, runtime, poison);
  return engine.step();
}

TEST_F(Gradients, WrittenAreWhatTheStepUses) {
  expect_doubled_of_all(DeviceKind::cpu);
}

TEST_F(Gradients, WrittenBeforeTheStepMaySkipIt) {
  for (const OffloadTier tier : {OffloadTier::none, OffloadTier::cpu}) {
    OddRun run;
    run.ranks = 2;
    run.stage = 2;
    run.offload.optimizer = tier;
    on_ranks(run, [](Engine& engine, Runtime& runtime) {
      micro_batches(engine, runtime);
      std::vector<float> values = engine.read_gradient("mixed.g");
      values[299] = std::numeric_limits<float>::quiet_NaN();
      engine.write_gradient("mixed.g", values);
      EXPECT_EQ(engine.step().skipped_because, "gradient of mixed.g at element 299 is not finite");
      EXPECT_TRUE(even_step(engine, runtime).applied);
    });
  }
}

TEST_F(Gradients, AreWholeBeforeTheyAreWritten) {
  OddRun run;
  run.ranks = 2;
  run.accumulation = 2;
  on_ranks(run, [](Engine& engine, Runtime& runtime) {
    const std::vector<float> values(7, 1.0f);
    const auto refused = [&] {
      EXPECT_THAT(message_of<LogicError>([&] { engine.write_gradient("tied.a", values); }),
                  HasSubstr("write_gradient(tied.a) before a step's gradients are whole: call it between the "
                            "last of its 2 micro-batches and step(), or in the gradient hook"));
    };
    refused();
    odd_micro_batch(engine, runtime.rank() * 2, 2);
    refused();
    engine.begin_micro_batch();
    refused();
    for (int unit = 0; unit < 4; ++unit) engine.skip_gradients({unit});
    end_with(engine, 0, 2);
    engine.write_gradient("tied.a", values);
    EXPECT_EQ(engine.read_gradient("tied.a"), values);
    EXPECT_THAT(message_of<InvalidArgument>([&] { engine.write_gradient("tied.a", std::vector<float>(6)); }),
                HasSubstr("write_gradient(tied.a) wants 7 values of shape [7], got 6"));
    EXPECT_THAT(message_of<InvalidArgument>(
                    [&] { engine.write_gradient(odd_frozen_tensor, std::vector<float>(131)); }),
                HasSubstr("tensor mixed.frozen is frozen and has no gradient"));
    EXPECT_THAT(message_of<InvalidArgument>([&] { engine.write_gradient("tied.x", values); }),
                HasSubstr("the model has no tensor 'tied.x'"));
    EXPECT_TRUE(engine.step().applied) << "the engine has borne it";
    refused();
    for (int m = 0; m < 2; ++m) {
      engine.begin_micro_batch();
      for (int unit = 0; unit < 4; ++unit) engine.skip_gradients({unit});
      end_with(engine, 0, 0);
    }
    EXPECT_THAT(message_of<LogicError>([&] { engine.write_gradient("tied.a", values); }),
                HasSubstr("write_gradient(tied.a): the step saw no tokens, so it has no mean"));
  });
}

TEST(GradientHook, SeesWhatTheUpdateTakes) {
  for (int stage = 0; stage <= 3; ++stage) {
    OddRun run;
    run.ranks = 2;
    run.stage = stage;
    on_ranks(
        run,
        [&](Engine& engine, Runtime& runtime) {
          std::vector<float> before, seen;
          StepResult found;
          engine.set_gradient_hook([&](const StepResult& step) {
            found = step;
            seen = engine.read_gradient("prime.c");
            return std::string();
          });
          micro_batches(engine, runtime);
          before = engine.read_gradient("prime.c");
          const StepResult result = engine.step();
          EXPECT_TRUE(result.applied);
          EXPECT_EQ(found.step, 1);
          EXPECT_EQ(found.loss, result.loss);
          EXPECT_EQ(found.tokens, result.tokens);
          EXPECT_EQ(found.gradient_norm, result.gradient_norm);
          EXPECT_EQ(found.learning_rate, result.learning_rate);
          EXPECT_EQ(found.loss_scale, 1024);
          EXPECT_LT(found.clip_coefficient, 0.5);
          EXPECT_EQ(found.clip_coefficient, result.clip_coefficient);
          // The two sides multiply by one or by two factors, each rounded to fp32.
          for (std::size_t i = 0; i < seen.size(); ++i) {
            EXPECT_NEAR(seen[i], before[i] * found.clip_coefficient, 3e-7 * std::abs(before[i]));
          }
          engine.set_gradient_hook({});
          found = {};
          EXPECT_TRUE(even_step(engine, runtime).applied);
          EXPECT_EQ(found.step, 0) << "called after it was taken back";
        },
        [](Config& config, RuntimeOptions&) {
          config.precision.compute = config.precision.communication = DataType::float16;
          config.loss_scaling = true;
          config.gradient_clipping = 0.25;
        });
  }
}

TEST(GradientHook, SkipsAStepOnAllRanks) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (const OffloadTier tier : {OffloadTier::none, OffloadTier::cpu}) {
      OddRun run;
      run.ranks = 2;
      run.stage = stage;
      run.dtype = DataType::float16;
      run.offload.optimizer = tier;
      on_ranks(
          run,
          [&](Engine& engine, Runtime& runtime) {
            bool skip = false;
            int calls = 0;
            engine.set_gradient_hook([&](const StepResult&) {
              ++calls;
              if (skip) double_gradients(engine);  // has no effect, because the step is skipped
              return std::string(skip ? "too steep" : "");
            });
            EXPECT_TRUE(even_step(engine, runtime).applied);
            const kernels::Digest before = engine.state_digest();
            skip = true;
            for (int step = 0; step < 4; ++step) {  // more than the number of consecutive steps that may be
                                                    // skipped
              const StepResult result = even_step(engine, runtime);
              EXPECT_FALSE(result.applied);
              EXPECT_EQ(result.skipped_because, "the gradient hook: too steep");
              EXPECT_EQ(result.loss_scale, 1024) << "no overflow";
              EXPECT_LT(result.learning_rate, 0.03) << "the schedule waits";
            }
            EXPECT_EQ(engine.state_digest(), before);
            EXPECT_EQ(engine.applied_steps(), 1);
            EXPECT_EQ(engine.steps(), 5);
            EXPECT_EQ(calls, 5);
            skip = false;
            EXPECT_FALSE(even_step(engine, runtime, "prime.c").applied);
            EXPECT_EQ(calls, 5) << "called after an overflow";
            EXPECT_TRUE(even_step(engine, runtime).applied);
          },
          [](Config& config, RuntimeOptions&) {
            config.maximum_consecutive_skips = 3;
            config.loss_scaler.hysteresis = 1;
            config.schedule.type = "WarmupLR";
            config.schedule.parameters_json =
                R"({"warmup_min_lr": 0.01, "warmup_max_lr": 0.1, "warmup_num_steps": 10, "warmup_type": "linear"})";
          });
    }
  }
}

TEST(GradientHook, MustAnswerTheSameOnAllRanks) {
  OddRun run;
  run.ranks = 2;
  run.stage = 2;
  on_ranks(run, [](Engine& engine, Runtime& runtime) {
    engine.set_gradient_hook(
        [&](const StepResult&) { return std::string(runtime.rank() == 1 ? "too steep" : ""); });
    micro_batches(engine, runtime);
    EXPECT_THAT(
        message_of<CommunicationError>([&] { engine.step(); }),
        HasSubstr(
            "the gradient hook of rank 1 says 'too steep' in step 1, that of rank 0 '': all ranks must"));
  });
  on_ranks(run, [](Engine& engine, Runtime& runtime) {
    if (runtime.rank() == 0) engine.set_gradient_hook([](const StepResult&) { return std::string(); });
    micro_batches(engine, runtime);
    EXPECT_THAT(message_of<CommunicationError>([&] { engine.step(); }),
                HasSubstr("rank 1 has no gradient hook for step 1, rank 0 has one: set it on all ranks"));
  });
}

TEST(GradientHook, AnExceptionThatLeavesItEndsAllRanks) {
  OddRun run;
  run.ranks = 2;
  on_ranks(run, [](Engine& engine, Runtime& runtime) {
    engine.set_gradient_hook([&](const StepResult&) -> std::string {
      if (runtime.rank() == 1) throw InvalidArgument("the plateau has no end");
      return "";
    });
    micro_batches(engine, runtime);
    if (runtime.rank() == 1) {
      EXPECT_THAT(message_of<InvalidArgument>([&] { engine.step(); }), HasSubstr("the plateau has no end"));
      EXPECT_THAT(message_of<InvalidArgument>([&] { engine.begin_micro_batch(); }),
                  HasSubstr("the plateau has no end"));
    } else {
      EXPECT_THAT(message_of<CommunicationError>([&] { engine.step(); }),
                  HasSubstr("the plateau has no end"));
    }
  });
}

TEST(GradientHook, RefusesWhatCannotBeDoneThere) {
  OddRun run;
  run.ranks = 2;
  on_ranks(run, [](Engine& engine, Runtime& runtime) {
    int calls = 0;
    engine.set_gradient_hook([&](const StepResult&) {
      ++calls;
      EXPECT_THAT(message_of<LogicError>([&] { engine.step(); }),
                  HasSubstr("step() inside the gradient hook"));
      EXPECT_THAT(message_of<LogicError>([&] { engine.begin_micro_batch(); }), HasSubstr("call step()"));
      EXPECT_THAT(message_of<LogicError>([&] { engine.begin_evaluation(); }), HasSubstr("inside a step"));
      EXPECT_THAT(message_of<LogicError>([&] { engine.save("nowhere"); }), HasSubstr("inside a step"));
      EXPECT_THAT(message_of<LogicError>([&] { engine.write_weight("tied.a", {}); }),
                  HasSubstr("inside a step"));
      std::vector<float> values(7, 0.0f);
      values[3] = std::numeric_limits<float>::infinity();
      EXPECT_THAT(
          message_of<InvalidArgument>([&] { engine.write_gradient("tied.a", values); }),
          HasSubstr("write_gradient(tied.a) in the gradient hook: inf at element 3 does not fit fp32; "
                    "skip the step instead"));
      EXPECT_EQ(engine.read_weight("tied.a").size(), 7u);
      return std::string();
    });
    EXPECT_TRUE(even_step(engine, runtime).applied);
    EXPECT_EQ(calls, 1);
  });
}

/// Adds to all weights of a tensor the sum of its gradients.
class Summing final : public Optimizer {
 public:
  std::string name() const override { return "Summing"; }
  std::vector<OptimizerStateTensor> state(const TrainableTensor&) const override { return {}; }
  int sums(const TrainableTensor&) const override { return 1; }
  void prepare(Stream&, const OptimizerStep&, const UpdateRange& range) const override {
    for (const TensorSegment& segment : range.segments) {
      const ConstTensorView gradient = range.part(segment).gradient;
      for (std::int64_t i = 0; i < gradient.elements(); ++i) segment.partial->add(gradient.as<float>()[i]);
    }
  }
  void apply(Stream&, const OptimizerStep& step, const UpdateRange& range) const override {
    for (const TensorSegment& segment : range.segments) {
      const TensorView master = range.part(segment).master;
      for (std::int64_t i = 0; i < master.elements(); ++i) {
        master.as<float>()[i] = static_cast<float>(*segment.sums * static_cast<double>(step.gradient_scale));
      }
    }
  }
  std::string describe() const override { return "{}"; }
};

TEST(GradientHook, WritesBeforeAnOptimizerSums) {
  const Config config = odd_config({});
  Runtime runtime(RuntimeOptions::from(config), make_self_communicator);
  Engine engine(runtime, odd_model(), config, {.optimizer = std::make_unique<Summing>()});
  engine.set_gradient_hook([&](const StepResult&) {
    engine.write_gradient("tied.a", std::vector<float>(7, 0.5f));
    return std::string();
  });
  micro_batches(engine, runtime);
  EXPECT_TRUE(engine.step().applied);
  for (const float weight : engine.read_weight("tied.a")) EXPECT_FLOAT_EQ(weight, 3.5f);
}
#endif

}  // namespace
}  // namespace tranche::test
