// Compares the cached keys and values of generation with passes over the whole text.
#include "tranche/models/key_value_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/models/tiny_llama.h"
#include "tests/models/training_fixture.h"
#include "tranche/core/error.h"
#include "tranche/models/llama.h"

namespace tranche::models {
namespace {

using testing::HasSubstr;

using Tokens = std::vector<std::int32_t>;
using Logits = std::vector<float>;

std::vector<std::unique_ptr<LanguageModel>> all_models() {
  std::vector<std::unique_ptr<LanguageModel>> models;
  models.push_back(std::make_unique<Gpt>(tiny_gpt()));
  for (const LlamaKind kind : all_kinds) models.push_back(std::make_unique<Llama>(tiny_llama(kind)));
  LlamaConfig many_queries = tiny_llama(LlamaKind::llama);
  many_queries.key_value_heads = 1;
  models.push_back(std::make_unique<Llama>(many_queries));
  return models;
}

Config config_of(DataType dtype, int ranks = 1) {
  Config config = plain_config(ranks, ranks);
  config.precision.compute = config.precision.communication = dtype;
  config.loss_scaling = dtype == DataType::float16;
  return config;
}

Tokens some_tokens(std::size_t count, std::int32_t seed) {
  Tokens tokens;
  for (std::size_t i = 0; i < count; ++i) {
    tokens.push_back((static_cast<std::int32_t>(i * i) * 7 + 13 * seed + 5) % 61);
  }
  return tokens;
}

std::span<const float> row_of(const Logits& logits, std::int64_t row, std::int64_t vocabulary) {
  return std::span(logits).subspan(static_cast<std::size_t>(row * vocabulary),
                                   static_cast<std::size_t>(vocabulary));
}

/// The largest difference, relative to the largest number.
double difference(std::span<const float> a, std::span<const float> b) {
  double most = 0, largest = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    most = std::max<double>(most, std::abs(a[i] - b[i]));
    largest = std::max<double>(largest, std::abs(b[i]));
    if (std::isnan(a[i])) return INFINITY;
  }
  return most / largest;
}

TEST(KeyValueCache, GivesTheLogitsOfTheWholeText) {
  for (const auto& model : all_models()) {
    const std::int64_t vocabulary = model->shape().vocabulary;
    for (const DataType dtype : {DataType::float32, DataType::bfloat16, DataType::float16}) {
      // The error is a few roundings of the dtype in each layer.
      const double tolerance = dtype == DataType::float32 ? 1e-5 : dtype == DataType::bfloat16 ? 0.05 : 0.008;
      on_ranks(1, model->spec(8), config_of(dtype), [&](Engine& engine) {
        const Tokens tokens = some_tokens(16, 1);
        KeyValueCache cache(engine, *model, 2, 16);
        for (const std::size_t prompt : {std::size_t{1}, std::size_t{7}, std::size_t{16}}) {
          SCOPED_TRACE(model->describe() + ", " + std::string(name_of(dtype)) + ", prompt of " +
                       std::to_string(prompt));
          const Tokens beginning(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(prompt));
          EXPECT_EQ(model->prefill(engine, cache, 1, beginning), model->next_token_logits(engine, beginning));
          for (std::size_t length = prompt; length < tokens.size(); ++length) {
            const Logits logits = model->decode(engine, cache, Tokens{-1, tokens[length]});
            const Logits whole = model->next_token_logits(engine, std::span(tokens).first(length + 1));
            EXPECT_LE(difference(row_of(logits, 1, vocabulary), whole), tolerance) << length;
          }
          EXPECT_EQ(cache.length(1), 16);
          EXPECT_EQ(cache.length(0), 0) << "which rested";
        }
      });
    }
  }
}

void expect_rows_as_alone(const LanguageModel& model, DataType dtype, bool adapters) {
  SCOPED_TRACE(model.describe() + ", " + std::string(name_of(dtype)) + (adapters ? ", with adapters" : ""));
  const std::int64_t vocabulary = model.shape().vocabulary;
  Config config = config_of(dtype);
  if (adapters) config.lora = {.rank = 3, .alpha = 7, .targets = {"*"}};  // the head too
  on_ranks(1, model.spec(8), config, [&](Engine& engine) {
    write_adapters(engine);
    constexpr std::int64_t rows = 7;
    const auto text = [](std::int64_t row) {
      return some_tokens(static_cast<std::size_t>(1 + 2 * row % 5), static_cast<std::int32_t>(row));
    };
    const auto next = [](std::int64_t row, int step) {
      return static_cast<std::int32_t>((row * 5 + step * 11) % 61);
    };
    KeyValueCache cache(engine, model, rows, 12), alone(engine, model, 1, 16);
    for (std::int64_t row = 0; row < rows; ++row) (void)model.prefill(engine, cache, row, text(row));
    std::vector<Logits> together;
    for (int step = 0; step < 5; ++step) {
      Tokens tokens;
      for (std::int64_t row = 0; row < rows; ++row) {
        tokens.push_back(row == step ? -1 : next(row, step));  // each of the first rows pauses once
      }
      together.push_back(model.decode(engine, cache, tokens));
    }
    for (std::int64_t row = 0; row < rows; ++row) {
      (void)model.prefill(engine, alone, 0, text(row));
      for (int step = 0; step < 5; ++step) {
        if (row == step) continue;
        const Logits logits = model.decode(engine, alone, Tokens{next(row, step)});
        const auto found = row_of(together[static_cast<std::size_t>(step)], row, vocabulary);
        EXPECT_TRUE(std::equal(found.begin(), found.end(), logits.begin()))
            << "row " << row << ", step " << step;
      }
    }
  });
}

TEST(KeyValueCache, ARowsLogitsAreThoseItHasAlone) {
  for (const auto& model : all_models()) {
    for (const DataType dtype : {DataType::float32, DataType::bfloat16, DataType::float16}) {
      for (const bool adapters : {false, true}) expect_rows_as_alone(*model, dtype, adapters);
    }
  }
}

TEST(KeyValueCache, StagesAndRanksGiveTheSameBits) {
  const Llama model(tiny_llama(LlamaKind::qwen3));
  for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
    Logits expected;
    for (const int ranks : {1, 2, 3}) {
      for (const int stage : {0, 1, 2, 3}) {
        Config config = config_of(dtype, ranks);
        config.stage = stage;
        on_ranks(ranks, model.spec(8), config, [&](Engine& engine) {
          // The last rank computes nothing, but takes part in gathers.
          const bool idle = ranks > 1 && engine.runtime().rank() == ranks - 1;
          KeyValueCache cache(engine, model, 1, 16);
          Logits logits;
          if (idle) {
            model.gather_for_others(engine);
          } else {
            (void)model.prefill(engine, cache, 0, some_tokens(5, 2));
          }
          for (std::int32_t step = 0; step < 6; ++step) {
            if (idle) {
              model.gather_for_others(engine);
            } else {
              logits = model.decode(engine, cache, Tokens{step * 9});
            }
          }
          if (engine.runtime().rank() != 0) return;
          if (expected.empty()) expected = logits;
          EXPECT_EQ(logits, expected) << ranks << " ranks, stage " << stage << ", " << name_of(dtype);
        });
      }
    }
  }
}

TEST(KeyValueCache, IsInTheLedgerAndItsPassesRepeatTheirMemory) {
  const Gpt model(tiny_gpt());
  on_ranks(1, model.spec(8), config_of(DataType::bfloat16), [&](Engine& engine) {
    Runtime& runtime = engine.runtime();
    const std::int64_t before = runtime.ledger().account(Tier::device).persistent[Category::activations];
    const std::int64_t bytes = KeyValueCache::bytes(model, DataType::bfloat16, 3, 10);
    EXPECT_EQ(bytes, 2 * 2 * 3 * 10 * 24 * 2) << "keys and values of two layers";
    {
      KeyValueCache cache(engine, model, 3, 10);
      EXPECT_EQ(runtime.ledger().account(Tier::device).persistent[Category::activations],
                before + aligned_bytes(bytes));
      for (std::int64_t row = 0; row < 3; ++row) (void)model.prefill(engine, cache, row, some_tokens(3, 1));
      std::int64_t calls = 0;
      for (int step = 0; step < 6; ++step) {
        if (step == 2) calls = runtime.memory_calls();
        (void)model.decode(engine, cache, Tokens{1, step < 4 ? 2 : -1, 3});
      }
      EXPECT_EQ(runtime.memory_calls(), calls) << "from the third pass on";
    }
    EXPECT_EQ(runtime.ledger().account(Tier::device).persistent[Category::activations], before);
  });
}

TEST(KeyValueCache, NothingIsComputedOnMeta) {
  const Llama model(tiny_llama(LlamaKind::mistral));
  on_ranks(
      1, model.spec(8), config_of(DataType::bfloat16),
      [&](Engine& engine) {
        KeyValueCache cache(engine, model, 2, 16);
        EXPECT_EQ(model.prefill(engine, cache, 0, some_tokens(5, 2)), Logits(61));
        const double before = engine.compute_stream().work().floating_point_operations;
        EXPECT_EQ(model.decode(engine, cache, Tokens{3, -1}), Logits(2 * 61));
        EXPECT_GT(engine.compute_stream().work().floating_point_operations, before);
      },
      DeviceKind::meta);
}

template <class Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.message();
  }
  return "accepted";
}

/// A GPT without support for a cache, as a user's model may be.
class Forgetful final : public LanguageModel {
 public:
  std::string architecture() const override { return "Forgetful"; }
  ModelShape shape() const override { return gpt_.shape(); }
  std::string to_json() const override { return "{}"; }
  std::string describe() const override { return "Forgetful"; }
  double block_operations(std::int64_t sequence) const override { return gpt_.block_operations(sequence); }
  double skipped_operations() const override { return gpt_.skipped_operations(); }
  UnitSpec embedding_unit() const override { return gpt_.embedding_unit(); }
  UnitSpec block_unit(std::int64_t block) const override { return gpt_.block_unit(block); }
  void embedding_forward(const Pass& pass, const GatheredUnit& unit, const ConstTensorView& tokens,
                         const TensorView& out) const override {
    gpt_.embedding_forward(pass, unit, tokens, out);
  }
  void embedding_backward(const Pass&, const UnitGradients&, const ConstTensorView&,
                          const TensorView&) const override {}
  StepTensors acquire_block_activations(const Pass& pass) const override {
    return gpt_.acquire_block_activations(pass);
  }
  void block_forward(const Pass& pass, std::int64_t block, const GatheredUnit& unit,
                     const ConstTensorView& input, const StepTensors& activations,
                     const TensorView* output) const override {
    gpt_.block_forward(pass, block, unit, input, activations, output);
  }
  void block_backward(const Pass&, std::int64_t, const GatheredUnit&, WeightGradients&,
                      const ConstTensorView&, const StepTensors&, const TensorView&) const override {}
  void final_norm_forward(const Pass& pass, const GatheredUnit& unit, const ConstTensorView& x,
                          const FinalNorm& norm) const override {
    gpt_.final_norm_forward(pass, unit, x, norm);
  }
  void final_norm_backward(const Pass&, const GatheredUnit&, const UnitGradients&, const TensorView&,
                           const ConstTensorView&, const FinalNorm&, const TensorView&) const override {}

 private:
  Gpt gpt_{tiny_gpt()};
};

TEST(KeyValueCache, SaysWhatItCannotDo) {
  const Gpt model(tiny_gpt());
  on_ranks(1, model.spec(8), config_of(DataType::float32), [&](Engine& engine) {
    EXPECT_FALSE(Forgetful().has_cache());
    EXPECT_THAT(refusal([&] { KeyValueCache(engine, Forgetful(), 1, 4); }),
                HasSubstr("Forgetful keeps no keys and values, so that there is no cache for it: it does not "
                          "override cache_heads()"));
    EXPECT_THAT(
        refusal([&] { KeyValueCache(engine, model, 0, 4); }),
        HasSubstr("a key-value cache of 0 rows of 4 tokens was asked for, wanted at least one row of 1 "
                  "to 16 tokens"));
    EXPECT_THAT(refusal([&] { KeyValueCache(engine, model, 1, 17); }), HasSubstr("of 1 rows of 17 tokens"));
    KeyValueCache cache(engine, model, 2, 4);
    EXPECT_THAT(refusal([&] { (void)model.decode(engine, cache, Tokens{1}); }),
                HasSubstr("1 tokens were given for the 2 rows of a key-value cache"));
    EXPECT_THAT(refusal([&] {
                  (void)model.decode(engine, cache, Tokens{1, -1});
                }),
                HasSubstr("row 0 of a key-value cache cannot take another token: it has 0 of 4; fill it with "
                          "prefill()"));
    EXPECT_THAT(refusal([&] { (void)model.prefill(engine, cache, 1, some_tokens(5, 1)); }),
                HasSubstr("row 1 of a key-value cache cannot have 5 tokens: it has room for 4"));
    EXPECT_THAT(refusal([&] {
                  (void)model.prefill(engine, cache, 1, Tokens{3, 61});
                }),
                HasSubstr("token 61 is not in the vocabulary of 61"));
    EXPECT_EQ(cache.length(1), 0);
    (void)model.prefill(engine, cache, 1, some_tokens(4, 1));
    EXPECT_THAT(refusal([&] {
                  (void)model.decode(engine, cache, Tokens{-1, 1});
                }),
                HasSubstr("it has 4 of 4; let it rest and compute the text anew"));
    cache.set_length(1, 2);  // drops the last two
    EXPECT_THAT(refusal([&] {
                  (void)model.decode(engine, cache, Tokens{-1, 61});
                }),
                HasSubstr("token 61 is not in the vocabulary of 61"));
    EXPECT_EQ(refusal([&] { (void)model.decode(engine, cache, Tokens{-1, 1}); }), "accepted");
  });
}

TEST(KeyValueCache, MemoryThatIsNotThereIsNamed) {
  const Gpt model(tiny_gpt());
  run_thread_ranks(1, [&](int, const CommunicatorFactory& factory) {
    Config config = config_of(DataType::float32);
    validate_config(config, 1);
    RuntimeOptions options = RuntimeOptions::from(config);
    options.device_memory_limit = 64 << 20;
    Runtime runtime(options, factory);
    Engine engine(runtime, model.spec(8), config);
    EXPECT_THAT(refusal([&] { KeyValueCache(engine, model, 100000, 16); }),
                testing::AllOf(HasSubstr("key-value cache"), HasSubstr("64.00 MiB")));
    EXPECT_EQ(model.next_token_logits(engine, Tokens{1}).size(), 61u) << "the engine goes on";
  });
}

}  // namespace
}  // namespace tranche::models
