// Sequences that are no multiple of twice the ranks of `context`: padded, with the losses of one rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "context_models.h"
#include "tranche/kernels/cross_entropy.h"
#include "tranche/models/llama.h"

namespace tranche::models {
namespace {

constexpr int padded_steps = 20;

/// Losses of a mesh, whose exchange has a name.
struct PaddedCase {
  int ranks;
  const char* mesh;
  ContextExchange exchange = ContextExchange::gather;
};
constexpr auto by_heads = ContextExchange::ulysses;

/// Each case has the losses of one rank, and of an evaluation.
void expect_losses_of_one_rank(const LanguageModel& model, const Config& config, const ContextRun& run,
                               const std::vector<PaddedCase>& cases) {
  const std::vector<double> one = losses_of(1, model, config, run);
  ASSERT_LT(one[static_cast<std::size_t>(run.steps) - 1], one.front()) << "it learns";
  for (const PaddedCase& of : cases) {
    Config cut = config;
    cut.mesh = of.mesh;
    cut.context_exchange = of.exchange;
    EXPECT_LE(largest_relative_difference(losses_of(of.ranks, model, cut, run), one), 1e-5)
        << model.architecture() << " on " << of.mesh << ", " << name_of(of.exchange);
  }
}

// With 16 tokens the table of positions is full, and the last token is the first of a run of three tokens.
// With 13 tokens some of four or eight ranks have a run without tokens.
TEST(ContextPadding, LossesAreThoseOfOneRankWithDropout) {
  const Gpt model(with_dropout(six_heads()));
  expect_losses_of_one_rank(model, config_of(1), {.time = 16, .steps = padded_steps},
                            {{3, "context=3"}, {3, "context=3", by_heads}});
  expect_losses_of_one_rank(model, config_of(1), {.time = 13, .steps = padded_steps},
                            {{2, "context=2", by_heads}, {4, "context=4"}});
  expect_losses_of_one_rank(model, config_of(1), {.time = 9, .steps = padded_steps}, {{4, "context=4"}});
}

TEST(ContextPadding, DocumentsHaveTheLossesOfOneRank) {
  for (const LlamaKind kind : {LlamaKind::mistral, LlamaKind::qwen3}) {
    LlamaConfig config = eight_heads(kind);
    config.key_value_heads = 4;
    expect_losses_of_one_rank(
        Llama(config), config_of(1), {.time = 30, .steps = 10, .documents = true},
        {{2, "context=2"}, {4, "context=4"}, {2, "context=2", by_heads}, {4, "context=4", by_heads}});
  }
}

TEST(ContextPadding, LengthsMayChangeAndBeShorterThanTwiceTheRanks) {
  Config config = config_of(1);
  config.accumulation_steps = 4;
  config.train_batch_size = 4 * batch;
  const ContextRun run{.time = 16, .steps = 5, .lengths = {16, 11, 6, 3, 13}};
  expect_losses_of_one_rank(Gpt(with_dropout(six_heads())), config, run,
                            {{2, "context=2"},
                             {4, "context=4"},
                             {3, "context=3", by_heads},
                             {4, "pipeline=2, context=2", by_heads},
                             {6, "context=2, tensor=3"}});
}

TEST(ContextPadding, GoesBesideEveryAxisRecomputationAndAdapters) {
  Config config = config_of(1);
  config.train_batch_size = 8;
  config.micro_batch_size = 2;
  config.accumulation_steps = 4;
  config.activation_checkpointing = true;
  config.lora = {.rank = 3, .alpha = 7, .dropout = 0.1f, .targets = {"all-linear", "lm_head"}};
  config.optimizer.learning_rate = 1e-2;
  const Gpt model(with_dropout(six_heads()));
  const ContextRun run{.time = 14, .steps = 5};
  const std::vector<double> one = losses_of(1, model, config, run);
  int stage = 0;
  for (const auto& [ranks, data_ranks, mesh] :
       {std::tuple(4, 2, "shard=2, context=2"), std::tuple(4, 2, "replicate=2, context=2"),
        std::tuple(4, 1, "context=2, tensor=2"), std::tuple(8, 2, "pipeline=2, shard=2, context=2")}) {
    Config cut = config;
    cut.mesh = mesh;
    cut.stage = stage++;
    cut.accumulation_steps = 4 / data_ranks;
    EXPECT_LE(largest_relative_difference(losses_of(ranks, model, cut, run), one), 1e-5) << mesh;
  }
}

/// Calls `body` with the pass of each rank, which has 2 samples of `time` tokens.
template <typename Body>
void on_padded_context(int ranks, std::int64_t time, const Body& body) {
  const Gpt model(tiny_gpt());
  Config config = plain_config(2);
  config.mesh = "context=" + std::to_string(ranks);
  on_ranks(ranks, model.spec(16), config, [&](Engine& engine) {
    TokenData data(time, 61, false);
    data.draw(5, 2);
    const InferenceScope scope(engine);
    body(data, model.pass_of(engine, data.batch(), true));
  });
}

// 9 tokens in 8 runs of 2: the fifth run has one, and the last three have none.
TEST(ContextPadding, PaddingHasTokenZeroAndNoTarget) {
  on_padded_context(4, 9, [](const TokenData& data, Pass pass) {
    EXPECT_EQ(pass.time, 2);
    EXPECT_TRUE(pass.padded());
    const LocalBatch local(pass, data.batch());
    pass.engine.compute_stream().synchronize();
    for (int run = 0; run < 2; ++run) {
      const std::int64_t first = pass.first_of_run(run);
      EXPECT_EQ(pass.tokens_of_run(run), first < 8 ? 2 : first == 8 ? 1 : 0);
      for (std::int64_t sample = 0; sample < 2; ++sample) {
        for (std::int64_t t = 0; t < 2; ++t) {
          const std::int64_t row = (run * 2 + sample) * 2 + t;
          const bool padding = first + t >= 9;
          const auto at = static_cast<std::size_t>(sample * 9 + first + t);
          EXPECT_EQ(local.tokens().as<std::int32_t>()[row], padding ? 0 : data.tokens.at(at));
          EXPECT_EQ(local.targets().as<std::int32_t>()[row],
                    padding ? kernels::ignored_label : data.targets.at(at));
        }
      }
    }
  });
}

TEST(ContextPadding, PartsOfRunsAreTheRowsWithoutPadding) {
  on_padded_context(4, 9, [](const TokenData&, const Pass& pass) {
    std::vector<float> rows(static_cast<std::size_t>(pass.rows()) * 3, 1.0f);
    const TensorView view{rows.data(), DataType::float32, {pass.batch, pass.time, 3}};
    std::int64_t tokens = 0;
    for (const RunPart& part : parts_of_runs(pass)) {
      const TensorView of_part = rows_of_part(pass, view, part);
      EXPECT_EQ(of_part.shape, Shape({part.samples, part.tokens, 3}));
      for (std::int64_t i = 0; i < of_part.elements(); ++i) of_part.as<float>()[i] += 1;
      tokens += part.samples * part.tokens;
    }
    EXPECT_EQ(tokens, 2 * (pass.tokens_of_run(0) + pass.tokens_of_run(1)));
    clear_padding(pass, view);
    pass.engine.compute_stream().synchronize();
    for (std::int64_t row = 0; row < pass.rows(); ++row) {
      const bool padding = row % pass.time >= pass.tokens_of_run(static_cast<int>(row / pass.time / 2));
      EXPECT_EQ(rows[static_cast<std::size_t>(3 * row)], padding ? 0 : 2) << row;
    }
  });
  on_padded_context(4, 16, [](const TokenData&, const Pass& pass) {
    EXPECT_FALSE(pass.padded());
    EXPECT_EQ(parts_of_runs(pass).size(), 2U) << "a run of all samples";
  });
}

}  // namespace
}  // namespace tranche::models
