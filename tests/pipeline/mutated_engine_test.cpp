// Damaged schedules, given to the engine as files, are refused before step 1 or trained with the bits of one
// rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "pipeline/schedule/check.h"
#include "pipeline/schedule/generators.h"
#include "pipeline/schedule/lower.h"
#include "pipeline/schedule/text.h"
#include "tests/models/training_fixture.h"
#include "tests/pipeline/schedule/mutated_schedules.h"
#include "tests/tools/temporary.h"
#include "tranche/core/error.h"

namespace tranche::models {
namespace {

constexpr std::int64_t sequence_length = 7;
constexpr int trained_steps = 2;

/// A model with at least as many blocks as chunks, so that each chunk has work.
std::shared_ptr<const LanguageModel> model_of_blocks() {
  GptConfig config = tiny_gpt();
  config.layers = 12;
  config.embedding_dropout = config.attention_dropout = config.residual_dropout = 0.1f;
  return std::make_shared<Gpt>(config);
}

Config config_of(std::int64_t micro_batches, int stage) {
  Config config = plain_config(1);
  config.train_batch_size = 0;
  config.micro_batch_size = 1;
  config.accumulation_steps = micro_batches;
  config.stage = stage;
  config.gradient_clipping = 0.5;
  config.tie_sum = TieSum::by_use;
  return config;
}

/// The state digest of rank 0 after the steps.
kernels::Digest state_after_training(const LanguageModel& model, const Config& config, int ranks) {
  kernels::Digest digest;
  std::mutex mutex;
  on_ranks(ranks, model.spec(sequence_length), config, [&](Engine& engine) {
    const auto micro_batches = static_cast<std::size_t>(engine.config().accumulation_steps);
    std::vector<TokenData> data(micro_batches, TokenData(sequence_length, model.shape().vocabulary, true));
    for (int step = 0; step < trained_steps; ++step) {
      train_step(model, engine, [&](std::int64_t m) {
        TokenData& place = data[static_cast<std::size_t>(m)];
        place.draw(engine.samples() + m, 1);
        return place.batch();
      });
      engine.step();
    }
    const kernels::Digest mine = engine.state_digest();
    const std::lock_guard lock(mutex);
    if (engine.runtime().rank() == 0) digest = mine;
  });
  return digest;
}

/// Tests `each` schedules with each verdict.
void expect_refused_or_trained(int each, std::uint64_t first_seed) {
  const std::shared_ptr<const LanguageModel> model = model_of_blocks();
  const tools::test::TemporaryFolder folder;
  std::map<std::int64_t, kernels::Digest> of_one_rank;  // the key is the number of micro-batches
  int trained = 0, refused = 0;
  for (std::uint64_t seed = first_seed; trained < each || refused < each; ++seed) {
    const tranche::test::MutatedSchedule mutated = tranche::test::mutated_schedule(seed);
    const pipeline::PipelineSchedule& schedule = mutated.schedule;
    const pipeline::Verdict verdict = pipeline::check(schedule, pipeline::MessageModel::channels);
    if ((verdict.accepted() ? trained : refused) == each) continue;
    if (verdict.accepted() && mutated.origin.ends_with("; 0 changes")) continue;
    Config config =
        config_of(schedule.micro_batches, pipeline::has_gathers(schedule) ? 3 : static_cast<int>(seed % 4));
    const std::string mesh = "pipeline=" + std::to_string(schedule.stages());
    config.mesh = mesh;
    config.pipeline_schedule = folder.write("schedule.csv", pipeline::write_schedule(schedule));
    const std::string story = "seed " + std::to_string(seed) + ", " + mutated.origin + ", ZeRO stage " +
                              std::to_string(config.stage) + ": " + verdict.refusal;
    if (!verdict.accepted()) {
      ++refused;
      try {
        (void)state_after_training(*model, config, schedule.stages());
        ADD_FAILURE() << story;
      } catch (const ConfigurationError& error) {
        EXPECT_THAT(error.message(),
                    testing::StartsWith("tranche.pipeline_schedule: " + folder.path("schedule.csv")))
            << story;
      }
      continue;
    }
    ++trained;
    const auto [one, is_new] = of_one_rank.try_emplace(schedule.micro_batches);
    if (is_new) one->second = state_after_training(*model, config_of(schedule.micro_batches, 0), 1);
    EXPECT_TRUE(state_after_training(*model, config, schedule.stages()) == one->second) << story;
  }
}

TEST(MutatedSchedules, AreRefusedOrTrainedWithTheBitsOfOneRank) {
  expect_refused_or_trained(10, 50000);
}

TEST(MutatedSchedulesSlow, AreRefusedOrTrainedWithTheBitsOfOneRank) {
  expect_refused_or_trained(300, 60000);
}

}  // namespace
}  // namespace tranche::models
