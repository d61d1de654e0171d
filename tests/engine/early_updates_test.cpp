// tranche.update: as_reduced: units are updated while the backward pass goes on, with the bits of updates at
// the boundary; what has to know all gradients first is refused, and what cannot be taken back ends the
// engine.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <limits>
#include <mutex>
#include <thread>

#include "on_ranks.h"
#include "same_bits.h"
#include "tests/core/rounds.h"

namespace tranche::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

OddRun early_run() {
  OddRun run;
  run.whole_samples = true;
  run.clipping = 0;
  run.offload.tile_elements = 4096;
  run.offload.nvme_path = std::filesystem::temp_directory_path().string();
  return run;
}

/// A run with the update at the boundary and without offload, against the same with early updates wherever
/// state lives.
void expect_same_bits(OddRun run, const std::vector<int>& stages) {
  run.update = UpdateTime::at_the_boundary;
  const OddResult expected = train_odd(run);
  EXPECT_NE(expected.steps.back().loss, expected.steps.front().loss);
  run.update = UpdateTime::as_reduced;
  for (const int stage : stages) {
    run.stage = stage;
    for (const OffloadTier tier : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
      for (const OffloadTier parameters : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
        if (stage < 3 && parameters != OffloadTier::none) continue;
        if (tier == OffloadTier::none && parameters == OffloadTier::nvme) continue;
        run.offload.optimizer = tier;
        run.offload.parameters = run.replicate == Replicate::all ? parameters : OffloadTier::none;
        expect_same(expected, train_odd(run), run);
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

TEST(EarlyUpdates, HaveTheBitsOfUpdatesAtTheBoundary) {
  int point = 0;
  for (const ReductionPolicy policy : {ReductionPolicy::boundary, ReductionPolicy::micro_batch}) {
    for (const std::int64_t accumulation : {1, 3}) {
      if (!sampled(point++, 3)) continue;
      OddRun run = early_run();
      run.ranks = accumulation == 1 ? 3 : 2;
      run.dtype = policy == ReductionPolicy::boundary ? DataType::bfloat16 : DataType::float32;
      run.policy = policy;
      run.accumulation = accumulation;
      expect_same_bits(run, {0, 1, 2, 3});
    }
  }
}

TEST(EarlyUpdates, HaveThemWhereAPartOfTheStateStaysInHostMemory) {
  for (const std::int64_t bytes : {8'000, 20'000, 1'000'000}) {
    OddRun run = early_run();
    run.ranks = 2;
    run.dtype = DataType::bfloat16;
    run.offload.host_state = bytes;
    expect_same_bits(run, {2, 3});
  }
}

TEST(EarlyUpdates, HaveThemWithEveryRuleAndFormatOfState) {
  int point = 0;
  const auto with = [&](const std::function<void(OddRun&)>& change) {
    if (!sampled(point++, 4)) return;
    OddRun run = early_run();
    run.ranks = 2;
    run.dtype = DataType::bfloat16;
    change(run);
    expect_same_bits(run, {2, 3});
  };
  with([](OddRun& run) { run.optimizer = "SGD"; });
  with([](OddRun& run) { run.optimizer = "Adam"; });
  with([](OddRun& run) { run.optimizer = "Lion"; });
  with([](OddRun& run) { run.moments = DataType::bfloat16; });
  with([](OddRun& run) {
    run.moments = DataType::block8;
    run.large = true;
  });
  with([](OddRun& run) { run.master = MasterFormat::split; });
  with([](OddRun& run) { run.stochastic_rounding = true, run.master = MasterFormat::none; });
  with([](OddRun& run) { run.accumulation_dtype = DataType::bfloat16; });
  with([](OddRun& run) { run.quantized_gradients = run.quantized_weights = true; });
}

TEST(EarlyUpdates, HaveThemOnMeshesAndOnAnyNumberOfRanks) {
  OddRun run = early_run();
  run.ranks = 4;
  run.reduction_group = 2;
  run.mesh = "replicate=*, shard=2";
  expect_same_bits(run, {0, 3});
  run.replicate = Replicate::parameters;
  run.replica_sum = ReplicaSum::step;
  run.policy = ReductionPolicy::micro_batch;
  run.accumulation = 2;
  run.stage = 1;
  expect_same_bits(run, {1, 3});

  // The last round is short: some ranks have no samples in the micro-batch that completes the gradients.
  OddRun any = early_run();
  any.micro_batches = 4;
  any.ranks = 3;
  expect_same_bits(any, {1, 3});
}

TEST(EarlyUpdates, HaveThemWithSettingsWithoutEffect) {
  OddRun run = early_run();
  run.ranks = 3;
  run.accumulation = 2;
  run.dtype = DataType::bfloat16;
  run.policy = ReductionPolicy::micro_batch;
  const OddResult expected = train_odd(run);
  run.update = UpdateTime::as_reduced;
  int point = 0;
  for (int which = 0; which < settings_without_effect; ++which) {
    for (const int stage : {2, 3}) {
      if (!sampled(point++, 5)) continue;
      OddRun other = run;
      other.stage = stage;
      apply_setting_without_effect(other, which);
      other.offload.tile_buffers = 3 + which % 3;
      expect_same(expected, train_odd(other), other);
    }
  }
}

TEST(EarlyUpdates, HaveNoPartInEvaluations) {
  OddRun run = early_run();
  run.stage = 3;
  run.offload.optimizer = OffloadTier::nvme;
  const auto body = [](Engine& engine, Runtime& runtime) {
    for (int step = 0; step < 3; ++step) {
      whole_step(engine, runtime, step);
      EXPECT_TRUE(engine.step().applied);
      engine.begin_evaluation();
      engine.begin_micro_batch();
      for (const int unit : {0, 1, 2, 3}) (void)engine.gather({unit});
      end_with(engine, 1.0, 2);
      EXPECT_EQ(engine.end_evaluation().tokens, 2);
      EXPECT_FALSE(engine.read_weight("prime.c").empty());
    }
  };
  const kernels::Digest expected = digest_after(run, body);
  run.update = UpdateTime::as_reduced;
  EXPECT_EQ(digest_after(run, body), expected);
}

// Tiles are read from the disk in the order of the previous step. If the order changes, they are read again.
TEST(EarlyUpdates, HaveThemInWhateverOrderGradientsAreCompleted) {
  OddRun run = early_run();
  run.stage = 3;
  run.offload.optimizer = OffloadTier::nvme;
  const auto body = [](Engine& engine, Runtime& runtime) {
    for (int step = 0; step < 6; ++step) {
      whole_step(engine, runtime, step, {}, /*reversed=*/step == 1 || step == 4);
      EXPECT_TRUE(engine.step().applied);
    }
  };
  for (const int buffers : {3, 5}) {
    run.offload.tile_buffers = buffers;
    run.update = UpdateTime::at_the_boundary;
    const kernels::Digest expected = digest_after(run, body);
    run.update = UpdateTime::as_reduced;
    EXPECT_EQ(digest_after(run, body), expected);
  }
}

/// Plain descent that notes when the model's last unit is updated.
class Noting final : public Optimizer {
 public:
  explicit Noting(std::atomic<bool>& updated) : updated_(updated) {}
  std::string name() const override { return "Noting"; }
  std::vector<OptimizerStateTensor> state(const TrainableTensor&) const override { return {}; }
  void apply(Stream& stream, const OptimizerStep&, const UpdateRange& range) const override {
    for (const TensorSegment& segment : range.segments) {
      const bool last = segment.tensor->name.starts_with("mixed");
      stream.enqueue("apply", [this, part = range.part(segment), last] {
        for (std::int64_t i = 0; i < part.master.elements(); ++i) part.master.as<float>()[i] += 1.0f;
        if (last) updated_ = true;
      });
    }
  }
  std::string describe() const override { return "{}"; }

 private:
  std::atomic<bool>& updated_;
};

TEST(EarlyUpdates, HappenWhileTheBackwardPassGoesOn) {
  for (const OffloadTier tier : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
    std::atomic<bool> updated = false;
    OddRun run = early_run();
    run.update = UpdateTime::as_reduced;
    run.offload.optimizer = tier;
    run.frozen = false;
    const Config config = odd_config(run);
    RuntimeOptions options = RuntimeOptions::from(config);
    options.log_level = LogLevel::off;
    Runtime runtime(options, make_self_communicator);
    Engine engine(runtime, odd_model(), config, std::make_unique<Noting>(updated));
    for (int step = 0; step < 3; ++step) {
      updated = false;
      engine.begin_micro_batch();
      for (int unit = 0; unit < 4; ++unit) (void)engine.gather({unit});
      for (const int unit : {0, 3, 2, 1}) {
        {
          const GatheredUnit held = engine.gather({unit});
          std::move(engine.gradients({unit})).reduce();
          EXPECT_TRUE(unit != 3 || !updated) << "somebody may still read its weights";
        }
        for (int ms = 0; unit == 2 && !updated && ms < 20'000; ++ms) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        ASSERT_TRUE(unit != 2 || updated) << "the update waits for step()";
      }
      std::move(engine.gradients({0})).reduce();
      end_with(engine, 1.0, config.micro_batch_size);
      EXPECT_TRUE(engine.step().applied);
    }
  }
}

TEST(EarlyUpdates, EndTheEngineWhereTheStepWouldBeSkipped) {
  for (const OffloadTier tier : {OffloadTier::none, OffloadTier::nvme}) {
    OddRun run = early_run();
    run.ranks = 2;
    run.stage = 2;
    run.update = UpdateTime::as_reduced;
    run.offload.optimizer = tier;
    on_ranks(run, [](Engine& engine, Runtime& runtime) {
      whole_step(engine, runtime, 0);
      EXPECT_TRUE(engine.step().applied);
      whole_step(engine, runtime, 1, runtime.rank() == 1 ? "mixed.g" : "");
      const auto says =
          AllOf(HasSubstr("step 2 cannot be skipped any more, but gradient of mixed.g at element 2 is "
                          "not finite: tranche.update: as_reduced had updated units"),
                HasSubstr("go on from a checkpoint"));
      EXPECT_THAT(message_of<NumericalError>([&] { engine.step(); }), says);
      // State is lost, so the engine refuses to train, read and save.
      EXPECT_THAT(message_of<NumericalError>([&] { engine.begin_micro_batch(); }), says);
      EXPECT_THAT(message_of<NumericalError>([&] { engine.save("nowhere"); }), says);
    });
  }
}

TEST(EarlyUpdates, EndTheEngineWhereTokensAreNotThoseOfItsSamples) {
  OddRun run = early_run();
  run.ranks = 2;
  run.update = UpdateTime::as_reduced;
  on_ranks(run, [](Engine& engine, Runtime& runtime) {
    odd_micro_batch(engine, 0, runtime.rank() == 1 ? 2 : 3);
    EXPECT_THAT(message_of<ConfigurationError>([&] { engine.step(); }),
                AllOf(HasSubstr("step 1 learned from 5 tokens, not from the 6 of its samples"),
                      HasSubstr("at_the_boundary, which counts tokens first")));
  });
}

TEST(EarlyUpdates, RefuseShortSamplesWhenTheirMicroBatchBegins) {
  OddRun run = early_run();
  run.ranks = 2;
  run.accumulation = 2;
  run.update = UpdateTime::as_reduced;
  on_ranks(run, [](Engine& engine, Runtime& runtime) {
    engine.begin_evaluation();
    engine.begin_micro_batch({1, 1});  // an evaluation counts its own tokens, so any size is accepted
    for (const int unit : {0, 1, 2, 3}) (void)engine.gather({unit});
    end_with(engine, 1.0, 1);
    (void)engine.end_evaluation();
    whole_step(engine, runtime, 0);
    EXPECT_TRUE(engine.step().applied);
    const auto meet = [&] { runtime.all().barrier({"test", "step", Traffic::control}).wait(); };
    const auto says = HasSubstr(
        "begin_micro_batch([2, 1]) has 2 tokens, not the 3 of 3 samples of 1: tranche.update: as_reduced "
        "divides by the full number before tokens are counted; give every sample its full length, or write "
        "at_the_boundary");
    if (runtime.rank() == 0) {
      meet();
      EXPECT_THAT(message_of<ConfigurationError>([&] { engine.begin_micro_batch({2, 1}); }), says);
    } else {
      EXPECT_THAT(message_of<CommunicationError>([&] {
                    meet();
                    whole_step(engine, runtime, 1);
                    (void)engine.step();
                  }),
                  AllOf(HasSubstr("rank 0 failed"), says));
    }
  });
  const auto begins = [&](const Shape& shape) {
    on_ranks(run, [&](Engine& engine, Runtime&) { EXPECT_EQ(engine.begin_micro_batch(shape), 0); });
  };
  begins({3, 1, 0});
  begins({2});  // the meaning of a single size is unknown, so it is accepted
  run.update = UpdateTime::at_the_boundary;
  begins({2, 1});
}

/// Fails where an update is issued, or prepared, from the second step on.
class Failing final : public Optimizer {
 public:
  explicit Failing(bool in_numbers) : in_numbers_(in_numbers) {}
  std::string name() const override { return "Failing"; }
  std::vector<OptimizerStateTensor> state(const TrainableTensor&) const override { return {}; }
  std::vector<std::byte> numbers(const OptimizerStep& step, const GroupOptions&) const override {
    return std::vector<std::byte>(in_numbers_ && step.step > 1 ? 4 : 8);
  }
  void apply(Stream&, const OptimizerStep& step, const UpdateRange& range) const override {
    const bool middle = range.segments.front().tensor->name.starts_with("tiny");
    if (!in_numbers_ && step.step > 1 && middle) throw InvalidArgument("the rule's own error");
  }
  std::string describe() const override { return "{}"; }

 private:
  bool in_numbers_;
};

// An engine can usually be used after an error of misuse. With early updates it cannot, because some units
// are already updated.
TEST(EarlyUpdates, EndTheEngineWhenOneFails) {
  for (const OffloadTier tier : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
    for (const bool in_numbers : {false, true}) {
      OddRun run = early_run();
      run.update = UpdateTime::as_reduced;
      run.offload.optimizer = tier;
      const Config config = odd_config(run);
      RuntimeOptions options = RuntimeOptions::from(config);
      options.log_level = LogLevel::off;
      Runtime runtime(options, make_self_communicator);
      Engine engine(runtime, odd_model(), config, std::make_unique<Failing>(in_numbers));
      whole_step(engine, runtime, 0);
      EXPECT_TRUE(engine.step().applied);
      const auto says = HasSubstr(in_numbers ? "optimizer Failing gives 4 bytes of numbers where it gave 8"
                                             : "the rule's own error");
      EXPECT_THAT(message_of<InvalidArgument>([&] {
                    whole_step(engine, runtime, 1);
                    (void)engine.step();
                  }),
                  says);
      for (const bool again : {false, true}) {
        EXPECT_THAT(message_of<InvalidArgument>([&] { (void)engine.step(); }), says) << again;
        EXPECT_THAT(message_of<InvalidArgument>([&] { engine.save("nowhere"); }), says) << again;
      }
    }
  }
}

TEST(EarlyUpdates, RefuseCallsThatComeTooLate) {
  OddRun run = early_run();
  run.update = UpdateTime::as_reduced;
  on_ranks(run, [](Engine& engine, Runtime& runtime) {
    EXPECT_THAT(message_of<LogicError>(
                    [&] { engine.set_gradient_hook([](const StepResult&) { return std::string(); }); }),
                HasSubstr("set_gradient_hook() with tranche.update: as_reduced"));
    engine.set_gradient_hook({});
    whole_step(engine, runtime, 0);
    const auto late = [](const char* call) {
      return HasSubstr(std::string(call) +
                       " between the beginning of a step's last micro-batch and the end of step()");
    };
    EXPECT_THAT(message_of<LogicError>([&] { engine.set_learning_rate(0.1); }), late("set_learning_rate()"));
    EXPECT_THAT(message_of<LogicError>([&] { engine.read_weight("prime.c"); }), late("read_weight(prime.c)"));
    EXPECT_THAT(message_of<LogicError>([&] { engine.read_optimizer_state("prime.c", "exp_avg"); }),
                late("read_optimizer_state(prime.c)"));
    EXPECT_THAT(message_of<LogicError>([&] { (void)engine.weights_digest(); }), late("weights_digest()"));
    EXPECT_THAT(message_of<LogicError>([&] { (void)engine.state_digest(); }), late("state_digest()"));
    const std::vector<float> gradient = engine.read_gradient("prime.c");
    EXPECT_THAT(message_of<LogicError>([&] { engine.write_gradient("prime.c", gradient); }),
                HasSubstr("write_gradient(prime.c) with tranche.update: as_reduced, which has used it"));
    EXPECT_TRUE(engine.step().applied);
    engine.set_learning_rate(0.1);
    EXPECT_FALSE(engine.read_weight("prime.c").empty());

    engine.begin_micro_batch();
    for (const int unit : {3, 2}) {
      (void)engine.gather({unit});
      std::move(engine.gradients({unit})).reduce();
    }
    EXPECT_THAT(message_of<LogicError>([&] { (void)engine.gather({3}); }),
                HasSubstr("gather(mixed) behind its gradients of the step's last micro-batch"));
  });
}

TEST(EarlyUpdates, RefuseRatesThatAreNotFiniteBeforeTheFirstUpdate) {
  struct Broken final : Schedule {
    double learning_rate(std::int64_t) const override { return std::numeric_limits<double>::quiet_NaN(); }
    std::string describe() const override { return "Broken"; }
  };
  OddRun run = early_run();
  run.update = UpdateTime::as_reduced;
  const Config config = odd_config(run);
  RuntimeOptions options = RuntimeOptions::from(config);
  options.log_level = LogLevel::off;
  Runtime runtime(options, make_self_communicator);
  Engine engine(runtime, odd_model(), config, EngineOptions{.schedule = std::make_unique<Broken>()});
  EXPECT_THAT(message_of<ConfigurationError>([&] { engine.begin_micro_batch(); }),
              HasSubstr("schedule Broken gives a learning rate of nan"));
}

TEST(EarlyUpdates, RefuseRulesThatNeedAllGradients) {
  const auto refusal = [](const std::string& optimizer) {
    OddRun run = early_run();
    run.update = UpdateTime::as_reduced;
    run.optimizer = optimizer;
    return message_of<ConfigurationError>([&] { train_odd(run); });
  };
  EXPECT_THAT(refusal("Lamb"), HasSubstr("tranche.update: as_reduced cannot be used: optimizer Lamb computes "
                                         "sums over whole tensors first; write at_the_boundary"));
  EXPECT_THAT(refusal("LARS"), HasSubstr("optimizer LARS computes sums over whole tensors first"));
  EXPECT_THAT(refusal("Muon"),
              HasSubstr("optimizer Muon computes whole matrices, which ranks exchange first"));
}

TEST(EarlyUpdates, AreSaidAtTheStart) {
  const auto summary = [](const std::function<void(OddRun&)>& change) {
    OddRun run = early_run();
    change(run);
    std::string text;
    on_ranks(run, [&](Engine& engine, Runtime&) { text = engine.summary(false); });
    return text;
  };
  const char* const would =
      "no update of this run needs the norm: if every token of every sample is "
      "learned, and every sample has its full length, tranche.update: as_reduced";
  EXPECT_THAT(summary([](OddRun& run) { run.update = UpdateTime::as_reduced; }),
              HasSubstr("tranche.update: as_reduced: each unit is updated once its gradient is complete"));
  EXPECT_THAT(summary([](OddRun& run) { run.offload.optimizer = OffloadTier::cpu; }), HasSubstr(would));
  EXPECT_THAT(summary([](OddRun&) {}), Not(HasSubstr(would)));
  for (const auto& change : std::vector<std::function<void(OddRun&)>>{
           [](OddRun& run) { run.clipping = 1; }, [](OddRun& run) { run.dtype = DataType::float16; },
           [](OddRun& run) { run.optimizer = "Lamb"; }}) {
    EXPECT_THAT(summary([&](OddRun& run) {
                  run.offload.optimizer = OffloadTier::cpu;
                  change(run);
                }),
                Not(HasSubstr(would)));
  }
}

}  // namespace
}  // namespace tranche::test
