// Training runs: compared with fp64, on several ranks, with dropout, in evaluation, and on the meta device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <cstdio>

#include <numeric>

#include "tests/core/rounds.h"
#include "training_fixture.h"

namespace tranche::models {
namespace {

constexpr std::int64_t time_steps = 11;

/// The losses of `steps` steps in fp64, beginning with the weights of an engine with this configuration.
std::vector<double> reference_losses(const GptConfig& model, const Config& config, int steps) {
  reference_training::Tensors weights;
  on_ranks(1, Gpt::spec(model, time_steps), config, [&](Engine& engine) { weights = read_all(engine); });
  reference_training::Optimizer optimizer(reference_optimizer(config));
  std::vector<double> losses;
  TokenData data(time_steps, model.vocabulary, true);
  for (int step = 0; step < steps; ++step) {
    data.draw(step * config.train_batch_size, config.train_batch_size);
    auto gradients = reference_training::zeros(weights);
    const auto loss =
        reference_training::gpt(model, weights, data.tokens, data.targets, time_steps, &gradients);
    losses.push_back(loss.sum / static_cast<double>(loss.tokens));
    (void)optimizer.update(weights, gradients, loss.tokens);
  }
  return losses;
}

/// fp32 training with decay, clipping and accumulation.
Config training_config(int ranks, std::int64_t accumulation = 1) {
  auto config = plain_config(8, ranks);
  config.accumulation_steps = accumulation;
  config.micro_batch_size = 8 / ranks / accumulation;
  config.gradient_clipping = 0.5;
  config.optimizer.learning_rate = 2e-3;
  config.optimizer.parameters["weight_decay"] = 0.1;
  return config;
}

Config sgd(Config config) {
  config.optimizer.type = "SGD";
  config.optimizer.learning_rate = 0.1;
  config.optimizer.parameters["momentum"] = 0.9;
  config.optimizer.parameters["weight_decay"] = 0;
  return config;
}

double largest_relative_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double largest = a.size() == b.size() ? 0 : 1e9;
  for (std::size_t i = 0; i < b.size() && i < a.size(); ++i) {
    largest = std::max(largest, std::abs(a[i] - b[i]) / std::abs(b[i]));
  }
  return largest;
}

/// The README's table quotes this output.
double measured(const char* what, double difference) {
  std::printf("measured: %s, 50 steps against fp64: largest relative difference of the losses %.2g\n", what,
              difference);
  return difference;
}

TEST(GptTraining, FiftyStepsInFp32AgreeWithFp64) {
  for (const Config& config : {training_config(1), sgd(training_config(1))}) {
    const auto wanted = reference_losses(tiny_gpt(), config, 50);
    const auto run = train_gpt(1, tiny_gpt(), config, 50, time_steps, true);
    EXPECT_LE(
        measured(("fp32 " + config.optimizer.type).c_str(), largest_relative_difference(run.losses, wanted)),
        1e-5);
    EXPECT_LT(run.losses.back(), run.losses.front() - 0.3) << "it learns";
  }
}

TEST(GptTraining, Bf16StaysWithinItsBoundOfFp64) {
  auto config = training_config(1);
  const auto wanted = reference_losses(tiny_gpt(), config, 50);
  config.precision.compute = config.precision.communication = DataType::bfloat16;
  const auto run = train_gpt(1, tiny_gpt(), config, 50, time_steps, true);
  // The documented bound for bf16: 0.3 % of the loss at every step. Weights and activations are rounded to
  // 2^-9 of their size, and the loss averages over tokens.
  EXPECT_LE(measured("bf16 AdamW", largest_relative_difference(run.losses, wanted)), 0.003);
}

void expect_equal_runs(const GptRun& actual, const GptRun& wanted, double weight_tolerance) {
  EXPECT_LE(largest_relative_difference(actual.losses, wanted.losses), 1e-5);
  EXPECT_LE(largest_relative_difference(actual.norms, wanted.norms), 1e-4);
  for (const auto& [name, values] : wanted.weights) {
    auto a = actual.weights.at(name), b = values;
    if (name.ends_with("c_attn.bias")) {
      // The gradient of the key's bias is zero in exact arithmetic: it adds the same to all scores of a
      // query, which softmax ignores. The computed value is rounding noise, which Adam scales up to steps of
      // the learning rate, so it cannot be compared.
      const auto third = static_cast<std::ptrdiff_t>(b.size() / 3);
      a.erase(a.begin() + third, a.begin() + 2 * third);
      b.erase(b.begin() + third, b.begin() + 2 * third);
    }
    EXPECT_LE(relative_distance(a, b), weight_tolerance) << name;
  }
}

TEST(GptTraining, RanksWithAPartOfTheBatchAgreeWithOneRank) {
  const auto adam = train_gpt(1, tiny_gpt(), training_config(1), 30, time_steps, true);
  const auto momentum = train_gpt(1, tiny_gpt(), sgd(training_config(1)), 30, time_steps, true);
  for (const int ranks : {2, 4}) {
    for (const int stage : {0, 3}) {
      SCOPED_TRACE("ranks " + std::to_string(ranks) + " stage " + std::to_string(stage));
      auto config = training_config(ranks, ranks == 2 ? 2 : 1);
      config.stage = stage;
      expect_equal_runs(train_gpt(ranks, tiny_gpt(), config, 30, time_steps, true), adam, 1e-4);
      expect_equal_runs(train_gpt(ranks, tiny_gpt(), sgd(config), 30, time_steps, true), momentum, 1e-5);
    }
  }
}

TEST(GptTraining, DropoutIsTheSameForEveryNumberOfRanks) {
  auto model = tiny_gpt();
  const auto without = train_gpt(1, model, training_config(1), 8, time_steps);
  model.embedding_dropout = 0.1f;
  model.attention_dropout = 0.2f;
  model.residual_dropout = 0.3f;
  const auto one = train_gpt(1, model, training_config(1), 8, time_steps);
  const auto two = train_gpt(2, model, training_config(2), 8, time_steps);
  const auto accumulated = train_gpt(2, model, training_config(2, 2), 8, time_steps);
  EXPECT_LE(largest_relative_difference(two.losses, one.losses), 1e-5);
  EXPECT_LE(largest_relative_difference(accumulated.losses, one.losses), 1e-5);
  EXPECT_GE(largest_relative_difference(without.losses, one.losses), 1e-3) << "dropout has an effect";
  auto other = training_config(1);
  other.seed += 1;
  // Another seed also draws other weights, so masks are compared through the change that dropout makes to the
  // first loss.
  EXPECT_NE(train_gpt(1, model, other, 1, time_steps).losses[0], one.losses[0]);
}

TEST(GptTraining, DropoutOnlyInTheNamedPlaces) {
  // Each of the three probabilities by itself changes the loss, in different ways.
  std::vector<double> losses{train_gpt(1, tiny_gpt(), training_config(1), 1, time_steps).losses[0]};
  for (int which = 0; which < 3; ++which) {
    auto model = tiny_gpt();
    (which == 0   ? model.embedding_dropout
     : which == 1 ? model.attention_dropout
                  : model.residual_dropout) = 0.5f;
    losses.push_back(train_gpt(1, model, training_config(1), 1, time_steps).losses[0]);
  }
  std::sort(losses.begin(), losses.end());
  EXPECT_EQ(std::unique(losses.begin(), losses.end()), losses.end());
}

TEST(GptTraining, DropoutIsDrawnAnewInEveryStepAndForEverySample) {
  auto model = tiny_gpt();
  model.residual_dropout = 0.3f;
  auto config = training_config(1);
  config.optimizer.learning_rate = 0;
  config.train_batch_size = config.micro_batch_size = 2;
  on_ranks(1, Gpt::spec(model, time_steps), config, [&](Engine& engine) {
    TokenData data(time_steps, model.vocabulary, false);
    data.draw(0, 2);
    std::vector<double> losses;
    for (const std::int64_t sample : {0, 0, 40}) {
      data.samples = {sample, sample + 1};
      Gpt(model).forward_backward(engine, data.batch());
      losses.push_back(engine.step().loss);
    }
    // The weights do not change, so only the masks can make a difference.
    EXPECT_NE(losses[0], losses[1]) << "another step";
    EXPECT_NE(losses[1], losses[2]) << "other samples";
  });
}

TEST(GptTraining, StagesGiveTheSameBitsForTheSameGroup) {
  auto config = training_config(2, 2);
  config.reduction = ReductionPolicy::micro_batch;
  const auto wanted = train_gpt(2, tiny_gpt(), config, 4, time_steps);
  for (const int stage : {1, 2, 3}) {
    config.stage = stage;
    const auto run = train_gpt(2, tiny_gpt(), config, 4, time_steps);
    EXPECT_EQ(run.digest, wanted.digest) << "stage " << stage;
    EXPECT_EQ(run.losses, wanted.losses) << "stage " << stage;
  }
}

TEST(GptEvaluation, LossAgreesWithTheReferenceAndDropoutIsOff) {
  auto model = tiny_gpt();
  model.embedding_dropout = model.attention_dropout = model.residual_dropout = 0.5f;
  for (const int chunk : {0, 17}) {
    auto config = plain_config(4, 2);
    config.vocabulary_chunk = chunk;
    config.stage = 3;
    on_ranks(2, Gpt::spec(model, time_steps), config, [&](Engine& engine) {
      TokenData data(time_steps, model.vocabulary, true);
      const auto weights = read_all(engine);
      reference_training::LossSum wanted;
      engine.begin_evaluation();
      for (std::int64_t batch = 0; batch < 3; ++batch) {
        for (int rank = 0; rank < 2; ++rank) {
          data.draw(100 + 2 * batch + 50 * rank, 2);
          const auto loss =
              reference_training::gpt(model, weights, data.tokens, data.targets, time_steps, nullptr);
          wanted.sum += loss.sum;
          wanted.tokens += loss.tokens;
          if (rank == engine.runtime().rank()) Gpt(model).evaluate(engine, data.batch());
        }
      }
      const EvaluationResult result = engine.end_evaluation();
      EXPECT_EQ(result.tokens, wanted.tokens);
      const double mean = wanted.sum / static_cast<double>(wanted.tokens);
      EXPECT_NEAR(result.loss, mean, 1e-6 * mean);
    });
  }
}

TEST(GptGeneration, LogitsAgreeWithTheLossOfTheSameToken) {
  const auto model = tiny_gpt();
  auto config = plain_config(2, 2);
  config.stage = 3;
  on_ranks(2, Gpt::spec(model, time_steps), config, [&](Engine& engine) {
    const Gpt gpt(model);
    const auto weights = read_all(engine);
    std::vector<std::int32_t> prompt{5, 60, 0, 17, 23};
    for (int step = 0; step < 4; ++step) {
      const auto probabilities = gpt.next_token_probabilities(engine, prompt);
      ASSERT_EQ(probabilities.size(), static_cast<std::size_t>(model.vocabulary));
      EXPECT_NEAR(std::accumulate(probabilities.begin(), probabilities.end(), 0.0), 1.0, 1e-12);
      const auto last = static_cast<std::int32_t>(7 * step);
      std::vector<std::int32_t> targets(prompt.size(), -100);
      targets.back() = last;
      const auto loss = reference_training::gpt(model, weights, prompt, targets,
                                                static_cast<std::int64_t>(prompt.size()), nullptr);
      EXPECT_NEAR(-std::log(probabilities[static_cast<std::size_t>(last)]), loss.sum, 1e-5);
      prompt.push_back(last);
    }
    // The model sees only the last `positions` tokens.
    std::vector<std::int32_t> shown(16, 3), whole{60, 60, 60};
    whole.insert(whole.end(), shown.begin(), shown.end());
    EXPECT_EQ(gpt.next_token_logits(engine, whole), gpt.next_token_logits(engine, shown));
    const auto refusal = [&](std::vector<std::int32_t> tokens, double temperature) -> std::string {
      try {
        (void)gpt.next_token_probabilities(engine, tokens, temperature);
      } catch (const InvalidArgument& error) {
        return error.message();
      }
      return "accepted";
    };
    using ::testing::HasSubstr;
    EXPECT_THAT(refusal({}, 1), HasSubstr("give at least one"));
    EXPECT_THAT(refusal({0, 61}, 1), HasSubstr("token 61 is not in the vocabulary of 61"));
    EXPECT_THAT(refusal({-1}, 1), HasSubstr("token -1 is not in the vocabulary of 61"));
    EXPECT_THAT(refusal({1}, 0), HasSubstr("temperature is 0, but must be positive"));
  });
}

TEST(GptGeneration, AWindowThatSlidesSeesWhatAFreshEngineSees) {
  // The first windows grow (every pass has another memory plan), later ones slide at full length (the plan is
  // replayed). The plan, the number of ranks and earlier requests must not influence the result.
  const GptConfig model = GptConfig::preset("gpt-nano");
  const std::int64_t length = 24;
  std::vector<std::int32_t> text;
  for (std::int32_t i = 0; i < 40; ++i) text.push_back((i * 37 + 11) % 256);
  std::vector<std::vector<float>> expected;
  for (const bool plan : {false, true}) {
    auto config = plain_config(2, 2);
    config.stage = 3;
    config.debug.plan_memory = plan;
    config.debug.poison_memory = plan;
    on_ranks(2, Gpt::spec(model, length), config, [&](Engine& engine) {
      const Gpt gpt(model);
      for (std::size_t end = 1; end <= text.size(); ++end) {
        const std::size_t count = std::min<std::size_t>(end, length);
        const auto logits = gpt.next_token_logits(engine, std::span(text).subspan(end - count, count));
        if (engine.runtime().rank() != 0) continue;
        if (!plan) {
          expected.push_back(logits);
        } else {
          EXPECT_EQ(logits, expected[end - 1]) << "window ending at " << end;
        }
      }
    });
  }
  EXPECT_NE(expected[30], expected[31]);
}

TEST(GptMeta, FullSizeModelRunsWithoutMemoryOrTokens) {
  auto config = plain_config(8);
  config.stage = 3;
  config.precision.compute = config.precision.communication = DataType::bfloat16;
  config.train_batch_size = 8 * 4;
  config.micro_batch_size = 8;
  const auto model = GptConfig::preset("gpt2-xl");
  std::int64_t peaks[2] = {0, 0};
  for (const bool checkpointing : {false, true}) {
    config.activation_checkpointing = checkpointing;
    config.vocabulary_chunk = checkpointing ? 8192 : 0;
    auto options = RuntimeOptions::from(config);
    options.device = DeviceKind::meta;
    Runtime runtime(options, [](const CommunicatorOptions& o) { return make_meta_communicator(1, 4, 4, o); });
    Config own = config;
    validate_config(own, 4);
    Engine engine(runtime, Gpt::spec(model, 1024), own);
    const std::vector<std::int64_t> samples(8, 0);
    const TokenBatch batch{
        {nullptr, DataType::int32, {8, 1024}}, {nullptr, DataType::int32, {8, 1024}}, samples};
    for (int step = 0; step < 3; ++step) {
      Gpt(model).forward_backward(engine, batch);
      EXPECT_TRUE(engine.step().applied);
    }
    engine.begin_evaluation();
    Gpt(model).evaluate(engine, batch);
    (void)engine.end_evaluation();
    peaks[checkpointing] = runtime.ledger().account(Tier::device).category_peak[Category::activations];
  }
  // Without checkpointing 12 * width elements of 2 bytes are saved per token and layer, and logits of 50257
  // in fp32 and bf16.
  const double tokens = 8 * 1024, saved = tokens * 48 * 2 * 12 * 1600, logits = tokens * 50257 * 6;
  EXPECT_GT(static_cast<double>(peaks[0]), saved);
  EXPECT_LT(static_cast<double>(peaks[0]), 1.1 * (saved + logits));
  EXPECT_LT(static_cast<double>(peaks[1]), 0.2 * saved) << "checkpointing and chunks keep a small part";
}

TEST(GptTraffic, UnitsAreGatheredTwiceAndReducedOnceAMicroBatch) {
  auto config = training_config(2, 2);
  config.stage = 3;
  for (const bool checkpointing : {false, true}) {
    config.activation_checkpointing = checkpointing;
    on_ranks(2, Gpt::spec(tiny_gpt(), time_steps), config, [&](Engine& engine) {
      TokenData data(time_steps, 61, false);
      for (int step = 0; step < 3; ++step) {
        for (int m = 0; m < 2; ++m) {
          data.draw(0, 2);
          Gpt(tiny_gpt()).forward_backward(engine, data.batch());
        }
        (void)engine.step();
      }
      std::int64_t padded = 0;
      for (const auto& unit : engine.model().units()) {
        std::int64_t elements = 0;
        for (const auto& tensor : unit.tensors) elements += round_up(tensor.shape.elements(), 64);
        padded += round_up(elements, 2 * 256);
      }
      // 3MP (N-1)/N: two gathers and a reduction of every unit in each of two micro-batches, on two ranks.
      EXPECT_EQ(engine.formula_traffic_elements(), 3 * 2 * padded / 2);
    });
  }
}

TEST(GptTraffic, GroupsThatAreRecomputedStayGatheredOrAreGatheredOnceMore) {
  auto model = tiny_gpt();
  model.layers = 7;
  int point = 0;
  for (const int ranks : {2, 3}) {
    for (const int every : {1, 2, 3, 4, 9}) {
      for (const int depth : {1, 2, 3, 8}) {
        if (!test::swept(point++)) continue;
        auto config = plain_config(ranks * 2, ranks);
        config.accumulation_steps = 2;
        config.micro_batch_size = 1;
        config.stage = 3;
        config.activation_checkpointing = true;
        config.checkpoint_every = every;
        config.depth = depth;
        // Groups of recomputed blocks begin with the first block. In a group larger than the depth all blocks
        // but the last are gathered a third time.
        std::int64_t again = 0;
        for (int first = 0; first < 7; first += every) {
          const int size = std::min(every, 7 - first);
          if (size > depth) again += size - 1;
        }
        on_ranks(ranks, Gpt::spec(model, time_steps), config, [&](Engine& engine) {
          TokenData data(time_steps, 61, false);
          for (int step = 0; step < 3; ++step) {
            for (int m = 0; m < 2; ++m) {
              data.draw(0, 1);
              Gpt(model).forward_backward(engine, data.batch());
            }
            (void)engine.step();
          }
          std::int64_t all = 0, block = 0;
          for (const auto& unit : engine.model().units()) {
            std::int64_t elements = 0;
            for (const auto& tensor : unit.tensors) elements += round_up(tensor.shape.elements(), 64);
            block = round_up(elements, ranks * 256);  // of the last unit, a block; all blocks are equal
            all += block;
          }
          const std::int64_t gathered = 2 * (2 * all + again * block), reduced = 2 * all;
          const std::int64_t sent = (gathered + reduced) / ranks * (ranks - 1);
          const std::string where = "ranks " + std::to_string(ranks) + " every " + std::to_string(every) +
                                    " depth " + std::to_string(depth);
          EXPECT_EQ(engine.formula_traffic_elements(), sent) << where;
          EXPECT_EQ(engine.runtime().shard().meter().counts(Traffic::data).at("all_gather").elements,
                    3 * (gathered / ranks * (ranks - 1)))
              << where;
          // The table at the start already contains it.
          const auto bytes = [&](std::int64_t elements) {
            return format_bytes(elements / ranks * (ranks - 1) * 4);
          };
          EXPECT_THAT(engine.summary(), ::testing::HasSubstr(bytes(reduced) + " gradients + " +
                                                             bytes(gathered) + " parameters"))
              << where;
          EXPECT_THAT(
              engine.summary(),
              ::testing::HasSubstr(every > depth ? "all units of a group but the last are gathered once more"
                                                 : "one gather serves recomputation"));
        });
      }
    }
  }
}

}  // namespace
}  // namespace tranche::models
