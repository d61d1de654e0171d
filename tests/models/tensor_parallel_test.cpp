// Models whose layers the axis `tensor` of a mesh cuts: losses, norms, gradients, evaluations and logits are
// near those of one rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "memory_checks.h"
#include "own_schedule.h"
#include "tensor_models.h"
#include "tests/core/rounds.h"
#include "tranche/comm/communicator.h"
#include "tranche/models/key_value_cache.h"
#include "tranche/models/llama.h"

namespace tranche::models {
namespace {

TEST(TensorParallelGpt, TwentyStepsHaveTheLossesOfOneRank) {
  const Gpt model(with_dropout(six_heads()));
  const auto one = train_model(1, model, config_of(1), 20, time_steps, true);
  EXPECT_LT(one.losses.back(), one.losses.front()) << "it learns";
  for (const int tensor : {2, 3}) {
    SCOPED_TRACE(tensor);
    expect_equal_runs(train_model(tensor, model, config_of(tensor), 20, time_steps, true), one);
  }
}

/// Four micro-batches of three samples a step, on one or two data ranks.
GptRun noisy_run(const LanguageModel& model, int shards, int tensor) {
  Config config = config_of(1);
  config.train_batch_size = 12;
  config.micro_batch_size = 3;
  config.accumulation_steps = 4 / shards;
  config.mesh = "shard=" + std::to_string(shards) + ", tensor=" + std::to_string(tensor);
  config.reduction = ReductionPolicy::micro_batch;
  config.stage = tensor % 4;
  config.gradient_noise_scale = true;
  config.gradient_noise_smoothing = 0.9;
  return train_model(shards * tensor, model, config, test::fewer(20), time_steps, true);
}

TEST(TensorParallelNoise, IsThatOfOneRank) {
  const auto compare = [](const LanguageModel& model, std::initializer_list<int> sizes) {
    const GptRun one = noisy_run(model, 1, 1);
    ASSERT_EQ(one.noise.size(), one.losses.size());
    double furthest = 0;
    for (const int shards : {1, 2}) {
      for (const int tensor : sizes) {
        const GptRun cut = noisy_run(model, shards, tensor);
        ASSERT_EQ(cut.noise.size(), one.noise.size());
        for (std::size_t step = 0; step < one.noise.size(); ++step) {
          const GradientNoise &found = cut.noise[step], &wanted = one.noise[step];
          // Both are differences of two sums of this magnitude.
          const double sum = one.norms[step] * one.norms[step];
          const double samples = 12;
          furthest = std::max({furthest, std::abs(found.variance - wanted.variance) / samples / sum,
                               std::abs(found.squares - wanted.squares) / sum});
          EXPECT_GT(wanted.variance / samples, 0.01 * sum) << "the noise is not next to nothing";
        }
      }
    }
    EXPECT_LE(furthest, 1e-5) << model.describe();
    std::printf("measured: %s: noise within %.1e of one rank's\n", model.describe().c_str(), furthest);
  };
  compare(Gpt(with_dropout(six_heads())), {2, 3});
  compare(Llama(eight_heads(LlamaKind::qwen3)), {2, 4});  // four ranks share two heads of keys and values
}

TEST(TensorParallelGpt, GradientsAreThoseOfOneRank) {
  const Gpt model(with_dropout(six_heads()));
  const auto one = train_model(1, model, config_of(1), 1, time_steps, true, DeviceKind::cpu, nullptr, true);
  for (const int tensor : {2, 3, 6}) {
    const auto cut =
        train_model(tensor, model, config_of(tensor), 1, time_steps, true, DeviceKind::cpu, nullptr, true);
    for (const auto& [name, gradient] : one.gradients) {
      const double size =
          std::sqrt(std::inner_product(gradient.begin(), gradient.end(), gradient.begin(), 0.0));
      double difference = 0;
      for (std::size_t i = 0; i < gradient.size(); ++i) {
        difference = std::max(difference, std::abs(cut.gradients.at(name)[i] - gradient[i]));
      }
      EXPECT_LE(difference, 1e-5 * size) << name << " on " << tensor << " ranks";
    }
  }
}

TEST(TensorParallelGpt, StagesShardsRecomputationAndChunksHaveTheSameLosses) {
  GptConfig config = with_dropout(six_heads());
  config.vocabulary = 9000;  // three blocks of the head, two on each rank
  const Gpt model(config);
  auto of_one = config_of(1);
  of_one.train_batch_size = of_one.micro_batch_size = 2 * batch;
  const auto one = train_model(1, model, of_one, 3, time_steps, true);
  for (const int stage : {0, 1, 2, 3}) {
    auto cut = config_of(2, 2, stage);
    cut.activation_checkpointing = stage == 3;
    cut.vocabulary_chunk = stage == 2 ? 4096 : 0;
    SCOPED_TRACE(stage);
    expect_equal_runs(train_model(4, model, cut, 3, time_steps, true), one);
  }
}

TEST(TensorParallelGpt, WeightGradientsThatWaitHaveTheSameBits) {
  const Gpt model(with_dropout(six_heads()));
  const auto gradients = [&](bool later) {
    reference_training::Tensors result;
    on_ranks(2, model.spec(time_steps), config_of(2), [&](Engine& engine) {
      TokenData data(time_steps, model.shape().vocabulary, true);
      data.draw(0, batch);
      if (later) {
        weights_last(model, engine, data.batch());
      } else {
        model.forward_backward(engine, data.batch());
      }
      auto read = read_all(engine, true);
      if (engine.runtime().rank() == 0) result = std::move(read);
    });
    return result;
  };
  EXPECT_EQ(gradients(true), gradients(false));
}

TEST(TensorParallelGpt, Bf16StaysAsNearAsBf16OfOneRank) {
  const Gpt model(six_heads());
  const auto fp32 = train_model(1, model, config_of(1), 20, time_steps, true);
  const auto narrow = [](Config config) {
    config.precision.compute = config.precision.communication = DataType::bfloat16;
    return config;
  };
  const auto one = train_model(1, model, narrow(config_of(1)), 20, time_steps, true);
  for (const int tensor : {2, 3}) {
    const auto cut = train_model(tensor, model, narrow(config_of(tensor)), 20, time_steps, true);
    EXPECT_LE(largest_relative_difference(cut.losses, one.losses),
              std::max(largest_relative_difference(one.losses, fp32.losses), 1e-3))
        << tensor;
  }
}

TEST(TensorParallelGpt, StagesOfAPipelineSendTheirRows) {
  const Gpt model(with_dropout(six_heads()));
  const auto losses = [&](int ranks, const std::string& mesh) {
    Config config = config_of(1);
    config.train_batch_size = 2 * batch;
    config.accumulation_steps = 2;
    config.mesh = mesh;
    std::vector<double> result;
    on_ranks(ranks, model.spec(time_steps), config, [&](Engine& engine) {
      std::vector<TokenData> data(2, TokenData(time_steps, model.shape().vocabulary, true));
      std::vector<double> mine;
      for (std::int64_t step = 0; step < 5; ++step) {
        train_step(model, engine, [&](std::int64_t m) {
          TokenData& place = data[static_cast<std::size_t>(m)];
          place.draw((2 * step + m) * batch, batch);
          return place.batch();
        });
        mine.push_back(engine.step().loss);
      }
      if (engine.runtime().rank() == 0) result = mine;
    });
    return result;
  };
  const auto one = losses(1, "");
  EXPECT_LE(largest_relative_difference(losses(4, "pipeline=2,tensor=2"), one), 1e-5);
  EXPECT_LE(largest_relative_difference(losses(6, "pipeline=2,tensor=3"), one), 1e-5);
}

TEST(TensorParallelGpt, AdaptersHaveTheLossesOfOneRank) {
  const Gpt model(with_dropout(six_heads()));
  const auto adapted = [](Config config) {
    config.lora = {.rank = 3, .alpha = 7, .targets = {"all-linear", "lm_head"}};
    return config;
  };
  const auto one = train_model(1, model, adapted(config_of(1)), 10, time_steps, true);
  auto still = adapted(config_of(1));
  still.optimizer.learning_rate = 0;
  EXPECT_GE(
      largest_relative_difference(train_model(1, model, still, 10, time_steps, true).losses, one.losses),
      1e-3)
      << "adapters have an effect";
  for (const int tensor : {2, 3}) {
    expect_equal_runs(train_model(tensor, model, adapted(config_of(tensor)), 10, time_steps, true), one);
  }
}

/// The configuration, with dimensions that tranche.layout leaves whole.
Config with_whole(Config config, const std::vector<std::string>& dimensions) {
  for (const std::string& dimension : dimensions) config.layout[dimension] = "whole";
  return config;
}

TEST(TensorParallelLayout, WholeDimensionsHaveTheLossesOfOneRank) {
  const Gpt gpt(with_dropout(six_heads()));
  const auto of_gpt = train_model(1, gpt, config_of(1), 5, time_steps, true);
  const Llama llama(eight_heads(LlamaKind::llama));
  const auto of_llama = train_model(1, llama, config_of(1), 5, time_steps, true);
  for (const std::vector<std::string>& whole :
       {std::vector<std::string>{"vocabulary"}, {"inner"}, {"inner", "vocabulary"}}) {
    SCOPED_TRACE(whole.front() + " and " + whole.back());
    for (const int tensor : {2, 3}) {
      expect_equal_runs(train_model(tensor, gpt, with_whole(config_of(tensor), whole), 5, time_steps, true),
                        of_gpt);
    }
    expect_equal_runs(train_model(4, llama, with_whole(config_of(4), whole), 5, time_steps, true), of_llama);
  }
}

TEST(TensorParallelLayout, WholeDimensionsGoWithStagesRecomputationChunksAndAdapters) {
  GptConfig config = with_dropout(six_heads());
  config.vocabulary = 9000;  // three blocks of the head, two on each rank
  const Gpt model(config);
  const auto variant = [](Config of, bool adapters, int stage) {
    of.activation_checkpointing = stage == 3;
    of.vocabulary_chunk = stage == 2 ? 4096 : 0;
    if (adapters) of.lora = {.rank = 3, .alpha = 7, .targets = {"all-linear", "lm_head"}};
    return of;
  };
  for (const bool adapters : {false, true}) {
    auto of_one = variant(config_of(1), adapters, 0);
    of_one.train_batch_size = of_one.micro_batch_size = 2 * batch;
    const auto one = train_model(1, model, of_one, 3, time_steps, true);
    for (const int stage : {0, 2, 3}) {
      SCOPED_TRACE(stage);
      const Config cut =
          with_whole(variant(config_of(2, 2, stage), adapters, stage), {"inner", "vocabulary"});
      expect_equal_runs(train_model(4, model, cut, 3, time_steps, true), one);
    }
  }
}

TEST(TensorParallelLayout, RanksHoldAndSendWhatTheLayoutSays) {
  const Gpt model(six_heads());
  const auto measured = [&](const std::vector<std::string>& whole, bool recompute) {
    std::pair<std::int64_t, std::int64_t> elements;  // elements of the table's part, and elements sent in a
                                                     // micro-batch
    Config config = with_whole(config_of(2), whole);
    config.activation_checkpointing = recompute;
    on_ranks(2, model.spec(time_steps), config, [&](Engine& engine) {
      TokenData data(time_steps, model.shape().vocabulary, true);
      data.draw(0, batch);
      const auto now = [&] { return engine.runtime().tensor()->meter().total(Traffic::data).elements; };
      const std::int64_t before = now();
      model.forward_backward(engine, data.batch());
      const std::int64_t sent = now() - before;
      (void)engine.step();
      const InferenceScope scope(engine);
      const std::int64_t held = engine.gather({0}).tensor(0).elements();
      if (engine.runtime().rank() == 0) elements = {held, sent};
    });
    return elements;
  };
  const std::int64_t rows = divide_round_up(batch * time_steps, std::int64_t{2}), width = 24,
                     table = 61 * width, part = 30 * width, numbers = 3 * batch * time_steps;
  const auto of_blocks = [&](std::int64_t messages) { return (2 * messages + 4) * rows * width + numbers; };
  EXPECT_EQ(measured({"vocabulary"}, false), std::pair(table, of_blocks(10)));
  EXPECT_EQ(measured({"inner"}, false), std::pair(part, of_blocks(5)));
  EXPECT_EQ(measured({"inner"}, true), std::pair(part, of_blocks(7)));
}

TEST(TensorParallelLlama, StagesOfAPipelineMakeTheirOwnGroupsOfSharedHeads) {
  const Llama model(eight_heads(LlamaKind::llama));
  const auto losses = [&](int ranks, const std::string& mesh) {
    Config config = config_of(1);
    config.mesh = mesh;
    std::vector<double> result;
    on_ranks(ranks, model.spec(time_steps), config, [&](Engine& engine) {
      TokenData data(time_steps, model.shape().vocabulary, true);
      std::vector<double> mine;
      for (std::int64_t step = 0; step < 3; ++step) {
        train_step(model, engine, [&](std::int64_t) {
          data.draw(step * batch, batch);
          return data.batch();
        });
        mine.push_back(engine.step().loss);
      }
      if (engine.runtime().rank() == 0) result = mine;
    });
    return result;
  };
  EXPECT_LE(largest_relative_difference(losses(8, "pipeline=2,tensor=4"), losses(1, "")), 1e-5);
}

TEST(TensorParallelGpt, AnErrorOfOneRankReachesTheOthers) {
  const Gpt model(six_heads());
  std::mutex mutex;
  std::vector<std::string> texts;
  on_ranks(2, model.spec(time_steps), config_of(2), [&](Engine& engine) {
    TokenData data(time_steps, model.shape().vocabulary, true);
    data.draw(0, batch);
    TokenBatch own = data.batch();
    const bool bad = engine.runtime().rank() == 1;
    if (bad) own.samples = own.samples.first(2);
    for (int call = 0; call < 2; ++call) {  // an engine that has ended reports the error again
      try {
        model.evaluate(engine, own);
      } catch (const Error& error) {
        const std::lock_guard lock(mutex);
        texts.push_back((bad ? "bad: " : "good: ") + std::string(error.what()));
      }
    }
  });
  EXPECT_THAT(texts, testing::Contains(testing::HasSubstr("bad: ")));
  EXPECT_THAT(texts, testing::Contains(
                         testing::AllOf(testing::HasSubstr("good: "),
                                        testing::HasSubstr("2 sample indices were given for 5 sequences"))));
}

/// The loss of an evaluation, and logits and greedy tokens with a cache and without.
struct Answers {
  double loss = 0;
  std::vector<float> logits;
  std::vector<std::int32_t> greedy;
};

Answers answers(int tensor, const LanguageModel& model, const std::vector<std::string>& whole = {}) {
  Answers result;
  std::mutex mutex;
  on_ranks(tensor, model.spec(time_steps), with_whole(config_of(tensor), whole), [&](Engine& engine) {
    Answers mine;
    TokenData data(time_steps, model.shape().vocabulary, true);
    engine.begin_evaluation();
    for (int i = 0; i < 2; ++i) {
      data.draw(7 * i, batch);
      model.evaluate(engine, data.batch());
    }
    mine.loss = engine.end_evaluation().loss;
    const std::vector<std::int32_t> prompt{5, 60, 0, 17, 23};
    mine.logits = model.next_token_logits(engine, prompt);
    KeyValueCache cache(engine, model, 2, 11);
    EXPECT_EQ(model.prefill(engine, cache, 0, prompt), mine.logits);
    (void)model.prefill(engine, cache, 1, std::vector<std::int32_t>{1, 2});
    std::vector<float> logits = mine.logits;
    for (int i = 0; i < 5; ++i) {
      const auto best = [&] {
        const auto end = logits.begin() + model.shape().vocabulary;
        return static_cast<std::int32_t>(std::max_element(logits.begin(), end) - logits.begin());
      }();
      mine.greedy.push_back(best);
      logits = model.decode(engine, cache, std::vector<std::int32_t>{best, 3});
    }
    const std::lock_guard lock(mutex);
    if (engine.runtime().rank() == 0) result = mine;
  });
  return result;
}

void expect_equal_answers(int tensor, const LanguageModel& model, const Answers& one,
                          const std::vector<std::string>& whole = {}) {
  const Answers cut = answers(tensor, model, whole);
  EXPECT_NEAR(cut.loss, one.loss, 1e-5 * one.loss) << tensor;
  ASSERT_EQ(cut.logits.size(), one.logits.size());
  for (std::size_t i = 0; i < one.logits.size(); ++i) EXPECT_NEAR(cut.logits[i], one.logits[i], 1e-5);
  EXPECT_EQ(cut.greedy, one.greedy);
}

TEST(TensorParallelGpt, EvaluationsLogitsAndGreedyTokensAreThoseOfOneRank) {
  const Gpt model(six_heads());
  const Answers one = answers(1, model);
  for (const int tensor : {2, 3, 6}) expect_equal_answers(tensor, model, one);
}

TEST(TensorParallelLayout, EvaluationsLogitsAndGreedyTokensAreThoseOfOneRank) {
  const Gpt gpt(six_heads());
  expect_equal_answers(3, gpt, answers(1, gpt), {"inner", "vocabulary"});
  const Llama llama(eight_heads(LlamaKind::qwen2));
  expect_equal_answers(4, llama, answers(1, llama), {"inner", "vocabulary"});
}

TEST(TensorParallelLlama, TwentyStepsHaveTheLossesOfOneRank) {
  for (const LlamaKind kind : {LlamaKind::llama, LlamaKind::qwen3}) {
    const Llama model(eight_heads(kind));
    const auto one = train_model(1, model, config_of(1), 20, time_steps, true);
    for (const int tensor : {2, 4, 8}) {
      SCOPED_TRACE(model.describe() + " on " + std::to_string(tensor));
      expect_equal_runs(train_model(tensor, model, config_of(tensor), 20, time_steps, true), one);
    }
  }
}

TEST(TensorParallelLlama, EveryArchitectureAndShards) {
  for (const LlamaKind kind : all_kinds) {
    const Llama model(eight_heads(kind));
    auto of_one = config_of(1);
    of_one.train_batch_size = of_one.micro_batch_size = 2 * batch;
    const auto one = train_model(1, model, of_one, 3, time_steps, true);
    for (const int stage : {1, 3}) {
      SCOPED_TRACE(model.describe() + " stage " + std::to_string(stage));
      expect_equal_runs(train_model(8, model, config_of(4, 2, stage), 3, time_steps, true), one);
    }
  }
}

TEST(TensorParallelLlama, EvaluationsLogitsAndGreedyTokensAreThoseOfOneRank) {
  const Llama model(eight_heads(LlamaKind::qwen2));
  const Answers one = answers(1, model);
  for (const int tensor : {2, 4, 8}) expect_equal_answers(tensor, model, one);
}

TEST(TensorParallelRefusals, SayWhichNumbersOfRanksCanShareTheHeads) {
  const auto refusal = [](int ranks, const LanguageModel& model) -> std::string {
    try {
      on_ranks(ranks, model.spec(time_steps), config_of(ranks), [](Engine&) {});
    } catch (const ConfigurationError& error) {
      return error.message();
    }
    return "accepted";
  };
  EXPECT_EQ(
      refusal(4, Gpt(six_heads())),
      "tranche.mesh \"tensor=4\": GPT2LMHeadModel has 6 heads, which 4 ranks cannot share; tensor can be 1, "
      "2, 3 or 6");
  LlamaConfig llama = eight_heads(LlamaKind::llama);
  llama.heads = 12;
  llama.key_value_heads = 4;
  EXPECT_EQ(
      refusal(6, Llama(llama)),
      "tranche.mesh \"tensor=6\": LlamaForCausalLM has 4 key and value heads, which 6 ranks cannot share; "
      "tensor can be 1, 2, 4 or 12");
}

TEST(TensorParallelRefusals, AVocabularyThatIsSmallerThanTheRanks) {
  GptConfig config = six_heads();
  config.vocabulary = 5;
  const Gpt model(config);
  // Ranks share the work of a table even if it is left whole.
  for (const std::vector<std::string>& whole : {std::vector<std::string>{}, {"vocabulary"}}) {
    std::string refusal = "accepted";
    try {
      on_ranks(6, model.spec(time_steps), with_whole(config_of(6), whole), [](Engine&) {});
    } catch (const ConfigurationError& error) {
      refusal = error.message();
    }
    EXPECT_EQ(
        refusal,
        "tranche.mesh \"tensor=6\": GPT2LMHeadModel has a dimension vocabulary of 5, which 6 ranks cannot "
        "share; tensor can be 1, 2 or 3");
  }
}

TEST(TensorParallelMemory, PlansHoldToTheByteOnEveryRank) {
  // Vocabulary and inner width are uneven, so that ranks hold different amounts.
  const auto gpt = [](const std::string& mesh, int ranks, int stage) {
    MemoryCase made{.model = with_dropout(six_heads()), .sequence = time_steps, .ranks = ranks, .config = {}};
    made.config.mesh = mesh;
    made.config.micro_batch_size = 5;
    made.config.accumulation_steps = 2;
    made.config.stage = stage;
    made.config.activation_checkpointing = stage == 3;
    return made;
  };
  std::vector<MemoryCase> cases{gpt("tensor=2", 2, 0), gpt("tensor=3", 3, 1), gpt("shard=2,tensor=3", 6, 2),
                                gpt("shard=2,tensor=2", 4, 3), gpt("replicate=2,tensor=2", 4, 0)};
  cases.push_back(gpt("shard=2,tensor=4", 8, 3));
  cases.back().llama = eight_heads(LlamaKind::llama);
  cases.push_back(gpt("tensor=4", 4, 1));
  cases.back().llama = eight_heads(LlamaKind::qwen3);
  cases.push_back(gpt("shard=2,tensor=3", 6, 2));
  cases.back().config = with_whole(cases.back().config, {"inner", "vocabulary"});
  for (MemoryCase& drawn : cases) {
    const std::vector<MemoryRun> runs = measure_case(drawn, 3, 2);
    for (drawn.rank = 0; drawn.rank < drawn.ranks; ++drawn.rank) {
      SCOPED_TRACE(drawn.to_string());
      const MemoryRun planned = plan_case(drawn, 3, 2);
      const MemoryRun& measured = runs[static_cast<std::size_t>(drawn.rank)];
      for (std::size_t tier = 0; tier < tier_count; ++tier) {
        expect_equal(planned.tiers[tier], measured.tiers[tier]);
      }
      EXPECT_EQ(planned.traffic, measured.traffic);
      EXPECT_EQ(planned.step.block, measured.step.block);
    }
  }
}

TEST(TensorParallelTraffic, IsTheFormulaOfRowsThatAreGatheredAndScattered) {
  // The elements that a rank sends in a micro-batch, with R rows per rank (docs/guides/tensor.md).
  const auto sent = [](int tensor, const LanguageModel& model, bool recompute) {
    std::int64_t elements = 0;
    Config config = config_of(tensor);
    config.activation_checkpointing = recompute;
    on_ranks(tensor, model.spec(time_steps), config, [&](Engine& engine) {
      TokenData data(time_steps, model.shape().vocabulary, true);
      data.draw(0, batch);
      const auto now = [&] { return engine.runtime().tensor()->meter().total(Traffic::data).elements; };
      const std::int64_t before = now();
      model.forward_backward(engine, data.batch());
      if (engine.runtime().rank() == 0) elements = now() - before;
      (void)engine.step();
    });
    return elements;
  };
  const Gpt gpt(six_heads());
  const Llama llama(eight_heads(LlamaKind::llama));
  for (const int tensor : {2, 3}) {
    const std::int64_t rows = divide_round_up(batch * time_steps, tensor), width = 24;
    // Every other rank receives these messages with the width of a row: 10 per block (13 with recomputation),
    // 2 for the embedding and 2 for the head, and 3 numbers of the softmax for each token of the micro-batch.
    const auto wanted = [&](std::int64_t of_block) {
      return (tensor - 1) * ((2 * of_block + 4) * rows * width + 3 * batch * time_steps);
    };
    EXPECT_EQ(sent(tensor, gpt, false), wanted(10)) << tensor;
    EXPECT_EQ(sent(tensor, gpt, true), wanted(13)) << tensor;
  }
  const std::int64_t rows = divide_round_up(batch * time_steps, std::int64_t{4}), width = llama.shape().width;
  EXPECT_EQ(sent(4, llama, false),
            3 * ((10 * llama.shape().layers + 4) * rows * width + 3 * batch * time_steps));
}

}  // namespace
}  // namespace tranche::models
