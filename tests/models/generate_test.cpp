#include "tranche/models/generate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <mutex>

#include "tests/models/tiny_llama.h"
#include "tests/models/training_fixture.h"
#include "tranche/core/error.h"
#include "tranche/models/llama.h"

namespace tranche::models {
namespace {

using models::Gpt;
using models::LanguageModel;
using models::Llama;
using models::LlamaKind;
using models::on_ranks;
using models::plain_config;
using testing::ElementsAre;
using testing::HasSubstr;

using Tokens = std::vector<std::int32_t>;
using Prompts = std::vector<Tokens>;

Prompts ragged_prompts() {
  return {{5, 17, 60}, {1}, {9, 9, 2, 4, 40, 3, 8}, {60, 0}, {33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43}};
}

Config config_of(DataType dtype, int ranks, int stage) {
  Config config = plain_config(ranks, ranks);
  config.precision.compute = config.precision.communication = dtype;
  config.stage = stage;
  return config;
}

/// The texts of rank 0, which are equal on all ranks.
std::vector<Tokens> generated(const LanguageModel& model, const Prompts& prompts,
                              const GenerationOptions& options, int ranks = 1, int stage = 0,
                              DataType dtype = DataType::float32) {
  std::vector<std::vector<Tokens>> all(static_cast<std::size_t>(ranks));
  on_ranks(ranks, model.spec(8), config_of(dtype, ranks, stage), [&](Engine& engine) {
    auto& mine = all[static_cast<std::size_t>(engine.runtime().rank())];
    for (const Generation& text : generate(engine, model, prompts, options)) {
      EXPECT_EQ(text.prompt, static_cast<std::int64_t>(mine.size()));
      mine.push_back(text.tokens);
    }
  });
  for (const auto& texts : all) EXPECT_EQ(texts, all.front());
  return all.front();
}

TEST(Generate, GreedyTextsAreThoseOfWholePasses) {
  std::vector<std::unique_ptr<LanguageModel>> all;
  all.push_back(std::make_unique<Gpt>(models::tiny_gpt()));
  for (const LlamaKind kind : models::all_kinds)
    all.push_back(std::make_unique<Llama>(models::tiny_llama(kind)));
  for (const auto& model : all) {
    for (const std::int64_t context : {0, 12}) {  // texts exceed both, and one prompt is longer than the last
      SCOPED_TRACE(model->describe() + ", context " + std::to_string(context));
      GenerationOptions options{.tokens = 24, .context = context, .sampling = {.temperature = 0}};
      std::vector<Tokens> wanted;
      on_ranks(1, model->spec(8), config_of(DataType::float32, 1, 0), [&](Engine& engine) {
        for (Tokens tokens : ragged_prompts()) {
          const std::size_t before = tokens.size();
          const auto most = static_cast<std::size_t>(context == 0 ? model->shape().positions : context);
          for (std::int64_t i = 0; i < options.tokens; ++i) {
            const auto logits = model->next_token_logits(
                engine, std::span<const std::int32_t>(tokens).last(std::min(tokens.size(), most)));
            tokens.push_back(
                static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
          }
          wanted.emplace_back(tokens.begin() + static_cast<std::ptrdiff_t>(before), tokens.end());
        }
      });
      EXPECT_EQ(generated(*model, ragged_prompts(), options), wanted);
      options.cache = false;
      EXPECT_EQ(generated(*model, ragged_prompts(), options), wanted);
    }
  }
}

TEST(Generate, DrawsDependOnSeedPromptAndPositionAlone) {
  const Llama model(models::tiny_llama(LlamaKind::qwen2));
  for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
    GenerationOptions options{.tokens = 20,
                              .sampling = {.temperature = 1, .top_k = 40, .top_p = 0.9, .seed = 5}};
    const std::vector<Tokens> wanted = generated(model, ragged_prompts(), options, 1, 0, dtype);
    for (const int ranks : {1, 2, 3, 7}) {  // with seven ranks two have no prompt
      for (const int stage : {0, 1, 2, 3}) {
        if (ranks == 7 && stage != 3) continue;
        EXPECT_EQ(generated(model, ragged_prompts(), options, ranks, stage, dtype), wanted)
            << ranks << " ranks, stage " << stage << ", " << name_of(dtype);
      }
    }
    for (const std::int64_t batch : {1, 2, 3}) {
      options.max_batch = batch;
      EXPECT_EQ(generated(model, ragged_prompts(), options, 1, 0, dtype), wanted) << batch << " at once";
    }
    const Prompts two{ragged_prompts()[0], ragged_prompts()[1]};
    EXPECT_THAT(generated(model, two, options, 1, 0, dtype), ElementsAre(wanted[0], wanted[1]));
    options.sampling.seed = 6;
    EXPECT_NE(generated(model, ragged_prompts(), options, 1, 0, dtype), wanted);
    options.sampling.seed = 5;
    const Prompts same(4, Tokens{7, 8});
    const std::vector<Tokens> each = generated(model, same, options, 1, 0, dtype);
    for (std::size_t i = 1; i < 4; ++i) EXPECT_NE(each[i], each[0]) << "the same prompt is drawn for anew";
  }
}

TEST(Generate, TextsEndEachByItself) {
  const Llama model(models::tiny_llama(LlamaKind::llama));
  GenerationOptions options{.tokens = 15, .sampling = {.temperature = 2, .seed = 3}};
  const std::vector<Tokens> whole = generated(model, ragged_prompts(), options);
  options.end_token = whole[1][4];
  // Text 3 ends after its second token; only its length ends text 0.
  for (const int ranks : {1, 2}) {
    std::vector<Generation> texts;
    std::mutex mutex;
    std::vector<std::int64_t> seen(5);
    on_ranks(ranks, model.spec(8), config_of(DataType::float32, ranks, 3), [&](Engine& engine) {
      GenerationOptions own = options;
      own.on_token = [&](std::int64_t prompt, std::int32_t) {
        const std::lock_guard lock(mutex);
        return ++seen[static_cast<std::size_t>(prompt)] == 2 && prompt == 3;
      };
      const auto mine = generate(engine, model, ragged_prompts(), own);
      const std::lock_guard lock(mutex);
      if (engine.runtime().rank() == 0) texts = mine;
    });
    ASSERT_EQ(texts.size(), 5u);
    for (std::size_t i = 0; i < 5; ++i) {
      Tokens wanted = whole[i];
      auto how = Generation::End::length;
      const auto at = std::find(wanted.begin(), wanted.end(), options.end_token);
      if (i == 3 && at - wanted.begin() >= 2) {
        wanted.resize(2);
        how = Generation::End::stopped;
      } else if (at != wanted.end()) {
        wanted.erase(at, wanted.end());
        how = Generation::End::end_token;
      }
      EXPECT_EQ(texts[i].tokens, wanted) << i;
      EXPECT_EQ(texts[i].end, how) << i;
      EXPECT_EQ(seen[i], static_cast<std::int64_t>(wanted.size())) << "each token is told once, on one rank";
    }
    EXPECT_EQ(texts[1].end, Generation::End::end_token);
  }
}

TEST(Generate, RoomIsTakenForTheTextsAndNotForTheMostTokens) {
  const Llama model(models::tiny_llama(LlamaKind::llama));
  const std::vector<Tokens> whole = generated(model, ragged_prompts(), {.tokens = 3});
  for (const int ranks : {1, 2}) {
    std::vector<Tokens> texts;
    on_ranks(ranks, model.spec(8), config_of(DataType::float32, ranks, 0), [&](Engine& engine) {
      GenerationOptions own{.tokens = std::numeric_limits<std::int64_t>::max()};
      std::vector<std::int64_t> seen(ragged_prompts().size());
      own.on_token = [&](std::int64_t prompt, std::int32_t) {
        return ++seen[static_cast<std::size_t>(prompt)] == 3;
      };
      for (const Generation& text : generate(engine, model, ragged_prompts(), own)) {
        if (engine.runtime().rank() == 0) texts.push_back(text.tokens);
      }
    });
    EXPECT_EQ(texts, whole) << ranks;
  }
}

TEST(Generate, RanksOfTheAxesTensorAndContextWriteTheTextsOfOneRankAndAskOnce) {
  const Llama model(models::tiny_llama(LlamaKind::llama));
  GenerationOptions options{.tokens = 12, .sampling = {.temperature = 0}};
  std::vector<Tokens> wanted = generated(model, ragged_prompts(), options);
  wanted[1].resize(3);  // on_token ends it
  struct Case {
    int ranks, data_ranks, stage;
    const char* mesh;
  };
  for (const Case& each :
       {Case{2, 1, 0, "tensor=2"}, Case{4, 2, 3, "shard=2,tensor=2"}, Case{2, 1, 0, "context=2"},
        Case{4, 1, 3, "context=2,tensor=2"}, Case{8, 2, 1, "shard=2,pipeline=2,context=2"}}) {
    Config config = config_of(DataType::float32, each.data_ranks, each.stage);
    config.mesh = each.mesh;
    std::mutex mutex;
    std::vector<Tokens> told(wanted.size());
    on_ranks(each.ranks, model.spec(8), config, [&](Engine& engine) {
      GenerationOptions own = options;
      own.on_token = [&](std::int64_t prompt, std::int32_t token) {
        const std::lock_guard lock(mutex);
        Tokens& text = told[static_cast<std::size_t>(prompt)];
        text.push_back(token);
        return prompt == 1 && text.size() == 3;
      };
      std::vector<Tokens> mine;
      for (const Generation& text : generate(engine, model, ragged_prompts(), own))
        mine.push_back(text.tokens);
      EXPECT_EQ(mine, wanted) << each.mesh;
    });
    EXPECT_EQ(told, wanted) << each.mesh;
  }
}

TEST(Generate, AnyOfSeveralTokensEndsAText) {
  const Llama model(models::tiny_llama(LlamaKind::llama));
  GenerationOptions options{.tokens = 15, .sampling = {.temperature = 2, .seed = 3}};
  const std::vector<Tokens> whole = generated(model, ragged_prompts(), options);
  options.end_tokens = {whole[1][4], whole[0][2]};
  const std::vector<Tokens> texts = generated(model, ragged_prompts(), options, 2, 3);
  for (std::size_t i = 0; i < whole.size(); ++i) {
    const auto end = std::find_first_of(whole[i].begin(), whole[i].end(), options.end_tokens.begin(),
                                        options.end_tokens.end());
    EXPECT_EQ(texts[i], Tokens(whole[i].begin(), end)) << i;
  }
  EXPECT_LE(texts[0].size(), 2u);
}

TEST(Generate, LogitsThatAreNotFiniteNameTheWeight) {
  const Gpt model(models::tiny_gpt());
  const float infinity = std::numeric_limits<float>::infinity();
  const auto refusals = [&](int ranks, const std::string& tensor, std::size_t element, float value,
                            bool cache) {
    std::vector<std::string> told(static_cast<std::size_t>(ranks));
    on_ranks(ranks, model.spec(8), config_of(DataType::float32, ranks, 3), [&](Engine& engine) {
      std::vector<float> weight = engine.read_weight(tensor);
      weight[element] = value;
      engine.write_weight(tensor, weight);
      try {
        // The position is that of the last token of one prompt only.
        (void)generate(engine, model, Prompts{{1, 2}, {1, 2, 3, 4, 5}, {3}}, {.tokens = 2, .cache = cache});
      } catch (const NumericalError& error) {
        told[static_cast<std::size_t>(engine.runtime().rank())] = error.message();
      }
    });
    return told;
  };
  for (const int ranks : {1, 2}) {
    for (const bool cache : {true, false}) {
      // Only one rank has these logits, and all ranks report it.
      for (const std::string& text : refusals(ranks, "transformer.wpe.weight", 4 * 24, infinity, cache)) {
        EXPECT_EQ(
            text,
            "generate: the logits behind prompt 2 are not finite; the first weight that is not finite is "
            "element 96 of transformer.wpe.weight (inf)");
      }
      for (const std::string& text : refusals(ranks, "transformer.ln_f.weight", 3, 3e38f, cache)) {
        EXPECT_THAT(text, HasSubstr("all weights are finite, so that a number on the way was too large"));
      }
    }
  }
}

TEST(Generate, OnlyWritableTokensAreDrawn) {
  const Gpt model(models::tiny_gpt());
  const GenerationOptions options{.tokens = 30, .sampling = {.temperature = 9}, .writable = 10};
  for (const Tokens& text : generated(model, ragged_prompts(), options)) {
    EXPECT_LT(*std::max_element(text.begin(), text.end()), 10);
  }
}

TEST(Generate, TheCacheIsAsLargeAsTheTextsNeed) {
  const Gpt model(models::tiny_gpt());
  for (const std::int64_t tokens : {3, 100}) {
    on_ranks(1, model.spec(8), config_of(DataType::float32, 1, 0), [&](Engine& engine) {
      const auto held = [&] {
        return engine.runtime().ledger().account(Tier::device).persistent[Category::activations];
      };
      const std::int64_t before = held();
      std::int64_t within = 0;
      GenerationOptions options{.tokens = tokens, .max_batch = 2};
      options.on_token = [&](std::int64_t, std::int32_t) {
        within = held();
        return false;
      };
      (void)generate(engine, model, ragged_prompts(), options);
      // The longest prompt has 11 tokens, and the model 16 positions. Keys and values are those of 2 layers
      // and 2 rows.
      EXPECT_EQ(within - before, aligned_bytes(2 * 2 * 2 * (tokens == 3 ? 13 : 16) * 24 * 4));
      EXPECT_EQ(held(), before);
    });
  }
}

TEST(Generate, RefusesWhatItCannotDo) {
  const Gpt model(models::tiny_gpt());
  on_ranks(1, model.spec(8), config_of(DataType::float32, 1, 0), [&](Engine& engine) {
    const auto refusal = [&](const Prompts& prompts, const GenerationOptions& options) -> std::string {
      try {
        (void)generate(engine, model, prompts, options);
      } catch (const InvalidArgument& error) {
        return error.message();
      }
      return "accepted";
    };
    EXPECT_EQ(refusal({}, {}), "accepted");
    EXPECT_EQ(refusal({{1}, {}}, {}), "generate: prompt 1 has no tokens; give it at least one");
    EXPECT_EQ(refusal({{1}, {2, 61}}, {}), "generate: token 61 of prompt 1 is not in the vocabulary of 61");
    EXPECT_EQ(refusal({{-1}}, {}), "generate: token -1 of prompt 0 is not in the vocabulary of 61");
    EXPECT_EQ(refusal({{1}}, {.tokens = 0}), "generate: 0 tokens were asked for; ask for at least one");
    EXPECT_EQ(refusal({{1}}, {.context = 17}),
              "generate: a context of 17 tokens was asked for; the model has 16 positions (0: all of them)");
    EXPECT_EQ(refusal({{1}}, {.max_batch = 0}), "generate: max_batch is 0, wanted at least 1");
    EXPECT_EQ(refusal({{1}}, {.writable = 62}),
              "generate: writable is 62, wanted up to the vocabulary of 61 (0: all of it)");
  });
  std::string text;
  on_ranks(2, model.spec(8), config_of(DataType::float32, 2, 0), [&](Engine& engine) {
    const std::int32_t token = engine.runtime().rank() == 0 ? 4 : 5;
    try {
      (void)generate(engine, model, Prompts{{token}}, {});
    } catch (const InvalidArgument& error) {
      if (token == 5) text = error.message();
    }
  });
  EXPECT_EQ(text, "generate: ranks were given different prompts or options");
}

}  // namespace
}  // namespace tranche::models
