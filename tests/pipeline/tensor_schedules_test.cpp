// Every pipeline schedule with layers that are cut over the axis tensor.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tests/models/tensor_models.h"
#include "tranche/comm/communicator.h"
#include "tranche/engine/runtime.h"
#include "tranche/models/llama.h"
#include "tranche/planner/planner.h"

namespace tranche::models {
namespace {

constexpr std::array schedules{"1f1b", "afab", "interleaved", "breadth-first", "zb-h1", "zb-v"};
constexpr std::int64_t micro_batches = 4;

std::shared_ptr<const LanguageModel> six_blocks() {
  GptConfig model = with_dropout(six_heads());
  model.layers = 6;
  return std::make_shared<Gpt>(model);
}

Config config_under(const std::string& mesh, const std::string& schedule, int stage) {
  Config config = config_of(1, 1, stage);
  config.train_batch_size = 0;
  config.micro_batch_size = 1;
  config.accumulation_steps = micro_batches;
  config.tie_sum = TieSum::by_use;
  config.mesh = mesh;
  config.pipeline_schedule = schedule;
  return config;
}

struct Seen {
  std::vector<double> losses;
  kernels::Digest digest;
};

Seen trained(const LanguageModel& model, int ranks, const Config& config) {
  Seen seen;
  std::mutex mutex;
  on_ranks(ranks, model.spec(time_steps), config, [&](Engine& engine) {
    const Runtime& runtime = engine.runtime();
    if (runtime.pipeline() != nullptr) {
      // Messages are sent to ranks that have the same parts of the layers.
      for (const int other : runtime.mesh().group({MeshAxis::pipeline}, runtime.rank())) {
        EXPECT_EQ(runtime.mesh().coordinate(MeshAxis::tensor, other),
                  runtime.mesh().coordinate(MeshAxis::tensor, runtime.rank()));
      }
    }
    std::vector<TokenData> data(micro_batches, TokenData(time_steps, model.shape().vocabulary, true));
    Seen mine;
    for (std::int64_t step = 0; step < 3; ++step) {
      train_step(model, engine, [&](std::int64_t m) {
        TokenData& place = data[static_cast<std::size_t>(m)];
        place.draw(step * micro_batches + m, 1);
        return place.batch();
      });
      mine.losses.push_back(engine.step().loss);
    }
    mine.digest = engine.state_digest();
    const std::lock_guard lock(mutex);
    if (runtime.rank() == 0) seen = mine;
  });
  return seen;
}

TEST(SchedulesOfCutLayers, HaveTheLossesOfOneRankAndOneDigest) {
  const std::shared_ptr<const LanguageModel> model = six_blocks();
  const std::vector<double> one = trained(*model, 1, config_under("", "1f1b", 0)).losses;
  const kernels::Digest digest = trained(*model, 4, config_under("pipeline=2,tensor=2", "1f1b", 0)).digest;
  for (std::size_t s = 0; s < schedules.size(); ++s) {
    for (const int stages : {2, 4}) {
      const std::string mesh = "pipeline=" + std::to_string(stages) + ",tensor=2";
      const Seen cut = trained(*model, 2 * stages, config_under(mesh, schedules[s], static_cast<int>(s) % 4));
      EXPECT_LE(largest_relative_difference(cut.losses, one), 1e-5) << mesh << ", " << schedules[s];
      EXPECT_TRUE(cut.digest == digest) << mesh << ", " << schedules[s];
    }
  }
}

// The ranks of the axis share the rows of a message: 6 of 11 rows, and 5 with a row of padding.
TEST(SchedulesOfCutLayers, SendTheRowsThatARankHas) {
  LlamaConfig llama = LlamaConfig::preset("qwen3-nano");
  llama.layers = 6;
  llama.heads = 8;
  llama.key_value_heads = 2;
  llama.tied = false;  // so that stages send only residuals and their gradients
  const auto model = std::make_shared<const Llama>(llama);
  for (const char* const schedule : schedules) {
    planner::PlanRequest request;
    request.model.language = model;
    request.sequence = time_steps;
    request.ranks = 4;
    request.config = config_under("pipeline=2,tensor=2", schedule, 0);
    const bool looped = schedule == std::string("interleaved") || schedule == std::string("breadth-first");
    for (request.rank = 0; request.rank < request.ranks; ++request.rank) {
      const planner::AxisTraffic sent = planner::plan_run(request).axes.at(MeshAxis::pipeline);
      // There is one cut between ranks, two in a V of four chunks, and three in a loop. This rank sends the
      // residual or the gradient of each.
      const std::int64_t messages = looped ? 3 : schedule == std::string("zb-v") ? 2 : 1;
      EXPECT_EQ(sent.bytes, micro_batches * messages * 6 * model->shape().width * size_of(DataType::float32))
          << schedule << ", rank " << request.rank;
      for (const MeshAxis axis : {MeshAxis::pipeline, MeshAxis::tensor}) {
        const planner::AxisTraffic along = planner::plan_run(request).axes.at(axis);
        EXPECT_EQ(along.bytes, along.formula_bytes) << schedule << ", rank " << request.rank;
      }
    }
  }
}

}  // namespace
}  // namespace tranche::models
