// Batches for training and evaluation, on one rank and several.
#include "tranche/training/batch_feeder.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <mutex>

#include "tests/training/trainer_fixture.h"
#include "tranche/core/error.h"
#include "tranche/kernels/cross_entropy.h"
#include "tranche/training/evaluation.h"

namespace tranche::training {
namespace {

using test::on_ranks;
using test::Texts;
using test::Trained;
using testing::ElementsAre;
using testing::HasSubstr;
using tools::test::TemporaryFolder;

std::vector<std::int32_t> values_of(const ConstTensorView& view) {
  const auto* values = static_cast<const std::int32_t*>(view.data);
  return {values, values + view.shape.elements()};
}

TEST(BatchFeeder, GivesEachRankItsSamplesOfTheStepThatComes) {
  const TemporaryFolder folder;
  const Texts texts(folder);
  for (const int ranks : {1, 2}) {
    on_ranks(ranks, [&](const Trained& trained) {
      for (int step = 0; step < 2; ++step) {
        EXPECT_EQ(trained.engine.samples(), step * 4 * ranks);
        for (std::int64_t m = 0; m < 2; ++m) {
          const models::TokenBatch batch = trained.feeder.training_batch(texts.training, texts.mixture, m);
          const std::int64_t first = trained.engine.samples() + (m * ranks + trained.rank) * 2;
          EXPECT_THAT(batch.samples, ElementsAre(first, first + 1));
          std::vector<std::int32_t> tokens, targets;
          training::read_windows(texts.training,
                                 {texts.mixture.window(first), texts.mixture.window(first + 1)},
                                 test::vocabulary, tokens, targets);
          EXPECT_EQ(values_of(batch.tokens), tokens);
          EXPECT_EQ(values_of(batch.targets), targets);
          EXPECT_EQ(batch.tokens.shape, (Shape{2, test::sequence}));
        }
        trained.step(texts);
      }
    });
  }
}

TEST(BatchFeeder, ARankWithoutSamplesGetsRowsWithoutTargets) {
  const TemporaryFolder folder;
  const Texts texts(folder);
  const auto invariant = [](Config& config) {
    config.world_size_invariant = true;
    config.train_batch_size = 6;
    config.accumulation_steps = 0;
  };
  on_ranks(
      2,
      [&](const Trained& trained) {
        for (std::int64_t m = 0; m < 2; ++m) {
          const models::TokenBatch batch = trained.feeder.training_batch(texts.training, texts.mixture, m);
          const std::vector<std::int32_t> targets = values_of(batch.targets);
          const std::int64_t ignored = std::count(targets.begin(), targets.end(), kernels::ignored_label);
          EXPECT_EQ(ignored, m == 1 && trained.rank == 1 ? 2 * test::sequence : 0);
        }
        EXPECT_EQ(trained.step(texts).tokens, 6 * test::sequence);
      },
      invariant);
}

// Several micro-batches of a pipeline are active at once, and set_batch() may increase their number.
TEST(BatchFeeder, KeepsTheMicroBatchesOfAPipelineThatAreOpen) {
  const TemporaryFolder folder;
  const Texts texts(folder);
  const auto digest = [&](int ranks, const std::string& mesh) {
    kernels::Digest found;
    std::mutex mutex;
    on_ranks(
        ranks,
        [&](const Trained& trained) {
          trained.step(texts);
          trained.engine.set_batch(2, 6);
          trained.step(texts);
          trained.step(texts);
          const kernels::Digest state = trained.engine.state_digest();
          const std::lock_guard lock(mutex);
          found = state;
        },
        [&](Config& config) {
          config.mesh = mesh;
          config.tie_sum = TieSum::by_use;
        });
    return found;
  };
  const kernels::Digest one = digest(1, "");
  EXPECT_TRUE(digest(2, "pipeline=2") == one);
  EXPECT_TRUE(digest(3, "pipeline=3") == one);
}

TEST(BatchFeeder, NamesAFileOfTokensBeyondTheVocabulary) {
  const TemporaryFolder folder;
  const Texts texts(folder);
  on_ranks(1, [&](const Trained& trained) {
    BatchFeeder feeder(trained.engine, 100, trained.feeder.shape(), test::sequence);
    EXPECT_THAT(tools::test::message_of<ConfigurationError>(
                    [&] { feeder.training_batch(texts.training, texts.mixture, 0); }),
                HasSubstr("text.txt"));
  });
}

/// The windows evaluated one by one, as a mean weighted by tokens.
EvaluationResult alone(const Trained& trained, const training::Windows& windows,
                       const std::vector<std::int64_t>& numbers) {
  EvaluationResult all;
  for (const std::int64_t number : numbers) {
    const EvaluationResult one =
        evaluate_windows(trained.engine, trained.model, trained.feeder, windows, {number});
    all.loss += one.loss * static_cast<double>(one.tokens);
    all.tokens += one.tokens;
  }
  all.loss /= static_cast<double>(all.tokens);
  return all;
}

TEST(EvaluateWindows, IsTheMeanOfEachAloneOnAnyNumberOfRanks) {
  const TemporaryFolder folder;
  const Texts texts(folder);
  const std::vector<std::int64_t> numbers = training::evaluation_windows(texts.held_out.count(), 7);
  ASSERT_EQ(numbers.size(), 7u);
  for (const int ranks : {1, 2, 3}) {  // rounds of 2, 4 and 6 windows; the last one is not full
    on_ranks(ranks, [&](const Trained& trained) {
      trained.step(texts);
      const kernels::Digest before = trained.engine.state_digest();
      std::vector<std::int64_t> begun;
      const EvaluationResult result =
          evaluate_windows(trained.engine, trained.model, trained.feeder, texts.held_out, numbers,
                           [&begun](std::int64_t done, std::int64_t windows) {
                             EXPECT_EQ(windows, 7);
                             begun.push_back(done);
                           });
      EXPECT_EQ(result.tokens, 7 * test::sequence);
      EXPECT_NEAR(result.loss, alone(trained, texts.held_out, numbers).loss, 1e-6);
      EXPECT_EQ(begun.size(), 1u + (7 + 2 * static_cast<std::size_t>(ranks) - 1) / (2 * ranks));
      EXPECT_EQ(begun.back(), 7);
      EXPECT_TRUE(trained.engine.state_digest() == before);
      EXPECT_EQ(trained.engine.samples(), 4 * ranks) << "an evaluation uses no samples";

      int asked = 0;
      const EvaluationResult first =
          evaluate_windows(trained.engine, trained.model, trained.feeder, texts.held_out, numbers, {},
                           [&asked] { return ++asked == 2; });
      EXPECT_EQ(asked, 2);
      EXPECT_EQ(first.tokens, std::min(7, 2 * ranks) * test::sequence) << "of the first round";
      EXPECT_TRUE(trained.engine.state_digest() == before);
      trained.step(texts);
    });
  }
}

}  // namespace
}  // namespace tranche::training
