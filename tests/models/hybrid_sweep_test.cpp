// Every product of the axes replicate, pipeline, shard and tensor, at every ZeRO stage: losses of one rank in
// fp32, and the same bits over the depth of the pipeline, its schedule and how data ranks are grouped.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "context_models.h"
#include "tests/core/rounds.h"
#include "tests/pipeline/pipeline_fixture.h"
#include "tranche/models/llama.h"

namespace tranche::models {
namespace {

/// Sizes of the axes.
struct Sizes {
  int replicas = 1, stages = 1, shards = 1, parts = 1;
  int data_ranks() const { return replicas * shards; }
  int ranks() const { return replicas * stages * shards * parts; }
  std::string mesh() const {
    const auto axis = [](const char* name, int size) { return name + std::to_string(size); };
    return axis("replicate=", replicas) + axis(", pipeline=", stages) + axis(", shard=", shards) +
           axis(", tensor=", parts);
  }
};

/// All meshes of a power of two ranks with at most `most` on an axis.
std::vector<Sizes> factorisations(int ranks, int most) {
  std::vector<Sizes> all;
  for (int replicas = 1; replicas <= most; replicas *= 2) {
    for (int stages = 1; stages <= most; stages *= 2) {
      for (int shards = 1; shards <= most; shards *= 2) {
        for (int parts = 1; parts <= most; parts *= 2) {
          const Sizes sizes{replicas, stages, shards, parts};
          if (sizes.ranks() == ranks) all.push_back(sizes);
        }
      }
    }
  }
  return all;
}

Gpt gpt(std::int64_t layers) {
  GptConfig config = with_dropout(tiny_gpt());
  config.layers = layers;
  config.heads = 8;
  return Gpt(config);
}

Llama llama(std::int64_t layers) {
  LlamaConfig config = eight_heads(LlamaKind::llama);
  config.layers = layers;
  return Llama(config);
}

constexpr std::int64_t stages_at_most = 8;  // each with one use of a unit at least
constexpr std::array schedules_of_losses{"1f1b", "afab", "zb-h1"};

/// Sixteen samples a step, which data ranks share out.
Config config_at(const Sizes& sizes, std::size_t number) {
  Config config = config_of(1);
  config.train_batch_size = 16;
  config.micro_batch_size = 1;
  config.accumulation_steps = 16 / sizes.data_ranks();
  config.stage = static_cast<int>(number % 4);
  config.reduction = number / 4 % 2 == 0 ? ReductionPolicy::boundary : ReductionPolicy::micro_batch;
  config.pipeline_schedule = schedules_of_losses[number % schedules_of_losses.size()];
  if (sizes.ranks() > 1) config.mesh = sizes.mesh();
  return config;
}

/// Expects the losses of one rank on each mesh at each ZeRO stage. Tests one in `stride` of these cases.
void expect_losses_of_one_rank(const LanguageModel& model, const std::vector<Sizes>& meshes, int steps,
                               std::size_t stride) {
  const ContextRun run{.time = time_steps, .steps = steps};
  const std::vector<double> one = losses_of(1, model, config_at({}, 0), run);
  ASSERT_LT(one[static_cast<std::size_t>(steps) - 1], one.front()) << "it learns";
  double furthest = 0;
  int taken = 0;
  for (std::size_t number = 0; number < 4 * meshes.size(); ++number) {
    const Sizes& sizes = meshes[number / 4];
    if (number % stride != stride / 2 || !test::swept(static_cast<int>(number / stride), 5)) continue;
    if (test::sanitized && sizes.ranks() > 8) continue;
    const Config config = config_at(sizes, number);
    const double difference = largest_relative_difference(losses_of(sizes.ranks(), model, config, run), one);
    EXPECT_LE(difference, 1e-5) << model.describe() << " on " << sizes.mesh() << " at stage " << config.stage
                                << ", " << config.pipeline_schedule << ", " << name_of(config.reduction);
    furthest = std::max(furthest, difference);
    ++taken;
  }
  std::printf("measured: %s: losses of %d trainings on %zu meshes within %.1e of one rank's\n",
              model.describe().c_str(), taken, meshes.size(), furthest);
}

/// Twelve meshes of 16 ranks.
std::vector<Sizes> twelve_of_sixteen() {
  std::vector<Sizes> taken;
  const std::vector<Sizes> all = factorisations(16, stages_at_most);
  for (std::size_t i = 0; taken.size() < 12; i += 5) taken.push_back(all[i % all.size()]);
  return taken;
}

TEST(HybridSweep, LossesAreThoseOfOneRank) {
  ASSERT_EQ(factorisations(8, 8).size(), 20U);
  expect_losses_of_one_rank(gpt(6), factorisations(8, 8), 4, 27);
  expect_losses_of_one_rank(llama(6), factorisations(8, 8), 4, 23);
}

TEST(HybridSweepGptSlow, EveryMeshOfEightHasTheLossesOfOneRank) {
  expect_losses_of_one_rank(gpt(6), factorisations(8, 8), 20, 1);
}
TEST(HybridSweepLlamaSlow, EveryMeshOfEightHasTheLossesOfOneRank) {
  expect_losses_of_one_rank(llama(6), factorisations(8, 8), 20, 1);
}
TEST(HybridSweepGptSlow, TwelveMeshesOfSixteenHaveTheLossesOfOneRank) {
  expect_losses_of_one_rank(gpt(6), twelve_of_sixteen(), 20, 1);
}
TEST(HybridSweepLlamaSlow, TwelveMeshesOfSixteenHaveTheLossesOfOneRank) {
  expect_losses_of_one_rank(llama(6), twelve_of_sixteen(), 20, 1);
}

// --- Bits -----------------------------------------------------------------------------------------------

Config bits_config(int stage, ReductionPolicy policy) {
  return pipelines::pipeline_config(DataType::float32, stage, policy, 8);
}

/// Expects that on each mesh of replicate, shard and tensor the depth and schedule of a pipeline change no
/// bit. With `every` all of these cases are tested, otherwise one in seven.
void expect_one_digest(const LanguageModel& model, bool every) {
  int number = 0, compared = 0, groups = 0;
  for (int of_group = 1; of_group <= 4; of_group *= 2) {
    for (const Sizes& sizes : factorisations(of_group, 4)) {
      if (sizes.stages > 1) continue;
      ++groups;
      for (const ReductionPolicy policy : {ReductionPolicy::boundary, ReductionPolicy::micro_batch}) {
        std::optional<pipelines::Bits> alone;
        for (int stages = 2; stages * of_group <= 8; stages *= 2) {
          for (const char* const schedule : pipelines::schedules) {
            const int zero = ++number % 4;
            if (every ? !test::swept(number, 7) : number % 31 != 3 || !test::swept(number / 31)) continue;
            if (!alone) alone = pipelines::trained(model, bits_config(0, policy), sizes.mesh(), of_group);
            Sizes deep = sizes;
            deep.stages = stages;
            EXPECT_TRUE(pipelines::trained(model, bits_config(zero, policy), deep.mesh(), deep.ranks(),
                                           schedule) == *alone)
                << model.describe() << " on " << deep.mesh() << ", " << schedule << ", stage " << zero << ", "
                << name_of(policy);
            ++compared;
          }
        }
      }
    }
  }
  EXPECT_EQ(groups, 10);
  std::printf("measured: %s: %d pipelines have the bits of (replicate, shard, tensor) alone\n",
              model.describe().c_str(), compared);
}

/// Expects four shards whose gradients are added in pairs to have the bits of two copies of two shards, at
/// stage 1 also with int8 blocks, and at stage 2 on nodes of two ranks. Tests one in `stride` cases, on
/// `most` ranks at most.
void expect_bits_of_copies(const LanguageModel& model, int stride, int most = 8) {
  int number = 0;
  for (const auto& [others, ranks] :
       {std::pair("", 4), std::pair(", pipeline=2", 8), std::pair(", tensor=2", 8),
        std::pair(", context=2", 8), std::pair(", pipeline=2, tensor=2", 16), std::pair(", tensor=4", 16)}) {
    if (ranks > most) continue;
    for (const ReductionPolicy policy : {ReductionPolicy::boundary, ReductionPolicy::micro_batch}) {
      for (int stage = 0; stage <= 3; ++stage) {
        if (number++ % stride != 0 || !test::swept(number / stride, 3)) continue;
        Config config = bits_config(stage, policy);
        config.quantized_gradients = stage == 1 && policy == ReductionPolicy::micro_batch;
        const auto copies =
            pipelines::trained(model, config, std::string("replicate=2, shard=2") + others, ranks);
        config.reduction_group = std::string(others).ends_with("context=2") ? 4 : 2;
        if (stage == 2) {
          config.debug.ranks_per_host = 2;
          config.collectives = "shared";
        }
        const auto shards = pipelines::trained(model, config, std::string("shard=4") + others, ranks);
        SCOPED_TRACE(model.describe() + others + " at stage " + std::to_string(stage) + ", " +
                     std::string(name_of(policy)));
        EXPECT_EQ(shards.state, copies.state);
        EXPECT_EQ(shards.weights, copies.weights);
        EXPECT_EQ(shards.norms, copies.norms);
        EXPECT_LE(largest_relative_difference(shards.losses, copies.losses), 1e-14);
      }
    }
  }
}

TEST(HybridBits, DepthAndScheduleChangeNone) {
  expect_one_digest(gpt(14), false);
  expect_one_digest(llama(14), false);
}
TEST(HybridBits, FourShardsInPairsHaveThoseOfTwoCopies) {
  expect_bits_of_copies(gpt(4), 3);    // with a tied tensor
  expect_bits_of_copies(llama(4), 5);  // with heads of keys that four ranks of tensor share
}
TEST(HybridBits, GradientsReadWithinAStepHaveThoseOfTwoCopies) {
  const Llama model = llama(1);
  Config config = bits_config(2, ReductionPolicy::boundary);
  const auto read = [&](const std::string& mesh) {
    config.mesh = mesh;
    std::vector<float> values;
    std::mutex mutex;
    on_ranks(8, model.spec(pipelines::time_steps), config, [&](Engine& engine) {
      pipelines::StepData data(engine, model.shape().vocabulary);
      for (std::int64_t m = 0; m < 2; ++m) model.forward_backward(engine, data.draw(engine, m));
      std::vector<float> mine = engine.read_gradient("model.norm.weight");
      const std::lock_guard lock(mutex);
      values = std::move(mine);
    });
    return values;
  };
  const std::vector<float> copies = read("replicate=2, shard=2, tensor=2");
  ASSERT_EQ(copies.size(), static_cast<std::size_t>(model.shape().width));
  EXPECT_NE(read("shard=4, tensor=2"), copies) << "another order would change bits";
  config.reduction_group = 2;
  EXPECT_EQ(read("shard=4, tensor=2"), copies);
}
TEST(HybridBitsSlow, DepthAndScheduleOfAGptChangeNone) {
  expect_one_digest(gpt(14), true);
}
TEST(HybridBitsSlow, DepthAndScheduleOfALlamaChangeNone) {
  expect_one_digest(llama(14), true);
}
TEST(HybridBitsSlow, FourShardsInPairsHaveThoseOfTwoCopies) {
  expect_bits_of_copies(gpt(6), 1, 16);
  expect_bits_of_copies(llama(6), 1, 16);
}

}  // namespace
}  // namespace tranche::models
