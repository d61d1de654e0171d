// The engine's contract, call by call: order of calls, handles, evaluation, access to state. The text of
// every error is checked.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>

#include "on_ranks.h"
#include "tranche/kernels/elementwise.h"

namespace tranche::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(EngineCalls, OrderIsChecked) {
  on_ranks({}, [](Engine& engine, Runtime& runtime) {
    EXPECT_THAT(message_of<LogicError>([&] { engine.gather({0}); }), HasSubstr("outside a micro-batch"));
    EXPECT_THAT(message_of<LogicError>([&] { engine.step(); }),
                HasSubstr("step() after 0 of 1 micro-batches"));
    EXPECT_THAT(message_of<LogicError>([&] { engine.end_evaluation(); }),
                HasSubstr("without begin_evaluation()"));
    EXPECT_THAT(message_of<LogicError>([&] { engine.read_gradient("tied.a"); }), HasSubstr("outside a step"));
    engine.begin_micro_batch();
    EXPECT_THAT(message_of<LogicError>([&] { engine.begin_micro_batch(); }),
                HasSubstr("inside a micro-batch"));
    EXPECT_THAT(message_of<LogicError>([&] { engine.step(); }), HasSubstr("call end_micro_batch() first"));
    EXPECT_THAT(message_of<LogicError>([&] { engine.begin_evaluation(); }), HasSubstr("inside a step"));
    EXPECT_THAT(message_of<InvalidArgument>([&] { engine.gather({9}); }), HasSubstr("9"));
    for (int unit = 0; unit < 4; ++unit) engine.skip_gradients({unit});
    EXPECT_THAT(message_of<LogicError>([&] { engine.gradients({1}); }),
                AllOf(HasSubstr("gradients(prime) for use 2"), HasSubstr("uses_per_micro_batch = 1")));
    StepBuffer scalars = engine.acquire(16, Category::activations, "scalars");
    EXPECT_THAT(message_of<InvalidArgument>([&] {
                  engine.end_micro_batch({scalars.data(), DataType::float32, Shape{1}},
                                         {scalars.data(), DataType::int64, Shape{1}});
                }),
                HasSubstr("wants one fp64 loss sum and one int64 token count, got fp32"));
    EXPECT_EQ(message_of<InvalidArgument>([&] {
                engine.end_micro_batch({nullptr, DataType::float64, Shape{1}},
                                       {scalars.data(), DataType::int64, Shape{1}});
              }),
              "end_micro_batch() got a null pointer as the loss sum");
    EXPECT_EQ(message_of<InvalidArgument>([&] {
                engine.end_micro_batch({scalars.data(), DataType::float64, Shape{1}},
                                       {nullptr, DataType::int64, Shape{1}});
              }),
              "end_micro_batch() got a null pointer as the token count");
    kernels::fill_zero(engine.compute_stream(), {scalars.data(), DataType::uint8, Shape{16}});
    engine.end_micro_batch({scalars.data(), DataType::float64, Shape{1}},
                           {static_cast<std::byte*>(scalars.data()) + 8, DataType::int64, Shape{1}});
    scalars.release({});
    EXPECT_THAT(message_of<LogicError>([&] { engine.begin_micro_batch(); }), HasSubstr("call step()"));
    const StepResult result = engine.step();
    EXPECT_FALSE(result.applied);
    EXPECT_EQ(result.skipped_because, "the step saw no tokens");
    static_cast<void>(runtime);
  });
}

TEST(EngineCalls, ARuntimeMayBeMovedWhileItsEnginesLive) {
  OddRun run;
  run.stage = 2;
  const Config config = odd_config(run);
  run_thread_ranks(1, [&](int, const CommunicatorFactory& factory) {
    struct Trainer {
      Runtime runtime;
      std::unique_ptr<Engine> engine;
    };
    std::vector<Trainer> trainers;
    {
      Trainer made{Runtime(RuntimeOptions::from(config), factory), nullptr};
      made.engine = std::make_unique<Engine>(made.runtime, odd_model(), config);
      trainers.push_back(std::move(made));
    }
    trainers.reserve(trainers.capacity() + 1);  // moves it again
    Trainer& trainer = trainers.front();
    whole_step(*trainer.engine, trainer.runtime, 0);
    EXPECT_TRUE(trainer.engine->step().applied);
    EXPECT_EQ(&trainer.engine->runtime().all(), &trainer.runtime.all());
  });
}

TensorSpec tensor_of_four(const std::string& name) {
  TensorSpec tensor;
  tensor.name = name;
  tensor.shape = Shape{4};
  return tensor;
}

/// The text with which an engine refuses a model, before a step and a save.
std::string refusal_of(UnitSpec unit, std::unique_ptr<Optimizer> optimizer = nullptr) {
  std::string text;
  run_thread_ranks(1, [&](int, const CommunicatorFactory& factory) {
    const Config config = odd_config({});
    Runtime runtime(RuntimeOptions::from(config), factory);
    ModelSpec model = odd_model();
    text = message_of<InvalidArgument>([&] {
      model.add_unit(std::move(unit));
      const Engine engine(runtime, std::move(model), config, std::move(optimizer));
    });
  });
  return text;
}

TEST(EngineStart, NamesThatNoCheckpointCanHoldAreRefused) {
  const auto tensors = [](std::vector<std::string> names, const std::string& alias = {}) {
    UnitSpec unit;
    unit.name = "late";
    for (const std::string& name : names) unit.tensors.push_back(tensor_of_four(name));
    if (!alias.empty()) unit.tensors.back().aliases = {alias};
    return unit;
  };
  EXPECT_EQ(refusal_of(tensors({"layer", "layer/bias"})),
            "the tensor names 'layer' and 'layer/bias' do not fit into one HDF5 file, where 'layer' would be "
            "both a dataset and a group; rename one of them");
  EXPECT_THAT(refusal_of(tensors({"emb/w"}, "emb")),
              HasSubstr("the alias names 'emb' and 'emb/w' do not fit into one HDF5 file"));
  EXPECT_EQ(refusal_of(tensors({"caf\xe9"})), "tensor 'caf\\xe9' is not UTF-8, as names in a checkpoint are");
  EXPECT_EQ(refusal_of({"caf\xe9", {tensor_of_four("w")}}),
            "unit 'caf\\xe9' is not UTF-8, as names in a checkpoint are");
  EXPECT_EQ(refusal_of(tensors({std::string("a\0b", 3)})),
            "tensor 'a\\x00b' has a NUL byte, at which HDF5 would end it");
  EXPECT_THAT(refusal_of(tensors({std::string(1025, 'x')})),
              HasSubstr("x...' has 1025 bytes; names in a checkpoint have at most 1024"));
  for (const char* name : {"a//b", "..", "/abs"}) {
    EXPECT_THAT(refusal_of(tensors({name})),
                HasSubstr(std::string("tensor '") + name + "' cannot be shown as a path in an HDF5 file"));
  }
  EXPECT_EQ(refusal_of(tensors({"caf\xc3\xa9/w", "caf\xc3\xa9/b"})), nothing_thrown);
}

/// A rule with the given states and description.
struct NamedRule final : Optimizer {
  std::vector<std::string> states_of_it;
  std::string text = "{}";
  std::string name() const override { return "Named"; }
  std::vector<OptimizerStateTensor> state(const TrainableTensor&) const override {
    std::vector<OptimizerStateTensor> states;
    for (const std::string& of_it : states_of_it) states.push_back({of_it});
    return states;
  }
  void apply(Stream&, const OptimizerStep&, const UpdateRange&) const override {}
  std::string describe() const override { return text; }
};

TEST(EngineStart, OptimizersThatNoCheckpointCanHoldAreRefused) {
  const auto refused = [](std::vector<std::string> states, const std::string& text = "{}") {
    auto rule = std::make_unique<NamedRule>();
    rule->states_of_it = std::move(states);
    rule->text = text;
    return refusal_of({"late", {tensor_of_four("w")}}, std::move(rule));
  };
  EXPECT_THAT(refused({""}), HasSubstr("optimizer state '' cannot be shown as a path in an HDF5 file"));
  EXPECT_THAT(refused({".."}), HasSubstr("optimizer state '..' cannot be shown as a path in an HDF5 file"));
  EXPECT_EQ(refused({"weight"}), "optimizer state 'weight' is there twice");
  EXPECT_EQ(refused({"m", "m"}), "optimizer state 'm' is there twice");
  EXPECT_EQ(
      refused({"m"}, "momentum 0.9"),
      "describe() of optimizer Named must be a JSON object, which checkpoints hold, not 'momentum 0.9'");
  EXPECT_EQ(refused({"m", "v"}), nothing_thrown);
}

TEST(EngineCalls, HandlesTurnBackMisuse) {
  on_ranks({}, [](Engine& engine, Runtime&) {
    engine.begin_micro_batch();
    GatheredUnit weights = engine.gather({1});
    EXPECT_THAT(message_of<InvalidArgument>([&] { weights.tensor("prime.x"); }),
                HasSubstr("unit prime has no tensor prime.x; it has prime.c, prime.d"));
    EXPECT_THAT(message_of<InvalidArgument>([&] { weights.tensor(2); }),
                HasSubstr("has 2 tensors, no index 2"));
    EXPECT_EQ(weights.tensor("prime.d").elements(), 1);
    weights.release();
    EXPECT_THAT(message_of<LogicError>([&] { weights.tensor(0); }), HasSubstr("was released"));
    UnitGradients gradients = engine.gradients({1});
    EXPECT_THAT(message_of<LogicError>([&] { engine.gradients({1}); }), HasSubstr("while another handle"));
    UnitGradients moved = std::move(gradients);
    EXPECT_THAT(message_of<LogicError>([&] { gradients.tensor(0); }), HasSubstr("were handed over"));
    std::move(moved).reduce();
    EXPECT_THAT(message_of<LogicError>([&] { std::move(moved).reduce(); }), HasSubstr("already"));
  });
}

TEST(EngineCalls, DepthNamesTheHolders) {
  OddRun run;
  run.ranks = 2;
  run.stage = 3;
  run.depth = 2;
  on_ranks(run, [](Engine& engine, Runtime&) {
    engine.begin_micro_batch();
    const GatheredUnit first = engine.gather({0});
    const GatheredUnit second = engine.gather({2});
    const GatheredUnit again = engine.gather({0});  // it is held already, so this uses no slot
    EXPECT_THAT(
        message_of<LogicError>([&] { engine.gather({1}); }),
        AllOf(HasSubstr("would hold 3 units at once, but tranche.depth is 2"), HasSubstr("tied, tiny")));
  });
}

TEST(EngineFailures, DroppedGradientsEndAllRanks) {
  OddRun run;
  run.ranks = 3;
  run.stage = 2;
  std::atomic<int> peers_told = 0;
  EXPECT_THAT(message_of<Error>([&] {
                on_ranks(run, [&](Engine& engine, Runtime& runtime) {
                  if (runtime.rank() != 1) {
                    try {
                      whole_step(engine, runtime, 0);
                      engine.step();
                    } catch (const CommunicationError& error) {
                      if (error.message().find("gradients of unit prime were dropped") != std::string::npos)
                        ++peers_told;
                      throw;
                    }
                    return;
                  }
                  engine.begin_micro_batch();
                  { const UnitGradients dropped = engine.gradients({1}); }
                  StepBuffer scalars = engine.acquire(16, Category::activations, "scalars");
                  engine.end_micro_batch({scalars.data(), DataType::float64, Shape{1}},
                                         {scalars.data(), DataType::int64, Shape{1}});
                });
              }),
              HasSubstr("gradients of unit prime were dropped in micro-batch 0 without reduce()"));
  EXPECT_EQ(peers_told, 2);
}

TEST(EngineFailures, MissingGradientsAreNamed) {
  on_ranks({}, [](Engine& engine, Runtime&) {
    engine.begin_micro_batch();
    engine.gradients({0}).reduce();
    StepBuffer scalars = engine.acquire(16, Category::activations, "scalars");
    EXPECT_THAT(
        message_of<LogicError>([&] {
          engine.end_micro_batch({scalars.data(), DataType::float64, Shape{1}},
                                 {scalars.data(), DataType::int64, Shape{1}});
        }),
        AllOf(HasSubstr("unit tied submitted its gradients 1 of 2 times"), HasSubstr("skip_gradients()")));
  });
}

TEST(EngineFailures, RanksThatDifferAreNamed) {
  EXPECT_THAT(message_of<ConfigurationError>([&] {
                run_thread_ranks(3, [](int rank, const CommunicatorFactory& factory) {
                  OddRun run;
                  run.ranks = 3;
                  run.clipping = rank == 2 ? 0.5 : 1.0;
                  const Config config = odd_config(run);
                  Runtime runtime(RuntimeOptions::from(config), factory);
                  Engine engine(runtime, odd_model(), config);
                });
              }),
              HasSubstr("rank 2 was started with another configuration than rank 0: its gradient_clipping is "
                        "0.5, rank 0 has 1.0; start all ranks with the same program"));
}

TEST(EngineFailures, FrozenPatternsThatMatchNothing) {
  OddRun run;
  EXPECT_THAT(message_of<ConfigurationError>([&] {
                Config config = odd_config(run);
                config.frozen = {"mixt.frozen"};
                Runtime runtime(RuntimeOptions::from(config), make_self_communicator);
                Engine engine(runtime, odd_model(), config);
              }),
              AllOf(HasSubstr("'mixt.frozen'"), HasSubstr("matches no tensor"), HasSubstr("'mixed.frozen'")));
  EXPECT_THAT(message_of<ConfigurationError>([&] {
                Config config = odd_config(run);
                config.frozen = {"elephant.*"};
                Runtime runtime(RuntimeOptions::from(config), make_self_communicator);
                Engine engine(runtime, odd_model(), config);
              }),
              HasSubstr("'elephant.*' in tranche.frozen matches no tensor; the first tensor is 'tied.a'"));
  EXPECT_THAT(message_of<ConfigurationError>([&] {
                Config config = odd_config(run);
                config.group_rules = {{"*.elephant", std::nullopt, false}};
                Runtime runtime(RuntimeOptions::from(config), make_self_communicator);
                Engine engine(runtime, odd_model(), config);
              }),
              HasSubstr("'*.elephant' in tranche.no_decay or tranche.parameter_groups matches no tensor"));
  EXPECT_THAT(message_of<ConfigurationError>([&] {
                Config config = odd_config(run);
                config.frozen = {"*"};
                Runtime runtime(RuntimeOptions::from(config), make_self_communicator);
                Engine engine(runtime, odd_model(), config);
              }),
              HasSubstr("leaves no tensor to train"));
}

TEST(EngineState, GradientsMatchTheClosedForm) {
  // The mean of weight - target over all samples, for every policy, also between micro-batches.
  for (int variant = 0; variant < 8; ++variant) {
    const int stage = variant % 4;
    const DataType accumulation = variant < 4 ? DataType::float32 : DataType::bfloat16;
    for (const ReductionPolicy policy : {ReductionPolicy::boundary, ReductionPolicy::micro_batch}) {
      OddRun run;
      run.ranks = 3;
      run.stage = stage;
      run.accumulation = 2;
      run.accumulation_dtype = accumulation;
      run.policy = policy;
      on_ranks(run, [&](Engine& engine, Runtime& runtime) {
        const std::int64_t samples = run.samples_per_micro_batch;
        const std::vector<float> weight = engine.read_weight("prime.c");
        for (std::int64_t m = 0; m < 2; ++m) {
          odd_micro_batch(engine, (m * 3 + runtime.rank()) * samples, samples);
          const std::vector<float> gradient = engine.read_gradient("prime.c");
          ASSERT_EQ(gradient.size(), 1009u);
          const std::int64_t seen = (m + 1) * 3 * samples;
          for (std::size_t i = 0; i < gradient.size(); ++i) {
            double sum = 0;
            for (std::int64_t s = 0; s < seen; ++s) {
              sum += static_cast<double>(weight[i]) - odd_target(16, s, static_cast<std::int64_t>(i));
            }
            // These are fp32 sums of at most 18 terms below 5: a few units of 2^-22. In bf16 a sum below 90
            // is rounded twice (2^-9 of it each time) and divided by at least 9 tokens.
            const double bound = accumulation == DataType::float32 ? 3e-6 : 2 * 90 * 0x1p-9 / 9;
            EXPECT_NEAR(gradient[i], sum / static_cast<double>(seen), bound)
                << "element " << i << " stage " << stage;
          }
        }
        // The norm is that of the values that every rank read: each shard once, without padding and frozen
        // tensors.
        double squares = 0;
        for (const UnitSpec& unit : engine.model().units()) {
          for (const TensorSpec& tensor : unit.tensors) {
            if (engine.frozen(tensor.name)) continue;
            for (const float g : engine.read_gradient(tensor.name)) squares += static_cast<double>(g) * g;
          }
        }
        const StepResult result = engine.step();
        EXPECT_TRUE(result.applied);
        // read_gradient rounds each value to fp32 again, an error of 2^-24 of it.
        EXPECT_NEAR(result.gradient_norm, std::sqrt(squares), 1e-7 * result.gradient_norm);
        EXPECT_EQ(result.clip_coefficient, 1 / (result.gradient_norm + 1e-6)) << "clipped at 1";
      });
    }
  }
}

TEST(EngineState, ARankAloneRoundsItsGradientsToTheWireToo) {
  // The same sample is in every micro-batch, so that sums and the mean involve powers of two only and do not
  // round.
  const auto gradient_over = [](DataType wire, ReductionPolicy policy, std::int64_t accumulation, int stage) {
    OddRun run;
    run.stage = stage;
    run.accumulation = accumulation;
    run.policy = policy;
    std::vector<float> gradient;
    on_ranks(
        run,
        [&](Engine& engine, Runtime&) {
          for (std::int64_t m = 0; m < accumulation; ++m) odd_micro_batch(engine, 3, 1);
          gradient = engine.read_gradient("prime.c");
        },
        [&](Config& config, RuntimeOptions&) { config.precision.communication = wire; });
    return gradient;
  };
  for (const ReductionPolicy policy : {ReductionPolicy::boundary, ReductionPolicy::micro_batch}) {
    for (const int accumulation : {1, 2}) {
      for (const int stage : {0, 3}) {
        const std::vector<float> exact = gradient_over(DataType::float32, policy, accumulation, stage);
        std::vector<float> rounded;
        for (const float value : exact) rounded.push_back(to_float(from_float<bfloat16>(value)));
        ASSERT_NE(rounded, exact);
        EXPECT_EQ(gradient_over(DataType::bfloat16, policy, accumulation, stage), rounded)
            << accumulation << " micro-batches, stage " << stage;
      }
    }
  }
}

TEST(EngineState, UpdatesMatchTheClosedForm) {
  // Plain SGD: weight - rate * clip * gradient, without clipping, and with a norm below and above the limit.
  for (int stage = 0; stage <= 3; ++stage) {
    for (const double clipping : {0.0, 1e6, 1.0}) {
      OddRun run;
      run.ranks = 3;
      run.stage = stage;
      run.accumulation = 2;
      run.clipping = clipping;
      run.optimizer = "SGD";
      on_ranks(run, [&](Engine& engine, Runtime& runtime) {
        whole_step(engine, runtime, 0);
        const std::vector<float> before = engine.read_weight("mixed.g");
        const std::vector<float> gradient = engine.read_gradient("mixed.g");
        const StepResult result = engine.step();
        EXPECT_GT(result.gradient_norm, 1);
        const double clip = clipping == 1.0 ? 1 / (result.gradient_norm + 1e-6) : 1.0;
        EXPECT_EQ(result.clip_coefficient, clip);
        const std::vector<float> after = engine.read_weight("mixed.g");
        for (std::size_t i = 0; i < after.size(); ++i) {
          const double expected = static_cast<double>(before[i]) - 0.05 * clip * gradient[i];
          EXPECT_NEAR(after[i], expected, 1e-8) << "element " << i;  // for values below 0.1 in fp32
        }
      });
    }
  }
}

TEST(EngineState, WeightsAndMomentsCanBeReadAndSet) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
      OddRun run;
      run.ranks = 3;
      run.stage = stage;
      run.dtype = dtype;
      on_ranks(run, [&](Engine& engine, Runtime& runtime) {
        std::vector<float> values(1009);
        for (std::size_t i = 0; i < values.size(); ++i) values[i] = 0.001f * static_cast<float>(i);
        engine.write_weight("prime.c", values);
        EXPECT_EQ(engine.read_weight("prime.c"), values);
        engine.write_optimizer_state("prime.c", "exp_avg_sq", values);
        EXPECT_EQ(engine.read_optimizer_state("prime.c", "exp_avg_sq"), values);
        EXPECT_EQ(engine.read_optimizer_state("prime.c", "exp_avg"), std::vector<float>(1009, 0.0f));
        // The compute copy is written too: a model gathers the rounded value.
        engine.begin_evaluation();
        engine.begin_micro_batch();
        {
          const GatheredUnit weights = engine.gather({1});
          const ConstTensorView view = weights.tensor(0);
          const float seen =
              dtype == DataType::float32 ? view.as<float>()[777] : to_float(view.as<bfloat16>()[777]);
          EXPECT_EQ(seen, dtype == DataType::float32 ? values[777] : to_float(to_bfloat16(values[777])));
        }
        StepBuffer scalars = engine.acquire(16, Category::activations, "scalars");
        kernels::fill_zero(engine.compute_stream(), {scalars.data(), DataType::uint8, Shape{16}});
        engine.end_micro_batch({scalars.data(), DataType::float64, Shape{1}},
                               {static_cast<std::byte*>(scalars.data()) + 8, DataType::int64, Shape{1}});
        scalars.release({});
        engine.end_evaluation();
        EXPECT_THAT(message_of<InvalidArgument>([&] { engine.read_weight("prime.k"); }),
                    HasSubstr("no tensor 'prime.k'; the closest match is 'prime."));
        EXPECT_THAT(message_of<InvalidArgument>([&] { engine.read_optimizer_state("prime.c", "momentum"); }),
                    HasSubstr("keeps no state 'momentum'; it keeps exp_avg, exp_avg_sq"));
        EXPECT_THAT(
            message_of<InvalidArgument>([&] { engine.read_optimizer_state(odd_frozen_tensor, "exp_avg"); }),
            HasSubstr("is frozen"));
        EXPECT_THAT(message_of<InvalidArgument>([&] { engine.write_weight("prime.d", values); }),
                    HasSubstr("wants 1 values of shape [1], got 1009"));
        static_cast<void>(runtime);
      });
    }
  }
}

TEST(EngineState, FrozenTensorsStayAndKeepNothing) {
  OddRun run;
  run.ranks = 2;
  run.stage = 1;
  run.poison = true;
  on_ranks(run, [](Engine& engine, Runtime& runtime) {
    engine.begin_micro_batch();
    {
      // Their gradients may be added to like others; the memory holds zeros and is discarded.
      UnitGradients gradients = engine.gradients({3});
      EXPECT_FALSE(gradients.wanted(1));
      EXPECT_EQ(gradients.tensor(odd_frozen_tensor).as<float>()[130], 0.0f);
      std::move(gradients).reduce();
    }
    for (int unit = 0; unit < 3; ++unit) engine.skip_gradients({unit});
    end_with(engine, 0, 0);
    engine.step();
    const std::vector<float> frozen = engine.read_weight(odd_frozen_tensor);
    const std::vector<float> neighbour = engine.read_weight("mixed.f");
    whole_step(engine, runtime, 0);
    engine.step();
    EXPECT_EQ(engine.read_weight(odd_frozen_tensor), frozen);
    EXPECT_NE(engine.read_weight("mixed.f"), neighbour);
    EXPECT_TRUE(engine.frozen(odd_frozen_tensor));
    EXPECT_FALSE(engine.frozen("mixed.f"));
  });
}

TEST(EngineState, InitialWeightsAreDrawnByTensorAndElement) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
      OddRun run;
      run.ranks = 3;
      run.stage = stage;
      run.dtype = dtype;
      run_thread_ranks(run.ranks, [&](int, const CommunicatorFactory& factory) {
        Config config = odd_config(run);
        config.workspace_bytes = 400;  // gives tiles of 100 elements
        Runtime runtime(RuntimeOptions::from(config), factory);
        Engine engine(runtime, odd_model(), config);
        const auto drawn = [&](std::uint64_t tensor, std::int64_t elements, float deviation) {
          std::vector<float> values(static_cast<std::size_t>(elements));
          kernels::fill_normal(engine.compute_stream(), {values.data(), DataType::float32, Shape{elements}},
                               {config.seed, RandomPurpose::initialization, tensor}, 0, 0, deviation);
          return values;
        };
        EXPECT_EQ(engine.read_weight("tied.a"), drawn(0, 7, 0.5f));
        EXPECT_EQ(engine.read_weight("prime.c"), drawn(2, 1009, 1));
        EXPECT_EQ(engine.read_weight("tiny.e"), std::vector<float>(3, 0.25f));
        std::vector<float> frozen = drawn(6, 131, 0.1f);
        if (dtype == DataType::bfloat16) {
          for (float& value : frozen) value = to_float(to_bfloat16(value));
        }
        EXPECT_EQ(engine.read_weight(odd_frozen_tensor), frozen);
      });
    }
  }
}

TEST(EngineState, DigestsDoNotDependOnTheNumberOfRanks) {
  std::vector<kernels::Digest> digests;
  for (int ranks = 1; ranks <= 5; ++ranks) {
    OddRun run;
    run.ranks = ranks;
    run.stage = ranks % 4;
    on_ranks(run, [&](Engine& engine, Runtime& runtime) {
      const kernels::Digest digest = engine.state_digest();
      if (runtime.rank() == 0) digests.push_back(digest);
    });
  }
  for (const kernels::Digest& digest : digests) EXPECT_EQ(digest, digests[0]);
}

TEST(EngineEvaluation, AveragesOverRanksAndLeavesTheStepAlone) {
  OddRun run;
  run.ranks = 3;
  run.stage = 3;
  on_ranks(run, [](Engine& engine, Runtime& runtime) {
    whole_step(engine, runtime, 0);
    engine.step();
    const kernels::Digest before = engine.state_digest();
    double expected = 0;
    for (int pass = 0; pass < 2; ++pass) {
      const std::int64_t memory_calls = runtime.memory_calls();
      engine.begin_evaluation();
      for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
        engine.begin_micro_batch();
        for (int unit = 3; unit >= 0; --unit) static_cast<void>(engine.gather({unit}));
        EXPECT_THAT(message_of<LogicError>([&] { engine.gradients({0}); }), HasSubstr("outside a training"));
        StepBuffer scalars = engine.acquire(16, Category::activations, "scalars");
        *static_cast<double*>(scalars.data()) = 2.0 * (runtime.rank() + 1);
        static_cast<std::int64_t*>(scalars.data())[1] = 3;
        engine.end_micro_batch({scalars.data(), DataType::float64, Shape{1}},
                               {static_cast<std::byte*>(scalars.data()) + 8, DataType::int64, Shape{1}});
      }
      const EvaluationResult result = engine.end_evaluation();
      expected = 3.0 * (2 + 4 + 6) / 27.0;
      EXPECT_DOUBLE_EQ(result.loss, expected);
      EXPECT_EQ(result.tokens, 27);
      // The first micro-batch is dynamic, the second is recorded, later ones are planned.
      if (pass == 1) {
        EXPECT_EQ(runtime.memory_calls(), memory_calls);
      }
    }
    EXPECT_EQ(engine.state_digest(), before);
    const std::int64_t elements = engine.formula_traffic_elements();
    EXPECT_GT(elements, 0);
    whole_step(engine, runtime, 1);
    EXPECT_TRUE(engine.step().applied);
    EXPECT_EQ(engine.formula_traffic_elements(), elements) << "validation is not in the step's figure";
  });
}

TEST(EngineReports, MemoryOutOfBudgetNamesTheTable) {
  OddRun run;
  Config config = odd_config(run);
  config.device_memory_limit = 64 << 10;
  EXPECT_THAT(message_of<OutOfMemory>([&] {
                Runtime runtime(RuntimeOptions::from(config), make_self_communicator);
                Engine engine(runtime, odd_model(), config);
              }),
              HasSubstr("limit"));
}

TEST(EngineReports, StateBeyondWhatTheMachineHasIsRefusedBeforeItIsTaken) {
  ModelSpec model;
  model.add_unit(
      {"big", {{"w", Shape{std::int64_t{1} << 22, std::int64_t{1} << 22}, Initializer::zeros()}}, 1});
  OddRun run;
  run.frozen = false;
  const Config config = odd_config(run);
  Runtime runtime(RuntimeOptions::from(config), make_self_communicator);
  EXPECT_THAT(message_of<OutOfMemory>([&] { const Engine engine(runtime, model, config); }),
              AllOf(HasSubstr("model state takes "),
                    HasSubstr(" TiB of host memory on each of 1 ranks of this node, "),
                    HasSubstr("use a higher stage or more nodes")));
}

TEST(EngineReports, StateBeyondTheMachineNamesTheFlagThatAskedForIt) {
  const auto refusal = [](OffloadTier tier, std::int64_t host_state) {
    ModelSpec model;
    model.add_unit(
        {"big", {{"w", Shape{std::int64_t{1} << 22, std::int64_t{1} << 22}, Initializer::zeros()}}, 1});
    OddRun run;
    run.frozen = false;
    Config config = odd_config(run);
    config.offload.optimizer = tier;
    config.offload.nvme_path = "/none";
    config.offload.host_state = host_state;
    Runtime runtime(RuntimeOptions::from(config), make_self_communicator);
    return message_of<OutOfMemory>([&] { const Engine engine(runtime, model, config); });
  };
  EXPECT_THAT(refusal(OffloadTier::cpu, -1), HasSubstr("move the optimizer to nvme"));
  EXPECT_THAT(refusal(OffloadTier::nvme, -1), AllOf(HasSubstr("or lower offload_optimizer.ratio"),
                                                    Not(HasSubstr("move the optimizer to nvme"))));
  EXPECT_THAT(refusal(OffloadTier::nvme, std::int64_t{1} << 50),
              AllOf(HasSubstr("; lower --host-state (tranche.host_state), now "),
                    Not(HasSubstr("move the optimizer to nvme"))));
}

TEST(EngineReports, RunningOutAtTheStartNamesTheUnitAndComparesTheStages) {
  OddRun run;
  run.ranks = 2;
  Config config = odd_config(run);
  config.device_memory_limit = (64 << 10) + (8 << 10);  // the staging buffer and less than the first unit
  std::string text;
  run_thread_ranks(2, [&](int rank, const CommunicatorFactory& factory) {
    const std::string heard = message_of<OutOfMemory>([&] {
      Runtime runtime(RuntimeOptions::from(config), factory);
      Engine engine(runtime, odd_model(), config);
    });
    if (rank == 0) text = heard;
  });
  EXPECT_THAT(text, AllOf(HasSubstr("start of "), HasSubstr(" asks for "),
                          HasSubstr("but the limit is 72.00 KiB"), HasSubstr("device memory"),
                          HasSubstr("at stage 0 (this one), "), HasSubstr(" at stage 3;")));
}

TEST(EngineReports, OneRankThatRunsOutTellsTheOthers) {
  // At the start, where peers wait for its shards, and in the middle of a step.
  for (const bool at_start : {true, false}) {
    OddRun run;
    run.ranks = 3;
    run.stage = 2;
    Config config = odd_config(run);
    config.device_memory_limit = 1 << 20;
    std::vector<std::string> heard(3);
    run_thread_ranks(3, [&](int rank, const CommunicatorFactory& factory) {
      Runtime runtime(RuntimeOptions::from(config), factory);
      Buffer ballast;
      const auto fill = [&](bool now) {
        if (!now || rank != 1) return;
        const std::int64_t left = config.device_memory_limit - runtime.ledger().total(Tier::device);
        ballast = Buffer(runtime.memory(Tier::device), left - 512, Category::other, "ballast");
      };
      const auto call = [&] {
        fill(at_start);
        Engine engine(runtime, odd_model(), config);
        fill(!at_start);
        whole_step(engine, runtime, 0);
        engine.step();
      };
      // At the start all ranks agree before data is sent, so that all end with the same error.
      heard[static_cast<std::size_t>(rank)] =
          rank == 1 || at_start ? message_of<OutOfMemory>(call) : message_of<CommunicationError>(call);
    });
    EXPECT_THAT(heard[1], AllOf(HasSubstr("but the limit is 1.00 MiB"), HasSubstr(" asks for "),
                                ::testing::Not(HasSubstr("another type of error"))));
    for (const int rank : {0, 2}) {
      EXPECT_THAT(heard[static_cast<std::size_t>(rank)],
                  AllOf(HasSubstr(at_start ? "rank 1 ran out of memory: " : "rank 1 failed"),
                        HasSubstr("but the limit is 1.00 MiB")));
    }
  }
}

TEST(RuntimeFailure, IsLoggedPostedAndTurnedIntoAStatus) {
  ::testing::internal::CaptureStderr();
  std::string heard;
  CommonStart start(2);
  run_thread_ranks(2, [&](int rank, const CommunicatorFactory& factory) {
    CommonStart::Rank started(start);
    Runtime runtime({}, factory);
    started.await_others();
    if (rank == 1) {
      EXPECT_EQ(runtime.fail(std::make_exception_ptr(ConfigurationError("no such model"))), 2);
      EXPECT_EQ(runtime.fail(std::make_exception_ptr(std::runtime_error("plain"))), 1);
    } else {
      heard = message_of<CommunicationError>([&] { runtime.all().barrier({"unit", "phase"}).wait(); });
    }
  });
  EXPECT_THAT(heard, HasSubstr("rank 1 failed: no such model"));
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("[rank 1]"), HasSubstr("no such model")));
}

TEST(EngineReports, SummaryNamesAStageThatWouldTakeLess) {
  // With one large unit on two ranks, gathering it whole costs stage 3 more memory than sharding the weights
  // saves. With many equal units stage 3 saves memory.
  const auto summary_of = [](int units) {
    std::string text;
    run_thread_ranks(2, [&](int rank, const CommunicatorFactory& factory) {
      ModelSpec model;
      for (int u = 0; u < units; ++u) {
        const std::string name = "u" + std::to_string(u);
        model.add_unit({name, {{name + ".w", Shape{100, 50}, Initializer::zeros()}}, 1});
      }
      OddRun run;
      run.ranks = 2;
      run.stage = 3;
      run.frozen = false;
      run.dtype = DataType::bfloat16;
      const Config config = odd_config(run);
      Runtime runtime(RuntimeOptions::from(config), factory);
      Engine engine(runtime, std::move(model), config);
      if (rank == 0) text = engine.summary();
    });
    return text;
  };
  EXPECT_THAT(summary_of(1), HasSubstr("would take less memory here"));
  EXPECT_THAT(summary_of(40), ::testing::Not(HasSubstr("would take less memory")));
}

TEST(EngineReports, SummarySaysWhetherTheModelRecomputes) {
  const auto summary_of = [](bool recomputes) {
    Config config = odd_config({});
    config.activation_checkpointing = true;
    Runtime runtime(RuntimeOptions::from(config), make_self_communicator);
    ModelSpec model = odd_model();
    model.recomputes_activations = recomputes;
    return Engine(runtime, std::move(model), config).summary();
  };
  EXPECT_THAT(summary_of(true), AllOf(HasSubstr("the input of every block is kept"),
                                      ::testing::Not(HasSubstr("activation_checkpointing has no effect"))));
  EXPECT_THAT(summary_of(false),
              AllOf(HasSubstr("activation_checkpointing has no effect: this model computes nothing "
                              "again"),
                    ::testing::Not(HasSubstr("the input of every block is kept"))));
}

TEST(EngineReports, SummaryShowsWhatIsInForce) {
  OddRun run;
  run.ranks = 2;
  run.stage = 3;
  run.dtype = DataType::bfloat16;
  on_ranks(run, [](Engine& engine, Runtime&) {
    EXPECT_THAT(engine.summary(), AllOf(HasSubstr("2 x stage 3, micro_batch"), HasSubstr("compute bf16"),
                                        HasSubstr("accumulation fp32"), HasSubstr("matmul")));
  });
  // One rank gathers and sends nothing, and the report says so instead of listing zeros.
  on_ranks({}, [](Engine& engine, Runtime&) {
    EXPECT_THAT(engine.summary(), AllOf(HasSubstr("nothing"), ::testing::Not(HasSubstr("gathered"))));
  });
}

}  // namespace
}  // namespace tranche::test
