// Failures in the middle of a step: exhausted memory, dropped gradients, ranks that differ, exceptions that
// unwind a handle. Each ends the engine on all ranks with a text, or changes nothing.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "on_ranks.h"

namespace tranche::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// Allocates the remaining memory under the runtime's limit, so that the next allocation of a page fails.
std::vector<Buffer> take_the_rest(Runtime& runtime) {
  std::vector<Buffer> taken;
  for (std::int64_t bytes = 1 << 20; bytes >= 256;) {
    try {
      taken.emplace_back(runtime.memory(Tier::device), bytes, Category::other, "hog");
    } catch (const OutOfMemory&) {
      bytes /= 2;
    }
  }
  return taken;
}

/// Two units; the second is too large for the memory that the first frees.
ModelSpec small_and_large() {
  ModelSpec model;
  model.add_unit({"small", {{"small.w", Shape{10}, Initializer::zeros()}}, 1});
  model.add_unit({"large", {{"large.w", Shape{50000}, Initializer::zeros()}}, 1});
  return model;
}

/// Runs `body` on two ranks with the two units in stage 3; rank 1 has a memory limit.
void with_a_poor_rank(const std::function<void(Engine&, Runtime&)>& body) {
  OddRun run;
  run.ranks = 2;
  run.stage = 3;
  run.depth = 1;
  run.frozen = false;
  run.plan_memory = false;
  CommonStart start(run.ranks);
  run_thread_ranks(run.ranks, [&](int rank, const CommunicatorFactory& factory) {
    CommonStart::Rank started(start);
    const Config config = odd_config(run);
    RuntimeOptions options = RuntimeOptions::from(config);
    if (rank == 1) options.device_memory_limit = 8 << 20;
    Runtime runtime(options, factory);
    Engine engine(runtime, small_and_large(), config);
    started.await_others();
    body(engine, runtime);
  });
}

TEST(FailuresHalfWay, OutOfMemoryInAGatherEndsTheEngineOnAllRanks) {
  EXPECT_THAT(message_of<OutOfMemory>([&] {
                with_a_poor_rank([](Engine& engine, Runtime& runtime) {
                  std::vector<Buffer> hog;
                  if (runtime.rank() == 1) hog = take_the_rest(runtime);
                  engine.begin_micro_batch();
                  if (runtime.rank() == 0) {
                    const std::string told = message_of<CommunicationError>([&] { engine.gather({1}); });
                    EXPECT_THAT(told, AllOf(HasSubstr("rank 1 failed"), HasSubstr("large gathered")));
                    return;
                  }
                  const std::string first = message_of<OutOfMemory>([&] { engine.gather({1}); });
                  EXPECT_THAT(first, HasSubstr("large gathered"));
                  hog.clear();
                  // Even with memory it cannot continue, because its peers are at another operation.
                  EXPECT_EQ(message_of<OutOfMemory>([&] { engine.gather({1}); }), first);
                  EXPECT_EQ(message_of<OutOfMemory>([&] { engine.weights_digest(); }), first);
                  EXPECT_EQ(message_of<OutOfMemory>([&] { engine.read_weight("small.w"); }), first);
                  engine.step();
                });
              }),
              HasSubstr("large gathered"));
}

TEST(FailuresHalfWay, OutOfMemoryInARelease) {
  // Releasing a unit prefetches the next one. A handle's release cannot throw, so the next call does.
  EXPECT_THAT(message_of<OutOfMemory>([&] {
                with_a_poor_rank([](Engine& engine, Runtime& runtime) {
                  const auto micro_batch = [&](bool hogged) {
                    std::vector<Buffer> hog;
                    engine.begin_micro_batch();
                    GatheredUnit small = engine.gather({0});
                    if (hogged) hog = take_the_rest(runtime);
                    small.release();
                    hog.clear();  // too late: the peers' next collective is a gather that this rank left out
                    for (int unit = 0; unit < 2; ++unit) engine.skip_gradients({unit});
                    static_cast<void>(engine.gather({1}));
                    end_with(engine, 0, 1);
                    engine.step();
                  };
                  micro_batch(false);
                  if (runtime.rank() == 1) {
                    micro_batch(true);
                  } else {
                    EXPECT_THAT(message_of<CommunicationError>([&] { micro_batch(false); }),
                                AllOf(HasSubstr("rank 1 failed"), HasSubstr("large gathered")));
                  }
                });
              }),
              HasSubstr("large gathered"));
}

TEST(FailuresHalfWay, DroppedGradientsEndTheEngine) {
  on_ranks({}, [](Engine& engine, Runtime&) {
    engine.begin_micro_batch();
    { const UnitGradients dropped = engine.gradients({1}); }
    const std::string first = message_of<LogicError>([&] { end_with(engine, 0, 1); });
    EXPECT_THAT(first, HasSubstr("gradients of unit prime were dropped"));
    EXPECT_EQ(message_of<LogicError>([&] { engine.gather({0}); }), first);
    EXPECT_EQ(message_of<LogicError>([&] { engine.begin_evaluation(); }), first);
  });
}

TEST(FailuresHalfWay, UnitsOfEqualSizeInAnotherOrderAreNamed) {
  OddRun run;
  run.ranks = 2;
  run.stage = 2;
  on_ranks(run, [](Engine& engine, Runtime& runtime) {
    EXPECT_THAT(message_of<CommunicationError>([&] {
                  engine.begin_micro_batch();
                  engine.skip_gradients({runtime.rank() == 0 ? 0 : 2});
                  engine.skip_gradients({runtime.rank() == 0 ? 2 : 0});
                  for (const int unit : {1, 3}) engine.skip_gradients({unit});
                  end_with(engine, 0, 1);
                  engine.step();
                }),
                AllOf(HasSubstr("rank 0 issued reduce_scatter of unit tied"),
                      HasSubstr("where rank 1 issued reduce_scatter of unit tiny"),
                      HasSubstr("the ranks' calls differ")));
  });
}

TEST(FailuresHalfWay, EnginesOfOneModelInAnotherOrderAreNamed) {
  OddRun run;
  run.ranks = 2;
  const auto text_of = [&](const std::function<void(Engine&)>& call, bool steps = false) {
    std::string text;
    on_ranks(run, [&](Engine& first, Runtime& runtime) {
      Engine second(runtime, odd_model(), odd_config(run));
      const bool swaps = runtime.rank() == 1;
      std::string mine = message_of<CommunicationError>([&] {
        call(swaps ? second : first);
        call(swaps ? first : second);
        for (Engine* engine : {&first, &second}) {
          if (steps) engine->step();
        }
      });
      if (runtime.rank() == 0) text = std::move(mine);
    });
    return text;
  };
  const auto skip_all = [](Engine& engine) {
    engine.begin_micro_batch();
    for (const int unit : {0, 1, 2, 3}) engine.skip_gradients({unit});
    end_with(engine, 0, 1);
  };
  const auto named = [](const std::string& call) {
    return AllOf(HasSubstr("rank 0 issued " + call + " (number"),
                 HasSubstr("where rank 1 issued " + call + " of engine 2 (number"),
                 HasSubstr("the ranks' calls differ"));
  };
  for (run.stage = 0; run.stage <= 3; ++run.stage) {
    EXPECT_THAT(text_of(skip_all, /*steps=*/true), named("reduce_scatter of unit tied"))
        << "stage " << run.stage;
  }
  run.stage = 1;
  EXPECT_THAT(text_of([](Engine& engine) { (void)engine.weights_digest(); }),
              named("all_gather of unit digest"));
  EXPECT_THAT(text_of([](Engine& engine) { (void)engine.read_weight("prime.c"); }), HasSubstr("of engine 2"));
  EXPECT_THAT(text_of([](Engine& engine) {
                engine.begin_evaluation();
                (void)engine.end_evaluation();
              }),
              named("all_gather of unit evaluation"));
  run.stage = 3;
  EXPECT_THAT(text_of([](Engine& engine) {
                engine.begin_evaluation();
                engine.begin_micro_batch();
                (void)engine.gather({1});
              }),
              named("all_gather of unit prime"));
  // Engines that all ranks interleave alike are not mixed up.
  const kernels::Digest alone = digest_after(run, [](Engine& engine, Runtime& runtime) {
    whole_step(engine, runtime, 0);
    engine.step();
  });
  on_ranks(run, [&](Engine& first, Runtime& runtime) {
    Engine second(runtime, odd_model(), odd_config(run));
    whole_step(second, runtime, 0);
    whole_step(first, runtime, 0);
    first.step();
    second.step();
    EXPECT_EQ(first.state_digest(), alone);
    EXPECT_EQ(second.state_digest(), alone);
  });
}

TEST(FailuresHalfWay, StepsOfTwoEnginesInAnotherOrderAreNamed) {
  OddRun run;
  run.ranks = 2;
  on_ranks(run, [&](Engine& first, Runtime& runtime) {
    Engine second(runtime, odd_model(), odd_config(run));
    whole_step(first, runtime, 0);
    whole_step(second, runtime, 0);
    EXPECT_THAT(message_of<CommunicationError>([&] { (runtime.rank() == 0 ? first : second).step(); }),
                AllOf(HasSubstr("rank 0 issued all_gather of unit step (number"),
                      HasSubstr("where rank 1 issued all_gather of unit step of engine 2 (number")));
  });
}

TEST(FailuresHalfWay, SequencesThatDifferAreToldAtTheStepsEnd) {
  // Operation, unit and size agree, so that every exchange works; only the sequence's hash includes the
  // phase.
  OddRun run;
  run.ranks = 2;
  on_ranks(run, [](Engine& engine, Runtime& runtime) {
    runtime.shard().barrier({"unit", runtime.rank() == 0 ? "one" : "other", Traffic::control}).wait();
    engine.begin_micro_batch();
    for (const int unit : {0, 1, 2, 3}) engine.skip_gradients({unit});
    end_with(engine, 0, 1);
    EXPECT_THAT(message_of<CommunicationError>([&] { engine.step(); }),
                AllOf(HasSubstr("rank 1 issued another sequence of collective calls than rank 0 in step 1"),
                      HasSubstr("in the same order on all ranks")));
  });
}

TEST(FailuresHalfWay, OptimizersThatDifferAreNamed) {
  OddRun run;
  run.ranks = 2;
  EXPECT_THAT(message_of<ConfigurationError>([&] {
                run_thread_ranks(run.ranks, [&](int rank, const CommunicatorFactory& factory) {
                  const Config config = odd_config(run);
                  Runtime runtime(RuntimeOptions::from(config), factory);
                  AdamOptions options;
                  options.beta1 = rank == 1 ? 0.8 : 0.9;
                  Engine engine(runtime, odd_model(), config, make_adam(options));
                });
              }),
              HasSubstr("rank 1 was started with another optimizer than rank 0"));
}

TEST(FailuresHalfWay, ARankThatLeavesItsLoopEarlyEndsItsPeersWait) {
  for (const int stage : {0, 3}) {
    OddRun run;
    run.ranks = 2;
    run.stage = stage;
    std::string text;
    on_ranks(run, [&](Engine& engine, Runtime& runtime) {
      const auto train = [&](int steps) {
        for (int step = 0; step < steps; ++step) {
          whole_step(engine, runtime, step);
          engine.step();
        }
      };
      // Rank 0 returns from here, and its engine and its runtime are destroyed normally.
      if (runtime.rank() == 0) return train(2);
      text = message_of<CommunicationError>([&] { train(3); });
    });
    EXPECT_THAT(text, AllOf(HasSubstr("rank 0 has ended its engine after "),
                            HasSubstr(" operations: all ranks have to take the same number of steps")))
        << "stage " << stage;
  }
}

TEST(FailuresHalfWay, AnotherOrderOfGathersIsFoundWhereNothingIsSentIfAskedFor) {
  const auto text_of = [](int stage, bool compares) {
    OddRun run;
    run.ranks = 2;
    run.stage = stage;
    std::string text;
    on_ranks(
        run,
        [&](Engine& engine, Runtime& runtime) {
          engine.begin_micro_batch();
          const int first = runtime.rank() == 0 ? 0 : 1;
          (void)engine.gather({first});
          (void)engine.gather({1 - first});
          for (const int unit : {0, 1, 2, 3}) engine.skip_gradients({unit});
          end_with(engine, 1, 1);
          std::string mine = message_of<CommunicationError>([&] { engine.step(); });
          if (runtime.rank() == 0) text = std::move(mine);
        },
        [&](Config& config, RuntimeOptions&) { config.debug.compare_calls = compares; });
    return text;
  };
  for (const int stage : {0, 1, 2}) {
    EXPECT_THAT(text_of(stage, true),
                HasSubstr("rank 1 issued another sequence of collective calls than rank 0"))
        << "stage " << stage;
    EXPECT_EQ(text_of(stage, false), nothing_thrown) << "stage " << stage;
  }
}

TEST(FailuresHalfWay, ModelsAndThreadsThatDifferAreNamed) {
  for (const bool model : {true, false}) {
    OddRun run;
    run.ranks = 2;
    run.frozen = false;
    EXPECT_THAT(
        message_of<ConfigurationError>([&] {
          run_thread_ranks(run.ranks, [&](int rank, const CommunicatorFactory& factory) {
            Config config = odd_config(run);
            RuntimeOptions options = RuntimeOptions::from(config);
            if (!model && rank == 1) options.threads = 2;
            config.threads = 0;  // the engine uses the runtime's number
            Runtime runtime(options, factory);
            Engine engine(runtime, odd_model(model && rank == 1), config);
          });
        }),
        HasSubstr(
            model
                ? "rank 1 was started with another model than rank 0: it has no more units where rank 0 has "
                  "unit prime (1 uses a micro-batch)"
                : "rank 1 was started with another numerics fingerprint"));
  }
}

TEST(FailuresHalfWay, TheProgramTellsThePeersAndGetsItsStatus) {
  CommonStart start(2);
  run_thread_ranks(2, [&](int rank, const CommunicatorFactory& factory) {
    CommonStart::Rank started(start);
    Runtime runtime(RuntimeOptions{}, factory);
    started.await_others();
    if (rank == 1) {
      const auto status = [&](auto error) { return runtime.fail(std::make_exception_ptr(error)); };
      EXPECT_EQ(status(OutOfMemory("no room")), 3);
      EXPECT_EQ(status(NumericalError("no number")), 6);
      EXPECT_EQ(status(std::runtime_error("plain")), 1);
      EXPECT_EQ(status(42), 1);
      EXPECT_EQ(runtime.fail(nullptr), 1);
      return;
    }
    EXPECT_THAT(message_of<CommunicationError>([&] {
                  runtime.shard().barrier({"", "test"}).wait();
                }),
                HasSubstr("rank 1 failed: no room"));
  });
}

TEST(FailuresHalfWay, WhatTheEngineIsToldEndsItsPeersAndItself) {
  OddRun run;
  run.ranks = 2;
  on_ranks(run, [&](Engine& engine, Runtime& runtime) {
    if (runtime.rank() == 1) {
      const auto error = std::make_exception_ptr(OutOfMemory("a hook found no room"));
      EXPECT_EQ(engine.fail(error), 3);
      EXPECT_EQ(runtime.fail(error), 3);
      EXPECT_EQ(engine.fail(error), 3);
      EXPECT_EQ(message_of<OutOfMemory>([&] { engine.begin_micro_batch(); }), "a hook found no room");
      return;
    }
    EXPECT_THAT(message_of<CommunicationError>([&] { static_cast<void>(engine.weights_digest()); }),
                HasSubstr("rank 1 failed: a hook found no room"));
  });
}

TEST(Unwinding, AnExceptionThatTheModelHandlesItselfChangesNoBit) {
  // During unwinding the release of a unit prefetches nothing. The next call does, so that gathers and
  // reductions keep their order among the ranks.
  OddRun run;
  run.ranks = 2;
  run.stage = 3;
  run.depth = 3;
  const auto digest = [&](bool throws) {
    return digest_after(run, [&](Engine& engine, Runtime& runtime) {
      for (int step = 0; step < 3; ++step) {
        engine.begin_micro_batch();
        for (int unit = 0; unit < 4; ++unit) {
          try {
            const GatheredUnit weights = engine.gather({unit});
            if (throws && runtime.rank() == 1 && unit != 2) throw std::runtime_error("not this way");
          } catch (const std::runtime_error&) {
          }
          if (unit == 1) engine.skip_gradients({2});
        }
        for (const int unit : {3, 1, 0}) engine.skip_gradients({unit});
        end_with(engine, 0, 1);
        engine.step();
      }
    });
  };
  EXPECT_EQ(digest(true), digest(false));
}

TEST(Unwinding, GradientsThatAnExceptionDropsEndThePeersAtOnce) {
  OddRun run;
  run.ranks = 2;
  run.stage = 2;
  on_ranks(run, [](Engine& engine, Runtime& runtime) {
    engine.begin_micro_batch();
    if (runtime.rank() == 1) {
      try {
        const UnitGradients gradients = engine.gradients({3});
        throw std::runtime_error("the model found no number");
      } catch (const std::runtime_error&) {
        // No rank posts the cause to its peers, so they report their positions.
      }
      EXPECT_THAT(
          message_of<LogicError>([&] { engine.skip_gradients({2}); }),
          HasSubstr(
              "the engine has ended: an exception unwound it while it held the gradients of unit mixed"));
      return;
    }
    EXPECT_THAT(
        message_of<CommunicationError>([&] {
          for (int unit = 3; unit >= 0; --unit) engine.skip_gradients({unit});
          end_with(engine, 0, 1);
          engine.step();
        }),
        HasSubstr("rank 1 failed: an exception unwound it while it held the gradients of unit mixed"));
  });
}

/// A part of a program that lives longer than the engine and keeps what it got from it.
struct Keeper {
  StepBuffer buffer;
  GatheredUnit weights;
  std::optional<UnitGradients> gradients;
  HostCopy copy;
};

TEST(Unwinding, HandlesThatOutliveTheEngineReturnNothingToIt) {
  for (const bool throws : {true, false}) {
    OddRun run;
    run.stage = 3;
    Config config = odd_config(run);
    config.activation_checkpointing = config.offload.activations = true;
    run_thread_ranks(1, [&](int, const CommunicatorFactory& factory) {
      Runtime runtime(RuntimeOptions::from(config), factory);
      const std::int64_t before = runtime.ledger().total(Tier::device);
      Keeper keeper;
      const auto work = [&] {
        Engine engine(runtime, odd_model(), config);
        engine.begin_micro_batch();
        keeper.buffer = engine.acquire(4096, Category::activations, "kept");
        keeper.copy = engine.send_to_host(engine.acquire(4096, Category::activations, "sent"), "sent");
        keeper.weights = engine.gather({1});
        keeper.gradients.emplace(engine.gradients({1}));
        if (throws) throw std::runtime_error("the layer found no number");
      };
      if (throws) {
        EXPECT_THAT(message_of<std::runtime_error>(work), HasSubstr("the layer found no number"));
      } else {
        work();
      }
      EXPECT_FALSE(keeper.buffer);
      EXPECT_FALSE(keeper.copy);
      EXPECT_EQ(runtime.ledger().total(Tier::device), before) << "the engine takes its memory back";
      EXPECT_EQ(message_of<LogicError>([&] { keeper.weights.tensor(0); }),
                "tensor() of a handle whose engine has ended");
      EXPECT_EQ(message_of<LogicError>([&] { keeper.gradients->target(0); }),
                "target() of a handle whose engine has ended");
      EXPECT_EQ(message_of<LogicError>([&] { std::move(*keeper.gradients).reduce(); }),
                "reduce() of a handle whose engine has ended");
    });
  }
}

TEST(Unwinding, ARankAloneGoesOnToTheEndOfTheMicroBatch) {
  on_ranks({}, [](Engine& engine, Runtime&) {
    engine.begin_micro_batch();
    try {
      const UnitGradients gradients = engine.gradients({3});
      throw std::runtime_error("the model found no number");
    } catch (const std::runtime_error&) {
    }
    for (int unit = 2; unit >= 0; --unit) engine.skip_gradients({unit});
    EXPECT_THAT(message_of<LogicError>([&] { end_with(engine, 0, 1); }),
                HasSubstr("gradients of unit mixed were dropped in micro-batch 0 without reduce()"));
  });
}

}  // namespace
}  // namespace tranche::test
