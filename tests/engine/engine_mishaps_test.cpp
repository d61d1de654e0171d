// Unusual steps: extreme scales and token counts, calls out of order, units that are left out or visited in
// another order, evaluation during steps, replicas that differ.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "on_ranks.h"

namespace tranche::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// --- Extreme steps -------------------------------------------------------------------------------------

TEST(StepsAtTheirEnds, OverflowAtTheSmallestScaleIsToldAndTheEngineGoesOn) {
  OddRun run;
  run.ranks = 2;
  run.stage = 2;
  run.dtype = DataType::float16;
  run_thread_ranks(run.ranks, [&](int, const CommunicatorFactory& factory) {
    Config config = odd_config(run);
    config.loss_scaler.hysteresis = 1;
    config.loss_scaler.minimum_scale = config.loss_scaler.initial_scale;
    Runtime runtime(RuntimeOptions::from(config), factory);
    Engine engine(runtime, odd_model(), config);
    const kernels::Digest before = engine.state_digest();
    whole_step(engine, runtime, 0, "prime.c");
    EXPECT_THAT(message_of<NumericalError>([&] { engine.step(); }),
                AllOf(HasSubstr("overflow at a loss scale of 1024"), HasSubstr("fp16.min_loss_scale")));
    EXPECT_EQ(engine.state_digest(), before);
    EXPECT_EQ(engine.steps(), 1);
    EXPECT_EQ(engine.applied_steps(), 0);
    whole_step(engine, runtime, 1);
    const StepResult result = engine.step();
    EXPECT_TRUE(result.applied);
    EXPECT_EQ(result.step, 2);
  });
}

TEST(StepsAtTheirEnds, WithoutTokensNothingChangesNorTheLossScale) {
  OddRun run;
  run.ranks = 2;
  run.stage = 1;
  run.dtype = DataType::float16;
  run_thread_ranks(run.ranks, [&](int, const CommunicatorFactory& factory) {
    Config config = odd_config(run);
    config.loss_scaler.hysteresis = 1;
    Runtime runtime(RuntimeOptions::from(config), factory);
    Engine engine(runtime, odd_model(), config);
    const kernels::Digest before = engine.state_digest();
    engine.begin_micro_batch();
    for (int unit = 0; unit < 4; ++unit) engine.skip_gradients({unit});
    end_with(engine, 0, 0);
    const StepResult result = engine.step();
    EXPECT_FALSE(result.applied);
    EXPECT_EQ(result.skipped_because, "the step saw no tokens");
    EXPECT_TRUE(std::isnan(result.loss)) << "no tokens have no loss";
    EXPECT_EQ(engine.state_digest(), before);
    whole_step(engine, runtime, 1);
    EXPECT_EQ(engine.step().loss_scale, 1024) << "a step without tokens is no overflow";
  });
}

TEST(StepsAtTheirEnds, RanksAndMicroBatchesWithoutTokensAreNoErrors) {
  // The mean is over the existing samples; rank 1 and the second micro-batch have none.
  OddRun run;
  run.ranks = 2;
  run.accumulation = 2;
  for (run.stage = 0; run.stage <= 3; ++run.stage) {
    on_ranks(run, [&](Engine& engine, Runtime& runtime) {
      const std::vector<float> weight = engine.read_weight("prime.c");
      odd_micro_batch(engine, 0, runtime.rank() == 0 ? 2 : 0);
      odd_micro_batch(engine, 0, 0);
      const std::vector<float> gradient = engine.read_gradient("prime.c");
      const double sum = 2.0 * static_cast<double>(weight[5]) - odd_target(16, 0, 5) - odd_target(16, 1, 5);
      EXPECT_NEAR(gradient[5], sum / 2, 1e-6);  // two fp32 terms of size 2: a unit of 2^-22
      const StepResult result = engine.step();
      EXPECT_TRUE(result.applied);
      EXPECT_EQ(result.tokens, 2);
    });
  }
}

TEST(StepsAtTheirEnds, ALossThatIsNoNumberIsReportedAsIs) {
  // Only gradients decide whether a step is applied. The loss is reported as the model gave it.
  on_ranks({}, [](Engine& engine, Runtime&) {
    engine.begin_micro_batch();
    for (int unit = 0; unit < 4; ++unit) engine.skip_gradients({unit});
    end_with(engine, std::numeric_limits<double>::quiet_NaN(), 3);
    const StepResult result = engine.step();
    EXPECT_TRUE(result.applied);
    EXPECT_TRUE(std::isnan(result.loss));
    EXPECT_EQ(result.gradient_norm, 0);
  });
}

TEST(StepsAtTheirEnds, MemoryStillHeldIsRefusedBeforeAnythingChanges) {
  OddRun run;
  run.ranks = 2;
  run.stage = 2;
  const kernels::Digest expected = digest_after(run, [](Engine& engine, Runtime& runtime) {
    whole_step(engine, runtime, 0);
    engine.step();
  });
  const kernels::Digest actual = digest_after(run, [](Engine& engine, Runtime& runtime) {
    StepBuffer kept;
    engine.begin_micro_batch();
    kept = engine.acquire(64, Category::activations, "kept too long");
    // Skips the rest of the micro-batch; a held unit may belong to any micro-batch.
    for (int unit = 0; unit < 4; ++unit) engine.skip_gradients({unit});
    end_with(engine, 0, 0);
    const kernels::Digest before = engine.state_digest();
    EXPECT_THAT(message_of<LogicError>([&] { engine.step(); }), HasSubstr("'kept too long'"));
    EXPECT_EQ(engine.steps(), 0);
    EXPECT_EQ(engine.state_digest(), before);
    kept.release({});
    EXPECT_FALSE(engine.step().applied);
    whole_step(engine, runtime, 0);
    EXPECT_TRUE(engine.step().applied);
  });
  EXPECT_EQ(actual, expected);
}

TEST(StepsAtTheirEnds, TheFirstOfSeveralNonFiniteGradientsIsNamed) {
  // The order is by unit, then by element, whichever rank holds it. Of three ranks, rank 0 owns the first 512
  // elements of prime and the first 256 of mixed.
  struct Bad {
    int unit, tensor, element;
  };
  struct Case {
    std::vector<Bad> bad;
    const char* named;
  };
  const std::vector<Case> cases{{{{1, 0, 700}, {3, 0, 0}}, "prime.c at element 700"},
                                {{{1, 0, 5}, {3, 2, 290}}, "prime.c at element 5"},
                                {{{3, 0, 1}, {1, 0, 6}}, "prime.c at element 6"},
                                {{{1, 0, 900}, {1, 0, 7}}, "prime.c at element 7"},
                                {{{3, 2, 299}}, "mixed.g at element 299"}};
  for (const Case& each : cases) {
    OddRun run;
    run.ranks = 3;
    for (run.stage = 0; run.stage <= 3; ++run.stage) {
      on_ranks(run, [&](Engine& engine, Runtime& runtime) {
        engine.begin_micro_batch();
        for (int unit = 3; unit >= 0; --unit) {
          {
            UnitGradients gradients = engine.gradients({unit});
            for (const Bad& bad : each.bad) {
              if (bad.unit != unit || runtime.rank() != 2) continue;
              gradients.tensor(bad.tensor).as<float>()[bad.element] = std::numeric_limits<float>::infinity();
            }
            std::move(gradients).reduce();
          }
          if (unit == 0) engine.skip_gradients({unit});
        }
        end_with(engine, 0, 1);
        EXPECT_EQ(engine.step().skipped_because, std::string("gradient of ") + each.named + " is not finite")
            << run.to_string();
      });
    }
  }
}

// --- Calls out of order ------------------------------------------------------------------------------------

TEST(CallsOutOfOrder, HandlesStillHeldAreNamedAndCanBeGivenBack) {
  on_ranks({}, [](Engine& engine, Runtime&) {
    engine.begin_micro_batch();
    GatheredUnit weights = engine.gather({2});
    EXPECT_THAT(message_of<LogicError>([&] { end_with(engine, 0, 1); }),
                HasSubstr("end_micro_batch() while unit tiny is still held"));
    weights.release();
    UnitGradients gradients = engine.gradients({3});
    EXPECT_THAT(message_of<LogicError>([&] { end_with(engine, 0, 1); }),
                HasSubstr("end_micro_batch() while gradients of unit mixed are still held"));
    std::move(gradients).reduce();
    for (int unit = 0; unit < 3; ++unit) engine.skip_gradients({unit});
    end_with(engine, 0, 1);
    EXPECT_TRUE(engine.step().applied);
  });
}

TEST(NumbersAtTheEdge, OfSavesAndMicroBatchesAreRefused) {
  OddRun run;
  run.ranks = 2;
  on_ranks(run, [](Engine& engine, Runtime& runtime) {
    EXPECT_EQ(message_of<InvalidArgument>([&] { engine.save("unused", {.keep_last = -1}); }),
              "save() with keep_last -1 and keep_every 0; both must be at least 0");
    EXPECT_EQ(message_of<InvalidArgument>([&] { engine.save("unused", {.keep_every = -3}); }),
              "save() with keep_last 0 and keep_every -3; both must be at least 0");
    const std::vector<std::int64_t> nine(9);
    const std::int64_t size = engine.config().micro_batch_size;
    EXPECT_EQ(message_of<InvalidArgument>([&] { engine.begin_micro_batch({}, nine); }),
              "begin_micro_batch() got 9 samples; a micro-batch has " + std::to_string(size) +
                  " (train_micro_batch_size_per_gpu)");
    engine.begin_evaluation();
    engine.begin_micro_batch();
    EXPECT_EQ(message_of<InvalidArgument>([&] { end_with(engine, 0, -2); }),
              "end_micro_batch() got a token count of -2; it must be at least 0");
    engine.end_evaluation();
    for (std::int64_t m = 0; m < engine.config().accumulation_steps; ++m) {
      engine.begin_micro_batch();
      for (int unit = 0; unit < 4; ++unit) engine.skip_gradients({unit});
      end_with(engine, 0, m == 0 && runtime.rank() == 1 ? -2 : 4);
    }
    EXPECT_EQ(message_of<InvalidArgument>([&] { engine.step(); }),
              "rank 1 for step 1: end_micro_batch() got a token count of -2; it must be at least 0");
  });
}

TEST(CallsOutOfOrder, WritingWeightsWhileTheyAreRead) {
  OddRun run;
  run.ranks = 2;
  run.stage = 3;
  on_ranks(run, [](Engine& engine, Runtime&) {
    const std::vector<float> value{2.0f};
    const std::vector<float> three{1, 2, 3};
    engine.begin_evaluation();
    engine.begin_micro_batch();
    EXPECT_THAT(message_of<LogicError>([&] { engine.write_weight("prime.d", value); }),
                HasSubstr("write_weight(prime.d) inside a step or micro-batch"));
    end_with(engine, 0, 1);
    engine.end_evaluation();
    engine.begin_micro_batch();
    EXPECT_THAT(message_of<LogicError>([&] { engine.write_weight("prime.d", value); }),
                HasSubstr("inside a step"));
    EXPECT_THAT(message_of<LogicError>([&] { engine.write_optimizer_state("tiny.e", "exp_avg", three); }),
                HasSubstr("write_optimizer_state(tiny.e) inside a step"));
  });
}

TEST(CallsOutOfOrder, OneUnitTooManyLeavesTheScheduleAlone) {
  // The refused call is not part of the recorded order, so the micro-batches transfer the same elements.
  OddRun run;
  run.ranks = 2;
  run.stage = 3;
  run.depth = 1;
  std::vector<std::int64_t> elements;
  for (const bool mishap : {false, true}) {
    on_ranks(run, [&](Engine& engine, Runtime& runtime) {
      whole_step(engine, runtime, 0);
      engine.step();
      engine.begin_micro_batch();
      for (int unit = 0; unit < 4; ++unit) {
        const GatheredUnit weights = engine.gather({unit});
        if (!mishap || unit != 1) continue;
        EXPECT_THAT(message_of<LogicError>([&] { engine.gather({2}); }), HasSubstr("held now: prime"));
      }
      for (int unit = 0; unit < 4; ++unit) engine.skip_gradients({unit});
      end_with(engine, 0, 1);
      engine.step();
      whole_step(engine, runtime, 0);
      engine.step();
      if (runtime.rank() == 0) elements.push_back(engine.formula_traffic_elements());
    });
  }
  EXPECT_EQ(elements[0], elements[1]);
}

TEST(CallsOutOfOrder, SkippingCoversAllUsesThatAreOwed) {
  OddRun run;
  run.ranks = 2;
  run.stage = 2;
  on_ranks(run, [](Engine& engine, Runtime&) {
    engine.begin_micro_batch();
    engine.gradients({0}).reduce();  // one of two uses, so the other is missing
    for (int unit = 0; unit < 4; ++unit) engine.skip_gradients({unit});
    EXPECT_THAT(message_of<LogicError>([&] { engine.skip_gradients({0}); }), HasSubstr("for use 3"));
    end_with(engine, 0, 1);
    EXPECT_TRUE(engine.step().applied);
  });
}

// --- The same bits in unusual steps ---------------------------------------------------------------------

/// Six steps: units are sometimes visited in another order or left out in one micro-batch, with evaluation
/// between steps.
void unruly_steps(Engine& engine, Runtime& runtime, bool evaluate) {
  for (int step = 0; step < 6; ++step) {
    whole_step(engine, runtime, step, {}, step == 2 || step == 3);
    engine.step();
    if (evaluate && step % 2 == 0) {
      engine.begin_evaluation();
      for (int micro_batch = 0; micro_batch <= step; ++micro_batch) {
        engine.begin_micro_batch();
        for (int unit = 3; unit >= step / 2; --unit) static_cast<void>(engine.gather({unit}));
        end_with(engine, 1, 1);
      }
      EXPECT_EQ(engine.end_evaluation().tokens, (step + 1) * runtime.size());
    }
    // In this step nothing is gathered, so no gather waits for the new weights of stages 1-2.
    if (step != 4) continue;
    for (std::int64_t m = 0; m < engine.config().accumulation_steps; ++m) {
      engine.begin_micro_batch();
      for (int unit = 0; unit < 4; ++unit) engine.skip_gradients({unit});
      end_with(engine, 0, 1);
    }
    EXPECT_TRUE(engine.step().applied);
  }
}

TEST(SameBitsOutOfTheOrdinary, OverStages) {
  for (const std::string also_frozen : {"", "tiny.*"}) {  // the second leaves a unit without trainable
                                                          // tensors
    OddRun run;
    run.ranks = 3;
    run.dtype = DataType::bfloat16;
    run.accumulation = 2;
    run.reduction_group = 3;
    run.also_frozen = also_frozen;
    run.policy = ReductionPolicy::micro_batch;
    const auto steps = [](bool evaluate) {
      return [evaluate](Engine& e, Runtime& r) { unruly_steps(e, r, evaluate); };
    };
    const kernels::Digest expected = digest_after(run, steps(false));
    for (run.stage = 0; run.stage <= 3; ++run.stage) {
      for (run.depth = 1; run.depth <= 3; ++run.depth) {
        run.poison = run.depth == 2;
        EXPECT_EQ(digest_after(run, steps(true)), expected) << run.to_string();
        if (run.stage < 3) break;
      }
      run.depth = 2;
      run.faults = {0.0005, 3};
    }
  }
}

TEST(SameBitsOutOfTheOrdinary, ModelOfOneUnit) {
  OddRun run;
  run.ranks = 4;
  run.single_unit = true;
  run.frozen = false;
  run.policy = ReductionPolicy::boundary;
  run.accumulation = 2;
  const OddResult expected = train_odd(run);
  for (run.stage = 1; run.stage <= 3; ++run.stage) {
    const OddResult actual = train_odd(run);
    EXPECT_EQ(actual.weights, expected.weights) << run.to_string();
    EXPECT_EQ(actual.state, expected.state) << run.to_string();
  }
}

TEST(SameBitsOutOfTheOrdinary, HostsWithUnequalNumbersOfRanks) {
  // Three ranks on one host, two on another; all use the reduction order of rank 0's host.
  OddRun run;
  run.ranks = 5;
  run.reduction_group = 3;
  const kernels::Digest expected = train_odd(run).state;
  kernels::Digest actual;
  run.reduction_group = 0;
  run_thread_ranks(run.ranks, [&](int rank, const CommunicatorFactory& factory) {
    const Config config = odd_config(run);
    Runtime runtime(RuntimeOptions::from(config), [&](const CommunicatorOptions& options) {
      CommunicatorOptions pretended = options;
      pretended.local_size = 3;
      return factory(pretended);
    });
    EXPECT_EQ(runtime.shard().local_size(), rank < 3 ? 3 : 2);
    Engine engine(runtime, odd_model(), config);
    for (int step = 0; step < run.steps; ++step) {
      const std::int64_t count = run.samples_per_micro_batch - (rank == run.ranks - 1 ? 1 : 0);
      odd_micro_batch(engine, (step * run.ranks + rank) * run.samples_per_micro_batch, count);
      engine.step();
    }
    const kernels::Digest mine = engine.state_digest();
    if (rank == 0) actual = mine;
  });
  EXPECT_EQ(actual, expected);
}

TEST(SameBitsOutOfTheOrdinary, ReplicasThatDifferAreNamed) {
  for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
    for (int stage = 0; stage <= 2; ++stage) {
      OddRun run;
      run.ranks = 3;
      run.stage = stage;
      run.dtype = dtype;
      std::vector<std::string> told(3);
      on_ranks(run, [&](Engine& engine, Runtime& runtime) {
        const std::vector<float> values(3, runtime.rank() == 2 ? 1.0f : 2.0f);
        engine.write_weight("tiny.e", values);
        told[static_cast<std::size_t>(runtime.rank())] =
            message_of<CommunicationError>([&] { engine.weights_digest(); });
      });
      for (const std::string& text : told) {
        EXPECT_EQ(text, "replicas differ: rank 2 holds other weights than rank 0") << run.to_string();
      }
    }
  }
}

TEST(Replicas, OptimizerStateThatDiffersIsNamed) {
  OddRun run;
  run.ranks = 2;
  on_ranks(run, [](Engine& engine, Runtime& runtime) {
    const std::vector<float> values(3, runtime.rank() == 1 ? 1.0f : 2.0f);
    engine.write_optimizer_state("tiny.e", "exp_avg", values);
    engine.weights_digest();
    EXPECT_EQ(message_of<CommunicationError>([&] { engine.state_digest(); }),
              "replicas differ: rank 1 holds other optimizer state than rank 0");
  });
}

TEST(Replicas, DigestsSeeEveryTensorAndItsState) {
  for (int stage = 0; stage <= 3; ++stage) {
    OddRun run;
    run.ranks = 2;
    run.stage = stage;
    run.dtype = DataType::bfloat16;
    on_ranks(run, [](Engine& engine, Runtime&) {
      const auto change = [&](const auto& write) {
        const kernels::Digest weights = engine.weights_digest(), state = engine.state_digest();
        EXPECT_FALSE(weights == state);
        write();
        EXPECT_FALSE(engine.state_digest() == state);
        return !(engine.weights_digest() == weights);
      };
      const std::vector<float> frozen(131, 0.5f), one(1, 0.25f);
      EXPECT_TRUE(change([&] { engine.write_weight(odd_frozen_tensor, frozen); }));
      EXPECT_TRUE(change([&] { engine.write_weight("prime.d", one); }));
      EXPECT_FALSE(change([&] { engine.write_optimizer_state("prime.d", "exp_avg", one); }));
      EXPECT_FALSE(change([&] { engine.write_optimizer_state("prime.d", "exp_avg_sq", one); }));
      EXPECT_EQ(engine.read_weight(odd_frozen_tensor), frozen);
    });
  }
}

}  // namespace
}  // namespace tranche::test
