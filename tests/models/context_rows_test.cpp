#include "tranche/models/context_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "training_fixture.h"
#include "tranche/comm/communicator.h"

namespace tranche::models {
namespace {

/// A pass of 2 samples of 16 tokens with `ranks` ranks on the axis `context` and `tensor` on the axis
/// `tensor`.
template <typename Body>
void on_context(int ranks, int tensor, const Body& body) {
  Config config = plain_config(2);
  if (ranks > 1) config.mesh = "context=" + std::to_string(ranks) + ",tensor=" + std::to_string(tensor);
  GptConfig model = tiny_gpt();
  model.heads = 12;
  model.width = 24;
  on_ranks(ranks * tensor, Gpt::spec(model, 16), config, [&](Engine& engine) {
    TokenData data(16, model.vocabulary, false);
    data.draw(5, 2);
    const InferenceScope scope(engine);
    body(data, Gpt(model).pass_of(engine, data.batch(), true));
  });
}

TEST(ContextRows, RunsOfAllRanksAreEachTokenOnceAndAPairHasEqualWork) {
  for (const int ranks : {1, 2, 4, 8}) {
    std::vector<int> owners(static_cast<std::size_t>(2 * ranks), 0);
    for (int rank = 0; rank < ranks; ++rank) {
      for (const int which : {0, 1}) ++owners[static_cast<std::size_t>(run_of_rank(which, rank, ranks))];
      EXPECT_EQ(run_of_rank(0, rank, ranks) + run_of_rank(1, rank, ranks), 2 * ranks - 1);
    }
    EXPECT_THAT(owners, testing::Each(1));
  }
}

TEST(ContextRows, LocalTokensAreTheRunsOfAllSamples) {
  on_context(2, 1, [](const TokenData& data, Pass pass) {
    EXPECT_EQ(pass.batch, 4);
    EXPECT_EQ(pass.time, 4);
    const LocalBatch local(pass, data.batch());
    std::vector<std::int32_t> wanted;
    const int rank = pass.context_rank();
    for (const int run : {rank, 3 - rank}) {
      EXPECT_EQ(pass.first_of_run(run == rank ? 0 : 1), 4 * run);
      for (int sample = 0; sample < 2; ++sample) {
        const auto first = data.tokens.begin() + 16 * sample + 4 * run;
        wanted.insert(wanted.end(), first, first + 4);
      }
    }
    const auto* tokens = local.tokens().as<std::int32_t>();
    EXPECT_EQ(std::vector<std::int32_t>(tokens, tokens + 16), wanted);
  });
}

TEST(ContextRows, WithoutTheAxisTheBatchIsTheCallers) {
  on_context(1, 1, [](const TokenData& data, Pass pass) {
    EXPECT_EQ(pass.runs(), 1);
    EXPECT_EQ(pass.first_of_run(0), 0);
    const LocalBatch local(pass, data.batch());
    EXPECT_EQ(local.tokens().data, data.tokens.data());
    EXPECT_EQ(local.targets().data, data.targets.data());
  });
}

/// Applies dropout to ones in the rows of a rank, and compares with the masks of the whole micro-batch.
TEST(ContextRows, DropoutHasTheMasksOfTheWholeMicroBatch) {
  std::vector<float> whole;
  on_context(1, 1, [&](const TokenData&, const Pass& pass) {
    const std::vector<float> ones(2 * 16 * 24, 1.0f);
    whole = ones;
    dropout_rows(pass, 0.5f, 3, {ones.data(), DataType::float32, {32, 24}},
                 {whole.data(), DataType::float32, {32, 24}});
    pass.engine.compute_stream().synchronize();
  });
  for (const auto& [ranks, tensor] : {std::pair(2, 1), std::pair(4, 1), std::pair(2, 3)}) {
    SCOPED_TRACE(std::to_string(ranks) + " x " + std::to_string(tensor));
    on_context(ranks, tensor, [&](const TokenData&, const Pass& pass) {
      const std::int64_t local = pass.local_rows(), first = pass.tensor_rank() * local;
      std::vector<float> rows(static_cast<std::size_t>(local * 24), 1.0f);
      const TensorView view{rows.data(), DataType::float32, {local, 24}};
      dropout_rows(pass, 0.5f, 3, view, view);
      pass.engine.compute_stream().synchronize();
      for (std::int64_t row = 0; row < local; ++row) {
        const std::int64_t of_run = 2 * pass.time, at = first + row;
        for (std::int64_t i = 0; i < 24; ++i) {
          float wanted = 0;
          if (at < 2 * of_run) {
            const std::int64_t sample = at % of_run / pass.time,
                               token = pass.first_of_run(at < of_run ? 0 : 1) + at % pass.time;
            wanted = whole[static_cast<std::size_t>((sample * 16 + token) * 24 + i)];
          }
          ASSERT_EQ(rows[static_cast<std::size_t>(row * 24 + i)], wanted) << row << " " << i;
        }
      }
    });
  }
}

}  // namespace
}  // namespace tranche::models
