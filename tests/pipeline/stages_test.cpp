#include "engine/stages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tranche/core/error.h"

namespace tranche::detail {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

/// A tied table in the first and the last use, and three layers of unequal work between.
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

}  // namespace
}  // namespace tranche::detail
