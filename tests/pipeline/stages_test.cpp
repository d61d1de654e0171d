#include "engine/stages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <utility>

#include "engine/pipeline_order.h"
#include "pipeline/schedule/generators.h"
#include "tests/core/error_text.h"
#include "tests/tools/temporary.h"
#include "tranche/core/error.h"
#include "tranche/models/gpt.h"

namespace tranche::detail {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

/// A tied table in the first and the last use, and three layers of unequal work between them.
ModelSpec tied_model() {
  const Initializer zeros = Initializer::zeros();
  ModelSpec model;
  model.add_unit({.name = "table",
                  .tensors = {{"table.w", {8, 4}, zeros},
                              {.name = "table.first", .shape = {4}, .initializer = zeros, .uses = {0}},
                              {.name = "table.last", .shape = {4}, .initializer = zeros, .uses = {1}}},
                  .uses_per_micro_batch = 2});
  for (const char* name : {"a", "b", "c"}) {
    model.add_unit({.name = name, .tensors = {{std::string(name) + ".w", {4, 4}, zeros}}});
  }
  model.forward = {{{0}, 0, 0}, {{1}, 0, 2}, {{2}, 0, 1}, {{3}, 0, 1}, {{0}, 1, 1}};
  return model;
}

TEST(Stages, HoldTheTensorsThatTheirUsesRead) {
  const Stages stages = divide(tied_model(), Config(), 2);
  EXPECT_THAT(stages.begins, ElementsAre(0, 3)) << "work 0 + 2 + 1 and 1 + 1";
  ASSERT_EQ(stages.tensors.size(), 6u);
  EXPECT_THAT(stages.tensors[0].stages, ElementsAre(0, 1));
  EXPECT_THAT(stages.tensors[0].uses, ElementsAre(0, 1));
  EXPECT_THAT(stages.tensors[1].stages, ElementsAre(0));
  EXPECT_THAT(stages.tensors[2].stages, ElementsAre(1));
  EXPECT_THAT(stages.tensors[5].stages, ElementsAre(1));
  EXPECT_THAT(stages.uses_of(tied_model(), 0, 0), ElementsAre(0));
  EXPECT_THAT(stages.uses_of(tied_model(), 0, 1), ElementsAre(1));
  EXPECT_THAT(stages.uses_of(tied_model(), 1, 1), ElementsAre());
}

// Embedding, 12 blocks and the head, whose operations are those of a whole vocabulary; attention grows with
// the sequence.
TEST(Stages, CutGpt2ByTheOperationsOfItsSequence) {
  const models::Gpt gpt2(models::GptConfig::preset("gpt2"));
  EXPECT_THAT(divide(gpt2.spec(1024), Config(), 2).begins, ElementsAre(0, 9))
      << "8 blocks, and 4 with the head";
  EXPECT_THAT(divide(gpt2.spec(256), Config(), 2).begins, ElementsAre(0, 10))
      << "9 blocks, and 3 with the head";
}

/// The minimum of a stage's largest share over all ways to cut in two; each tensor counts once on a stage.
std::int64_t least_of_two(const ModelSpec& model) {
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  const auto held = [&](std::size_t begin, std::size_t end) {
    std::map<std::string, std::int64_t> sizes;
    for (std::size_t i = begin; i < end; ++i) {
      for (const TensorSpec& tensor : model.unit(model.forward[i].unit).tensors) {
        if (tensor.read_by(model.forward[i].use)) sizes[tensor.name] = tensor.shape.elements();
      }
    }
    return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0},
                           [](std::int64_t sum, const auto& one) { return sum + one.second; });
  };
  for (std::size_t cut = 1; cut < model.forward.size(); ++cut) {
    least = std::min(least, std::max(held(0, cut), held(cut, model.forward.size())));
  }
  return least;
}

TEST(Stages, BalanceParameters) {
  Config config;
  config.pipeline_cuts = PipelineCuts::parameters;
  // The table's 32 elements are on both ends, with 4 of their own; the layers have 16 each.
  EXPECT_THAT(divide(tied_model(), config, 2).begins, ElementsAre(0, 3)) << "36 + 32 and 16 + 36";
  EXPECT_EQ(least_of_two(tied_model()), 68);
  EXPECT_THAT(divide(tied_model(), config, 4).begins, ElementsAre(0, 1, 3, 4)) << "36, 32, 16, 36";
  // If one unit has two uses on a stage, its tensor is held once.
  ModelSpec twice = tied_model();
  ModelSpec model;
  for (UnitSpec unit : twice.units()) {
    if (unit.name == "a") unit.uses_per_micro_batch = 2;
    model.add_unit(std::move(unit));
  }
  model.forward = twice.forward;
  model.forward.insert(model.forward.begin() + 2, {{1}, 1, 2});
  EXPECT_THAT(divide(model, config, 2).begins, ElementsAre(0, 4)) << "36 + 16 + 16 and 16 + 36";
  EXPECT_EQ(least_of_two(model), 68);
}

TEST(Stages, AreOneWithoutAPipeline) {
  const Stages stages = divide(tied_model(), Config(), 1);
  EXPECT_TRUE(stages.tensors.empty());
  EXPECT_THAT(stages.uses_of(tied_model(), 0, 0), ElementsAre(0, 1));
  Config by_use;
  by_use.tie_sum = TieSum::by_use;
  EXPECT_THAT(divide(tied_model(), by_use, 1).tensors[0].uses, ElementsAre(0, 1));
}

std::string refusal(const ModelSpec& model, const Config& config, int stages) {
  try {
    (void)divide(model, config, stages);
  } catch (const ConfigurationError& error) {
    return error.message();
  }
  return "nothing was thrown";
}

TEST(Stages, RefuseModelsThatCannotBeCut) {
  Config config;
  config.mesh = "pipeline=3";
  ModelSpec silent = tied_model();
  silent.forward.clear();
  EXPECT_THAT(refusal(silent, config, 3),
              HasSubstr("the model does not say in which order its units follow"));
  ModelSpec shared = tied_model();
  std::rotate(shared.forward.begin() + 2, shared.forward.begin() + 4, shared.forward.end());
  config.pipeline_cuts = PipelineCuts::listed;
  config.pipeline_begins = {1, 3};
  EXPECT_THAT(refusal(shared, config, 3),
              HasSubstr("a tensor can be shared by the first and the last stage alone"));
  ModelSpec unread = tied_model();
  unread.forward.erase(unread.forward.begin() + 1);
  EXPECT_THAT(refusal(unread, config, 3), HasSubstr("ModelSpec::forward has use 0 of unit a 0 times"));
  ModelSpec thrice = tied_model();
  ModelSpec three;
  UnitSpec table = thrice.units()[0];
  table.uses_per_micro_batch = 3;
  three.add_unit(table);
  three.forward = {{{0}, 0, 1}, {{0}, 1, 1}, {{0}, 2, 1}};
  for (const int stages : {1, 2}) {
    Config by_use = config;
    by_use.tie_sum = TieSum::by_use;
    by_use.pipeline_cuts = PipelineCuts::balanced;
    EXPECT_THAT(refusal(three, by_use, stages),
                HasSubstr("is read by 3 uses of its unit; two can be told apart"));
  }
}

// Two chunks on each of two stages: table and a, b, c, table. The first stage has the table only in its chunk
// 0, and gathers it for its forward passes and again for its backward passes. The last chunk of the second
// stage keeps it between the two.
TEST(Stages, GatherATiedTableWithTheirOwnChunks) {
  const ModelSpec model = tied_model();
  Config config;
  config.stage = 3;
  config.accumulation_steps = 4;
  config.pipeline_schedule = "breadth-first";
  config.pipeline_cuts = PipelineCuts::equal;
  Stages stages = divide(model, config, 2);
  ASSERT_THAT(stages.begins, ElementsAre(0, 2, 3, 4));
  stages.schedule = std::make_shared<const pipeline::PipelineSchedule>(schedule_of(config, 2));
  EXPECT_EQ(chunk_gathers_of(stages, model, 0, 0), 2);
  EXPECT_EQ(chunk_gathers_of(stages, model, 1, 0), 1);
  EXPECT_EQ(chunk_gathers_of(stages, model, 0, 2), 0) << "b is on the other stage";
  EXPECT_EQ(chunk_gathers_of(stages, model, 1, 2), 2);
  EXPECT_EQ(units_held(stages, model), 2) << "table and a";
}

// In a V the first stage has both uses, and may hold both chunks at once.
TEST(Stages, GatherAUnitOfTwoChunksOnce) {
  const ModelSpec model = tied_model();
  Config config;
  config.pipeline_cuts = PipelineCuts::equal;
  config.pipeline_schedule = "zb-v";
  Stages stages = divide(model, config, 2);
  using enum pipeline::ActionKind;
  pipeline::PipelineSchedule schedule{.ranks = {{{gather, 0, 0},
                                                 {forward, 0, 0},
                                                 {gather, 3, 0},
                                                 {forward, 3, 0},
                                                 {backward, 3, 0},
                                                 {free, 3, 0},
                                                 {backward, 0, 0},
                                                 {free, 0, 0}},
                                                {}},
                                      .rank_of_chunk = stages.stage_of_chunk,
                                      .micro_batches = 1};
  stages.schedule = std::make_shared<const pipeline::PipelineSchedule>(schedule);
  EXPECT_EQ(chunk_gathers_of(stages, model, 0, 0), 1);
  EXPECT_EQ(units_held(stages, model), 2);
}

TEST(Stages, AreNeighboursOnGpus) {
  Config config;
  const auto text = [&](const std::string& schedule, int stages, DeviceKind device = DeviceKind::cuda) {
    config.pipeline_schedule = schedule;
    return test::message_of<ConfigurationError>([&] { check_neighbours(config, stages, device); });
  };
  for (const pipeline::NamedSchedule& named : pipeline::named_schedules()) {
    config.accumulation_steps = 4;
    EXPECT_EQ(text(std::string(named.name), 4), test::nothing_thrown) << named.name;
  }
  const tools::test::TemporaryFolder folder;
  const std::string file = folder.write("far.csv", "0F0,0B0\n2F0,2B0\n1F0,1B0\n3F0,3B0\n");
  config.accumulation_steps = 1;
  EXPECT_EQ(text(file, 4), "tranche.pipeline_schedule \"" + file +
                               "\": chunk 0 is on stage 0 and the next one on stage 2; on GPUs a stage sends "
                               "messages to the stages before and behind it alone, and the last one to the "
                               "first: place the chunks in a loop or in a V");
  EXPECT_EQ(text(file, 4, DeviceKind::cpu), test::nothing_thrown);
}

// The file is read when the model is divided, and again for the actions.
TEST(Stages, RefuseAFileThatChangesMeanwhile) {
  const tools::test::TemporaryFolder folder;
  Config config;
  config.accumulation_steps = 1;
  config.pipeline_schedule = folder.write("mine.csv", "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n");
  config.pipeline_cuts = PipelineCuts::equal;
  const Stages stages = divide(tied_model(), config, 2);
  EXPECT_EQ(schedule_of(config, stages)->rank_of_chunk, stages.stage_of_chunk);
  (void)folder.write("mine.csv", "0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0\n");
  EXPECT_EQ(test::message_of<ConfigurationError>([&] { (void)schedule_of(config, stages); }),
            "tranche.pipeline_schedule: " + config.pipeline_schedule +
                " was changed while the run started: its chunks lie on other stages now; start again");
}

TEST(Stages, JoinTheirEndsInALoop) {
  Config config;
  const auto joined = [&](const char* schedule, int stages) {
    config.pipeline_schedule = schedule;
    Stages made;
    made.count = stages;
    made.stage_of_chunk = stages_of_chunks(config, stages);
    made.begins.resize(made.stage_of_chunk.size());
    return made.joins_ends();
  };
  for (const char* const looped : {"interleaved", "breadth-first"}) {
    EXPECT_TRUE(joined(looped, 3)) << looped;
    EXPECT_FALSE(joined(looped, 2)) << "two stages are neighbours";
  }
  for (const char* const near : {"1f1b", "afab", "zb-h1", "zb-v"}) EXPECT_FALSE(joined(near, 4)) << near;
}

TEST(Stages, NameChunksWhereAListCutsThem) {
  Config config;
  config.pipeline_schedule = "interleaved";
  config.pipeline_cuts = PipelineCuts::listed;
  config.pipeline_begins = {1, 2};
  const auto text = [&] {
    return test::message_of<ConfigurationError>([&] { (void)divide(tied_model(), config, 2); });
  };
  EXPECT_EQ(text(), "tranche.pipeline_cuts [1, 2]: it has 2 numbers; 4 chunks have 3 cuts");
  config.pipeline_begins = {1, 2, 2};
  EXPECT_THAT(text(), HasSubstr("[1, 2, 2]: 2 leaves a chunk without a unit"));
  config.pipeline_begins = {1, 3, 2};
  EXPECT_EQ(text(), "tranche.pipeline_cuts [1, 3, 2]: 2 comes after 3: cuts have to ascend");
}

}  // namespace
}  // namespace tranche::detail
