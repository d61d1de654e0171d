#include "tranche/planner/stage_plans.h"
#include "tranche/planner/schedule_choice.h"

#include <gmock/gmock.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>
#include <vector>

#include "tests/tools/program_fixture.h"
#include "tranche/models/gpt.h"
#include "tranche/planner/plan_text.h"

namespace tranche::planner {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using tools::test::ProgramResult;

constexpr int micro_batches = 4, sequence = 64;

PlanRequest three_stages() {
  PlanRequest request;
  request.model.name = "gpt-mini";
  request.model.language = std::make_shared<models::Gpt>(models::GptConfig::preset("gpt-mini"));
  request.sequence = sequence;
  request.ranks = 6;
  request.config.mesh = "pipeline=3, shard=2";
  request.config.micro_batch_size = 2;
  request.config.accumulation_steps = micro_batches;
  request.config.workspace_bytes = 8 << 20;
  return request;
}

TEST(StagePlans, AreThePlansOfOneRankOfEachStageTheLargestFirst) {
  const PlanRequest request = three_stages();
  const std::vector<StagePlan> plans = plan_stages(request, 0);
  ASSERT_EQ(plans.size(), 3u);
  std::vector<bool> seen(3);
  for (std::size_t i = 0; i < plans.size(); ++i) {
    const StagePlan& one = plans[i];
    seen.at(static_cast<std::size_t>(one.stage)) = true;
    EXPECT_EQ(one.request.rank, 2 * one.stage) << "the first rank of the stage";
    PlanRequest alone = request;
    alone.rank = one.request.rank;
    const PlanResult plan = plan_run(alone);
    EXPECT_EQ(one.plan.tier(Tier::device).peak, plan.tier(Tier::device).peak);
    EXPECT_EQ(one.state_bytes(), plan.state.parameters + plan.state.gradients + plan.state.optimizer);
    if (i > 0) {
      EXPECT_GE(plans[i - 1].plan.tier(Tier::device).peak, plan.tier(Tier::device).peak);
    }
    // A residual to the next stage, a gradient to the previous one.
    const int neighbours = one.stage == 1 ? 2 : 1;
    const std::int64_t width = models::GptConfig::preset("gpt-mini").width;
    EXPECT_EQ(one.messages().calls, neighbours * micro_batches);
    EXPECT_EQ(one.messages().bytes,
              neighbours * micro_batches * 2 * sequence * width * size_of(request.config.precision.compute));
  }
  EXPECT_THAT(seen, ElementsAre(true, true, true));
  // With a budget between the largest two, one stage does not fit, and it comes first.
  const std::int64_t budget = plans[1].plan.tier(Tier::device).peak;
  ASSERT_LT(budget, plans[0].plan.tier(Tier::device).peak);
  EXPECT_THAT(stage_plans_text(plan_stages(request, budget), budget),
              AllOf(HasSubstr("\nstage " + std::to_string(plans[0].stage) + " (rank " +
                              std::to_string(plans[0].request.rank) + ") does not fit in "),
                    Not(HasSubstr("(rank " + std::to_string(plans[1].request.rank) + ") does not fit"))));
}

TEST(StagePlans, HaveALineForEachClassOfCoordinatesOnTensor) {
  PlanRequest request = three_stages();
  request.ranks = 8;
  request.config.mesh = "shard=2, tensor=4";
  models::GptConfig model = models::GptConfig::preset("gpt-mini");
  model.heads = 4;
  request.model.language = std::make_shared<models::Gpt>(model);
  ASSERT_EQ(model.vocabulary % 4, 0);
  EXPECT_EQ(plan_stages(request, 0).size(), 1u) << "all parts have equal sizes";
  model.vocabulary += 3;
  request.model.language = std::make_shared<models::Gpt>(model);
  const std::vector<StagePlan> plans = plan_stages(request, 0);
  ASSERT_EQ(plans.size(), 2u);
  PlanRequest one_rank = request;
  one_rank.ranks = 2;
  one_rank.config.mesh = "shard=2";
  const PlanResult whole = plan_run(one_rank);
  const std::int64_t whole_state = whole.state.parameters + whole.state.gradients + whole.state.optimizer;
  for (const StagePlan& one : plans) {
    const bool fewer = one.tensors.front() == 0;  // its part of the vocabulary has one token less
    EXPECT_EQ(one.tensors, (fewer ? std::vector<int>{0} : std::vector<int>{1, 2, 3}));
    EXPECT_EQ(one.name(), fewer ? "tensor 0" : "tensor 1-3");
    for (const int coordinate : one.tensors) {
      PlanRequest alone = request;
      alone.rank = coordinate;  // neighbours differ on tensor
      const PlanResult plan = plan_run(alone);
      EXPECT_EQ(plan.tier(Tier::device).peak, one.plan.tier(Tier::device).peak) << coordinate;
      EXPECT_EQ(plan.axes.at(MeshAxis::tensor).bytes, one.plan.axes.at(MeshAxis::tensor).bytes);
    }
    EXPECT_LT(one.state_bytes(), whole_state * 3 / 10)
        << "a quarter of the cut tensors, and whole norms and positions";
    EXPECT_GT(one.state_bytes(), whole_state / 4);
    EXPECT_GT(one.plan.axes.at(MeshAxis::tensor).bytes, 0);
  }
  EXPECT_THAT(
      stage_plans_text(plans, 0),
      AllOf(
          HasSubstr("shard=2, tensor=4; one rank of each class of coordinates on tensor, the largest first"),
          HasSubstr("over tensor"), HasSubstr("          1-3      1  all"), Not(HasSubstr("schedule"))));
  const json document = json::parse(stage_plans_json(plans, 0));
  EXPECT_EQ(document["stages"][1]["tensor"], plans[1].tensors.front());
  EXPECT_EQ(document["stages"][1]["tensors"], plans[1].tensors);
  EXPECT_EQ(document["stages"][1]["plan"]["coordinate"]["tensor"], plans[1].tensors.front());
  // The sizes of whole tensors do not show the parts that ranks compute.
  request.config.layout["vocabulary"] = "whole";
  EXPECT_EQ(plan_stages(request, 0).size(), 4u);
}

/// A stage without the largest device memory that lacks host memory comes first nevertheless.
TEST(StagePlans, PutAStageThatDoesNotFitFirst) {
  PlanRequest request = three_stages();
  // The ends have a large table, whose state is in host memory; the blocks between them have many
  // activations.
  models::GptConfig model = models::GptConfig::preset("gpt-mini");
  model.vocabulary = 32768;
  request.model.language = std::make_shared<models::Gpt>(model);
  request.sequence = 256;
  request.config.accumulation_steps = 16;
  request.config.pipeline_schedule = "afab";
  request.config.pipeline_cuts = PipelineCuts::listed;
  request.config.pipeline_begins = {1, 7};
  request.config.offload.optimizer = OffloadTier::cpu;
  const std::vector<StagePlan> plans = plan_stages(request, 0);
  const StagePlan* most = &plans[0];
  for (const StagePlan& one : plans) {
    if (one.plan.tier(Tier::host).peak > most->plan.tier(Tier::host).peak) most = &one;
  }
  ASSERT_NE(most->stage, plans[0].stage) << "which has the largest peak on the device";
  request.config.offload.host_memory_limit = most->plan.tier(Tier::host).peak - 1;
  const std::vector<StagePlan> limited = plan_stages(request, 0);
  EXPECT_EQ(limited[0].stage, most->stage);
  EXPECT_FALSE(shortages(limited[0].request, limited[0].plan, 0).empty());
}

ProgramResult planned(const std::vector<std::string>& more) {
  std::vector<std::string> arguments{
      "plan",   "--model",    "gpt-mini",   "--set", "tranche.workspace=8MiB", "--ranks", "4",
      "--mesh", "pipeline=4", "--sequence", "64",    "--accumulate",           "4"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return tools::test::run(arguments);
}

/// The object that the program prints; both tests that read it plan it once.
const json& plan_of_four_stages() {
  static const json plan = json::parse(planned({"--json"}).out);
  return plan;
}

TEST(StagePlans, HaveALineEachInTheProgramsTable) {
  const ProgramResult result = planned({});
  EXPECT_EQ(result.status, 0) << result.errors;
  EXPECT_THAT(
      result.out,
      AllOf(HasSubstr("  mesh                   pipeline=4; one rank of each stage, the largest "
                      "first (--rank N has all of one)\n"),
            HasSubstr("  pipeline               4 stages, schedule 1f1b\n"), HasSubstr("stage   rank  units"),
            HasSubstr("embedding to h."), HasSubstr("the last use of embedding")));
  const std::regex line(R"(\n +[0-3] +[0-3]  .*iB.* [48] +[0-9.]+ [KM]iB)");
  const auto begin = std::sregex_iterator(result.out.begin(), result.out.end(), line);
  EXPECT_EQ(std::distance(begin, std::sregex_iterator()), 4) << result.out;

  const json& plan = plan_of_four_stages();
  EXPECT_EQ(plan["schema"], stage_plans_schema);
  EXPECT_EQ(plan["mesh"], "pipeline=4");
  EXPECT_EQ(plan["fits"], nullptr);
  ASSERT_EQ(plan["stages"].size(), 4u);
  for (const json& stage : plan["stages"]) {
    EXPECT_EQ(stage["rank"], stage["pipeline"]);
    EXPECT_EQ(stage["plan"]["rank"], stage["rank"]);
    EXPECT_EQ(stage["peak_bytes"]["device"], stage["plan"]["peak"]["device"]["bytes"]);
    EXPECT_EQ(stage["messages"]["calls"], stage["rank"] == 0 || stage["rank"] == 3 ? 4 : 8);
  }

  const ProgramResult one = planned({"--rank", "2", "--json"});
  EXPECT_EQ(json::parse(one.out)["schema"], "tranche-plan-1") << "--rank plans that rank as ever";
  EXPECT_EQ(json::parse(one.out)["rank"], 2);
}

TEST(StagePlans, GiveTheExitStatusOfTheLargestStage) {
  const json& stages = plan_of_four_stages()["stages"];
  const auto device = [&](std::size_t i) { return stages[i]["peak_bytes"]["device"].get<std::int64_t>(); };
  ASSERT_GT(device(0), device(1));
  const ProgramResult tight = planned({"--device-memory", std::to_string(device(1))});
  EXPECT_EQ(tight.status, 3) << "the largest stage alone does not fit";
  EXPECT_THAT(tight.out, HasSubstr(") does not fit in "));
  const ProgramResult enough = planned({"--device-memory", std::to_string(device(0))});
  EXPECT_EQ(enough.status, 0) << enough.errors;
  EXPECT_THAT(enough.out, HasSubstr("0 B are left on stage "));
  EXPECT_EQ(planned({"--json", "--device-memory", std::to_string(device(1))}).status, 3);
}

// Compares the schedules: those that the batch allows, the shortest that fits first.
TEST(StagePlans, CompareTheSchedulesThatTheBatchAllows) {
  PlanRequest request = three_stages();
  request.config.accumulation_steps = 6;
  const auto names = [&](std::int64_t budget) {
    std::vector<std::string> found;
    for (const ScheduleChoice& one : schedule_choices(request, plan_stages(request, budget), budget)) {
      found.push_back(one.name + (one.refused.empty() ? "" : " refused") + (one.fits ? "" : " does not fit"));
    }
    return found;
  };
  const std::vector<ScheduleChoice> all = schedule_choices(request, plan_stages(request, 0), 0);
  std::map<std::string, ScheduleChoice> by_name;
  for (const ScheduleChoice& one : all) by_name[one.name] = one;
  EXPECT_GT(by_name.at("afab").peak, by_name.at("1f1b").peak);
  EXPECT_GE(by_name.at("afab").length, by_name.at("1f1b").length);
  EXPECT_LT(by_name.at("zb-h1").length, by_name.at("1f1b").length);
  for (std::size_t i = 1; i < all.size(); ++i) {
    if (all[i].refused.empty()) {
      EXPECT_LE(all[i - 1].length, all[i].length);
    }
  }
  EXPECT_THAT(schedule_choices_text(all),
              AllOf(HasSubstr("zb-h1"), HasSubstr(" %"), HasSubstr("device peak")));
  const std::vector<std::string> within = names(by_name.at("afab").peak - 1);
  EXPECT_THAT(within, testing::Contains("afab does not fit"));
  EXPECT_THAT(within.front(), Not(HasSubstr("does not fit")));
  request.config.accumulation_steps = 4;
  const std::vector<ScheduleChoice> four = schedule_choices(request, plan_stages(request, 0), 0);
  EXPECT_EQ(four.back().name, "interleaved") << "three stages take multiples of three";
  EXPECT_FALSE(four.back().refused.empty());
  EXPECT_TRUE(four.back().fits) << "what is refused takes nothing";
  EXPECT_THAT(
      schedule_choices_text(four),
      HasSubstr(
          "interleaved    not here: tranche.pipeline_schedule: schedule interleaved takes micro-batches "
          "in rounds of 3"));
  const json schedules = json::parse(with_schedules("{}", four))["schedules"];
  EXPECT_EQ(schedules.size(), 6u);
  EXPECT_EQ(schedules[0]["fits"], true);
  EXPECT_GT(schedules[0]["peak_bytes"], 0);
  EXPECT_THAT(schedules[5]["refused"].get<std::string>(), HasSubstr("takes micro-batches in rounds of 3"));
  request.device = DeviceKind::cuda;
  request.config.accumulation_steps = 6;
  EXPECT_THAT(schedule_choices_text(schedule_choices(request, plan_stages(request, 0), 0)),
              Not(HasSubstr("not here")))
      << "GPUs run all of them";
  request.device = DeviceKind::cpu;
  request.config.mesh = "shard=*";
  EXPECT_TRUE(schedule_choices(request, {}, 0).empty());
  EXPECT_EQ(schedule_choices_text({}), "");
}

}  // namespace
}  // namespace tranche::planner
