// The arithmetic of scaling studies, and their texts.

#include "tools/scale/scale_results.h"

#include <gmock/gmock.h>

#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "tests/tools/temporary.h"
#include "tools/scale/scale.h"
#include "tranche/core/error.h"
#include "tranche/models/llama.h"

namespace tranche::tools {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

/// Two steps of warm-up and two timed ones: 100 positions, 14 of them learned, in 0.5 + 0.5 + (0.3 + 0.7)
/// seconds.
json report() {
  return json::parse(
      R"({"world": 2, "stage": 3, "config": {"tranche": {}}, "weights_digest": "ab", "numerics_fingerprint": "cpu",
      "matmul_peak_flops": 5000.0, "model": {"flops_per_token": 10.0, "parameters": 4},
      "placement": {"ranks_on_host": 2, "threads": 1, "cores": 4, "host_cores": 8},
      "traffic": {"all_gather": {"calls": 1, "elements": 10, "bytes": 20}, "reduce_scatter": {"calls": 1, "elements": 5, "bytes": 10},
                  "control": {"all_reduce": {"calls": 9, "elements": 99, "bytes": 999}}, "formula_elements": 16, "formula_bytes": 31},
      "memory": {"device": {"peak_bytes": 1000, "persistent": {"parameters": 100, "gradients": 200, "optimizer": 300, "other": 9}},
                 "host": {"peak_bytes": 50}},
      "steps": [
        {"tokens": 7, "positions": 50, "seconds": 9, "between_seconds": 9, "update_seconds": 9, "exposed_gather_seconds": 9,
         "exposed_reduce_seconds": 9, "exposed_offload_seconds": 9, "exposed_message_seconds": 9, "cpu_seconds": 9},
        {"tokens": 7, "positions": 50, "seconds": 9, "between_seconds": 9, "update_seconds": 9, "exposed_gather_seconds": 9,
         "exposed_reduce_seconds": 9, "exposed_offload_seconds": 9, "exposed_message_seconds": 9, "cpu_seconds": 9},
        {"tokens": 7, "positions": 50, "seconds": 1.0, "between_seconds": 0.25, "update_seconds": 0.25, "exposed_gather_seconds": 0.125,
         "exposed_reduce_seconds": 0.0625, "exposed_offload_seconds": 0.0, "exposed_message_seconds": 0.125, "cpu_seconds": 2.0},
        {"tokens": 7, "positions": 50, "seconds": 0.5, "between_seconds": 0.25, "update_seconds": 0.0, "exposed_gather_seconds": 0.125,
         "exposed_reduce_seconds": 0.0625, "exposed_offload_seconds": 0.125, "exposed_message_seconds": 0.0, "cpu_seconds": 1.0}]})");
}

TEST(ScaleFormula, IsTheStateThatAPlanHoldsOnEveryMesh) {
  planner::PlanRequest request;
  request.model.name = "llama-mini";
  models::LlamaConfig model = models::LlamaConfig::preset("llama-mini");
  model.key_value_heads = 2;
  model.vocabulary += 1;  // so that ranks of tensor have unequal parts
  request.model.language = std::make_shared<models::Llama>(model);
  request.sequence = 16;
  request.ranks = 8;
  request.config.workspace_bytes = 8 << 20;
  request.config.accumulation_steps = 2;
  for (const char* mesh :
       {"", "replicate=2, shard=4", "shard=4, tensor=2", "shard=2, tensor=4", "pipeline=2, shard=4",
        "pipeline=2, shard=2, tensor=2", "replicate=4, tensor=2", "shard=4, context=2",
        "pipeline=2, context=2, tensor=2", "replicate=2, context=4"}) {
    for (const Replicate replicate : {Replicate::all, Replicate::parameters}) {
      for (int stage = 0; stage <= 3; ++stage) {
        if (replicate == Replicate::parameters &&
            (stage == 0 || std::string(mesh).find("replicate") == std::string::npos)) {
          continue;
        }
        request.config.mesh = mesh;
        request.config.stage = stage;
        request.config.replicate = replicate;
        request.rank = 7;
        Config config = request.config;
        validate_config(config, request.ranks);
        const planner::PlanResult plan = planner::plan_run(request);
        const CategoryBytes& held = plan.tier(Tier::device).persistent;
        const std::int64_t state =
            held[Category::parameters] + held[Category::gradients] + held[Category::optimizer];
        EXPECT_NEAR(static_cast<double>(formula_state(plan, config)), static_cast<double>(state),
                    1e-3 * static_cast<double>(state))
            << mesh << ", stage " << stage << ", replicate " << name_of(replicate);
      }
    }
  }
}

TEST(ScaleFigures, LeaveWarmUpOutAndAddUp) {
  const RunFigures run = figures_of(report().dump(), 2);
  EXPECT_EQ(run.ranks, 2);
  EXPECT_EQ(run.stage, 3);
  EXPECT_DOUBLE_EQ(run.tokens_per_second, 50);
  EXPECT_DOUBLE_EQ(run.tokens_per_step, 50);
  EXPECT_DOUBLE_EQ(run.cpu_seconds_per_token, 0.03);
  EXPECT_DOUBLE_EQ(run.step.gather, 0.125);
  EXPECT_DOUBLE_EQ(run.step.reduce, 0.0625);
  EXPECT_DOUBLE_EQ(run.step.update, 0.125);
  EXPECT_DOUBLE_EQ(run.step.other, 0.25 + 0.0625);
  EXPECT_DOUBLE_EQ(run.step.seconds(), 1.0);
  EXPECT_DOUBLE_EQ(run.step.messages, 0.0625);
  EXPECT_DOUBLE_EQ(run.step.compute, 1.0 - 0.125 - 0.0625 - 0.0625 - 0.125 - 0.3125);
  EXPECT_DOUBLE_EQ(run.step.exposed(), 0.25);
  EXPECT_EQ(run.schedule, "1f1b") << "the default, which a report does not write";
  json other = report();
  other["config"]["tranche"]["pipeline_schedule"] = "zb-h1";
  EXPECT_EQ(figures_of(other.dump(), 2).schedule, "zb-h1");
  EXPECT_EQ(run.elements, 15) << "control traffic is not the formula's";
  EXPECT_EQ(run.bytes, 30);
  EXPECT_EQ(run.formula_bytes, 31) << "the engine's word, not what was sent";
  EXPECT_EQ(run.formula_elements, 16);
  EXPECT_EQ(run.state, 600);
  EXPECT_THAT(run.peak, ElementsAre(1000, 50, 0));
  EXPECT_DOUBLE_EQ(run.peak_flops, 5000);
  EXPECT_DOUBLE_EQ(run.peak_share(4000), 50 * 10.0 / 4000);
}

TEST(ScaleFigures, SayWhatAReportLacks) {
  const auto message = [](const std::string& text, std::int64_t warmup = 2) {
    return test::message_of<Error>([&] { figures_of(text, warmup); });
  };
  EXPECT_THAT(message("{"), HasSubstr("a report (docs/reference/report.md) is not JSON: line 1, column 2"));
  EXPECT_EQ(message(report().dump(), 4), "a report of 4 steps, of which none is behind 4 of warm-up");
  for (const char* key : {"world", "traffic", "placement", "memory", "weights_digest"}) {
    json document = report();
    document.erase(key);
    EXPECT_THAT(message(document.dump()), AllOf(HasSubstr("docs/reference/report.md"), HasSubstr(key)));
  }
  json document = report();
  document["steps"][3].erase("update_seconds");
  EXPECT_THAT(message(document.dump()), HasSubstr("update_seconds"));
}

TEST(ScaleFormula, IsTheTableOfTheDesign) {
  constexpr int adam = 8;
  for (const int n : {1, 2, 4, 64}) {
    // 16-bit training, g = 4: boundary, then micro_batch.
    EXPECT_DOUBLE_EQ(state_bytes_per_parameter(0, true, n, 2, 4, 4, adam), 18);
    EXPECT_DOUBLE_EQ(state_bytes_per_parameter(1, true, n, 2, 4, 4, adam), 6 + 12.0 / n);
    EXPECT_DOUBLE_EQ(state_bytes_per_parameter(2, true, n, 2, 4, 4, adam), 6 + 12.0 / n);
    EXPECT_DOUBLE_EQ(state_bytes_per_parameter(3, true, n, 2, 4, 4, adam), 4 + 14.0 / n);
    EXPECT_DOUBLE_EQ(state_bytes_per_parameter(0, false, n, 2, 4, 4, adam), 18);
    EXPECT_DOUBLE_EQ(state_bytes_per_parameter(1, false, n, 2, 4, 4, adam), 2 + 16.0 / n);
    EXPECT_DOUBLE_EQ(state_bytes_per_parameter(2, false, n, 2, 4, 4, adam), 2 + 16.0 / n);
    EXPECT_DOUBLE_EQ(state_bytes_per_parameter(3, false, n, 2, 4, 4, adam), 18.0 / n);
    // fp32 has no second copy of the weights.
    EXPECT_DOUBLE_EQ(state_bytes_per_parameter(0, true, n, 4, 4, 0, adam), 16);
    EXPECT_DOUBLE_EQ(state_bytes_per_parameter(1, true, n, 4, 4, 0, adam), 8 + 8.0 / n);
    EXPECT_DOUBLE_EQ(state_bytes_per_parameter(2, false, n, 4, 4, 0, adam), 4 + 12.0 / n);
    EXPECT_DOUBLE_EQ(state_bytes_per_parameter(3, false, n, 4, 4, 0, adam), 16.0 / n);
    // The figures of the ZeRO paper, with gradients in 16 bits.
    EXPECT_DOUBLE_EQ(state_bytes_per_parameter(2, false, n, 2, 2, 4, adam), 2 + 14.0 / n);
  }
}

TEST(ScaleSpread, IsMedianLeastAndMost) {
  const auto all = [](std::vector<double> values) {
    const Spread spread = spread_of(std::move(values));
    return std::vector<double>{spread.middle, spread.low, spread.high};
  };
  EXPECT_THAT(all({}), ElementsAre(0, 0, 0));
  EXPECT_THAT(all({3}), ElementsAre(3, 3, 3));
  EXPECT_THAT(all({9, 1, 4}), ElementsAre(4, 1, 9));
  EXPECT_THAT(all({9, 1, 4, 6}), ElementsAre(5, 1, 9));
}

StudyFacts facts() {
  StudyFacts facts;
  facts.model = "gpt-nano";
  facts.version = "0.1.0";
  facts.commit = "abc";
  facts.parameters = 12345678;
  facts.sequence = 16;
  facts.repeats = 2;
  facts.dtype = "bf16";
  facts.node.cpu = "A \"CPU\"";
  facts.node.cores = 4;
  facts.begun = "2026-11-22 05:10 UTC";
  facts.load_average = 1.25;
  facts.ranks = {1, 2, 8};
  facts.stages = {0, 3};
  for (const int stage : facts.stages) {
    for (const int ranks : {1, 2, 4, 8}) {
      PointPlan plan;
      plan.ranks = ranks;
      plan.stage = stage;
      plan.micro_batch = 4;
      plan.batch = 4 * ranks;
      plan.ranks_per_node = ranks;
      plan.bytes = 30;
      plan.peak = {1000, 0, 0};
      plan.state = plan.formula_state = 600;
      facts.curves[{stage, ""}].push_back(plan);
      if (ranks != 4) facts.plans[{ranks, stage}] = plan;
    }
  }
  return facts;
}

RunFigures run_of(int ranks, int stage, int repeat, double tokens_per_second) {
  RunFigures run = figures_of(report().dump(), 2);
  run.schedule.clear();  // the study gives none
  run.ranks = run.ranks_on_node = ranks;
  run.stage = stage;
  run.repeat = repeat;
  run.tokens_per_second = tokens_per_second;
  run.cpu_seconds_per_token = 0.01 * ranks;
  run.peak = {1000, 0, 0};
  run.formula_elements = run.elements;
  run.formula_bytes = run.bytes;
  return run;
}

std::vector<RunFigures> all_runs() {
  std::vector<RunFigures> runs;
  for (const int repeat : {2, 1}) {  // their order does not matter
    // In the second repeat the machine is half as fast.
    const double speed = repeat == 1 ? 1 : 0.5;
    for (const int stage : {3, 0}) {
      runs.push_back(run_of(1, stage, repeat, 100 * speed));
      runs.push_back(run_of(2, stage, repeat, (stage == 0 ? 180 : 150) * speed));
      runs.push_back(run_of(8, stage, repeat, 120 * speed));
      if (stage == 3 && repeat == 1) runs[runs.size() - 2].peak_flops = 8000;
    }
  }
  return runs;
}

TEST(ScaleResults, EfficiencyIsWithinRepeatsAndNotClaimedForSharedCores) {
  const StudyResults results = results_of(facts(), all_runs());
  ASSERT_EQ(results.points.size(), 6u);
  EXPECT_TRUE(results.whole() && results.differences.empty());
  EXPECT_EQ(base_ranks(results), 1);
  const PointResult &one = results.points[0], &two = results.points[2], &two_3 = results.points[3],
                    &eight = results.points[4];
  EXPECT_EQ(two.plan.ranks, 2);
  EXPECT_EQ(two.plan.stage, 0);
  ASSERT_TRUE(one.efficiency && two.efficiency && two_3.efficiency);
  EXPECT_DOUBLE_EQ(one.efficiency->middle, 1);
  // Efficiencies are formed within a repeat. If rates of different repeats were compared, it would be 0.45 to
  // 1.8.
  EXPECT_DOUBLE_EQ(two.efficiency->low, 0.9);
  EXPECT_DOUBLE_EQ(two.efficiency->high, 0.9);
  EXPECT_DOUBLE_EQ(two_3.efficiency->middle, 0.75);
  EXPECT_DOUBLE_EQ(two.tokens_per_second.middle, 135);
  EXPECT_EQ(two.shown.repeat, 2) << "the slower of two";
  ASSERT_EQ(two.runs.size(), 2u);
  EXPECT_EQ(two.runs[0].repeat, 1);
  EXPECT_FALSE(two.oversubscribed);
  EXPECT_DOUBLE_EQ(two.peak_flops, 8000) << "the highest among runs of two ranks";
  EXPECT_TRUE(eight.oversubscribed) << "8 ranks, 4 cores";
  EXPECT_FALSE(eight.efficiency);
  ASSERT_TRUE(eight.work_inflation);
  EXPECT_DOUBLE_EQ(eight.work_inflation->middle, 8);
}

TEST(ScaleResults, ThreadsCountAndWhoIsBoundSeesItsOwnCoresOnly) {
  StudyFacts known = facts();
  std::vector<RunFigures> runs = all_runs();
  for (RunFigures& run : runs) run.threads = 4;
  EXPECT_TRUE(results_of(known, runs).points[2].oversubscribed) << "2 ranks of 4 threads on 4 cores";
  EXPECT_FALSE(results_of(known, runs).points[0].oversubscribed);
  known.launcher_binds = true;
  EXPECT_FALSE(results_of(known, runs).points[2].oversubscribed) << "the host has 8";
}

TEST(ScaleResults, SayWhatIsNotAsPredicted) {
  std::vector<RunFigures> runs = all_runs();
  for (RunFigures& run : runs) {
    if (run.ranks == 2 && run.stage == 3) run.bytes += 2;
    if (run.ranks == 8 && run.stage == 0) run.peak[0] = 1001;
    if (run.ranks == 1 && run.stage == 0 && run.repeat == 2) run.weights_digest = "other";
  }
  runs.pop_back();
  StudyResults results = results_of(facts(), runs);
  EXPECT_FALSE(results.whole());
  EXPECT_THAT(results.differences,
              ElementsAre("1 rank, stage 0: repeats ended with different weights",
                          "2 ranks, stage 3: 15 elements and 32 bytes were sent, by the formula 15 and 30",
                          "2 ranks, stage 3: 32 bytes were sent, 30 were planned",
                          "8 ranks, stage 0: device memory of 1001 bytes was measured, 1000 were predicted"));
  results.failures.push_back(
      {8, 0, 1, 5, "repeat 1, 8 ranks, stage 0 failed", "mpirun -n 8 x", "line 1\nline 2"});
  const std::string table = results_table(facts(), results);
  EXPECT_THAT(table, AllOf(HasSubstr("- 2 ranks, stage 3: 15 elements"),
                           HasSubstr("| 32 | 30 (**differs**) |"), HasSubstr("0.00 (**differs**)"),
                           HasSubstr("## Runs that failed"), HasSubstr("    mpirun -n 8 x\n"),
                           HasSubstr("    line 2\n"), HasSubstr("11 of 12 runs done")));
}

TEST(ScaleResults, PlansAreOfTheNodesThatTheRunsHad) {
  StudyFacts known = facts();
  known.plans.at({2, 0}).ranks_per_node = 1;
  known.plans.at({2, 3}).ranks_per_node = 1;
  known.plans.at({2, 3}).bytes = 31;
  known.plans.at({2, 3}).placed = false;  // unknown placements are not compared
  EXPECT_THAT(results_of(known, all_runs()).differences,
              ElementsAre("2 ranks, stage 0: 2 ranks were on the node of rank 0, 1 were planned: say "
                          "--ranks-per-node"));
  const json document = json::parse(results_json(known, results_of(known, all_runs()), "{}"));
  EXPECT_EQ(document["points"][2]["ranks_per_node"], 1);
  EXPECT_EQ(document["points"][2]["bytes_predicted"], 30);
  EXPECT_TRUE(document["points"][3]["ranks_per_node"].is_null());
  EXPECT_TRUE(document["points"][3]["bytes_predicted"].is_null());
}

TEST(ScaleResults, TableClaimsNothingOfSharedCores) {
  const std::string table = results_table(facts(), results_of(facts(), all_runs()));
  const std::size_t shared = table.find("## More ranks than cores");
  ASSERT_NE(shared, std::string::npos);
  const std::string claimed = table.substr(0, shared), rest = table.substr(shared);
  EXPECT_THAT(claimed, AllOf(HasSubstr("# Weak scaling of gpt-nano"),
                             HasSubstr("12,345,678 parameters in bf16"), HasSubstr("commit abc"),
                             HasSubstr("begun 2026-11-22 05:10 UTC at a load average of 1.25"),
                             HasSubstr("| 2 | 0 | 8 | 135 (90 to 180) | 67.5 | 90.0 % | "
                                       "1000.0 | 250.0 | 30 | 30 | 0.00 | 0.00 |"),
                             Not(HasSubstr("| 8 | 0 |"))));
  EXPECT_THAT(rest, AllOf(HasSubstr("| 8 | 0 | 32 | 8.000 | 30 | 30 |"), Not(HasSubstr("tokens/s ("))));
  EXPECT_THAT(rest, HasSubstr("to the byte, in every run.\n"));
  const std::string none = results_table(facts(), results_of(facts(), {}));
  EXPECT_THAT(
      none, AllOf(HasSubstr("No run ended well, so nothing was measured."), Not(HasSubstr("in every run"))));
  std::vector<RunFigures> some = all_runs();
  some.pop_back();
  EXPECT_THAT(results_table(facts(), results_of(facts(), some)),
              HasSubstr(fmt::format("in every run of the {} that ended well.\n", some.size())));
  StudyFacts strong = facts();
  strong.strong = true;
  EXPECT_THAT(results_table(strong, results_of(strong, all_runs())), HasSubstr("strong efficiency"));
}

TEST(ScaleResults, JsonAndCsvHaveEveryRun) {
  const StudyResults results = results_of(facts(), all_runs());
  const json document = json::parse(results_json(facts(), results, R"({"repeats": 2})"));
  EXPECT_EQ(document["schema"], "tranche-scale-1");
  EXPECT_EQ(document["settings"]["repeats"], 2);
  EXPECT_EQ(document["commit"], "abc");
  EXPECT_EQ(document["machine"]["cpu"], "A \"CPU\"");
  EXPECT_TRUE(document["complete"]);
  ASSERT_EQ(document["points"].size(), 6u);
  EXPECT_EQ(document["points"][2]["efficiency"]["median"], 0.9);
  EXPECT_FALSE(document["points"][4].contains("efficiency"));
  EXPECT_EQ(document["points"][4]["oversubscribed"], true);
  EXPECT_EQ(document["points"][2]["runs"][1]["bytes_sent"], 30);
  EXPECT_EQ(document["points"][2]["runs"][1]["memory_measured_bytes"]["device"], 1000);
  const std::string csv = results_csv(facts(), results);
  EXPECT_EQ(std::count(csv.begin(), csv.end(), '\n'), 13);
  const std::string head = csv.substr(0, csv.find('\n'));
  for (std::size_t at = 0; at < csv.size(); at = csv.find('\n', at) + 1) {
    const std::string line = csv.substr(at, csv.find('\n', at) - at);
    EXPECT_EQ(std::count(line.begin(), line.end(), ','), std::count(head.begin(), head.end(), ',')) << line;
  }
  EXPECT_THAT(csv, HasSubstr("\n2,0,1,weak,4,1,8,0,180,"));
}

/// Two schedules of the same pipeline at stage 0; the second is 1.25 times as fast.
StudyFacts two_schedules() {
  StudyFacts known = facts();
  known.ranks = {2};
  known.stages = {0};
  known.schedules = {"1f1b", "zb-h1"};
  const PointPlan plan = known.plans.at({2, 0});
  known.plans.clear();
  known.curves.clear();
  for (const std::string& schedule : known.schedules) {
    PointPlan own = plan;
    own.schedule = schedule;
    known.plans[own.key()] = own;
    known.curves[{0, "", schedule}] = {own};
  }
  return known;
}

TEST(ScaleResults, CompareSchedules) {
  const StudyFacts known = two_schedules();
  std::vector<RunFigures> runs;
  for (const int repeat : {1, 2}) {
    for (const std::string& schedule : known.schedules) {
      runs.push_back(run_of(2, 0, repeat, schedule == "1f1b" ? 100 : 125));
      runs.back().schedule = schedule;
    }
  }
  runs.back().peak[0] = 999;
  StudyResults results = results_of(known, runs);
  ASSERT_EQ(results.points.size(), 2u);
  EXPECT_TRUE(results.whole());
  EXPECT_DOUBLE_EQ(results.points[0].tokens_per_second.middle, 100);
  EXPECT_DOUBLE_EQ(results.points[1].tokens_per_second.middle, 125);
  EXPECT_THAT(results.differences,
              ElementsAre("2 ranks, stage 0, schedule zb-h1: device memory of 999 bytes was "
                          "measured, 1000 were predicted"));
  const std::string table = results_table(known, results);
  EXPECT_THAT(
      table, AllOf(HasSubstr("| ranks | stage | schedule | batch |"), HasSubstr("| 2 | 0 | 1f1b | 8 | 100 |"),
                   HasSubstr("| 2 | 0 | zb-h1 | 8 | 125 |"), HasSubstr("same stage and schedule, within")));
  const json document = json::parse(results_json(known, results, "{}"));
  EXPECT_EQ(document["points"][1]["pipeline_schedule"], "zb-h1");
  EXPECT_EQ(document["points"][1]["runs"][0]["exposed_message_seconds"], 0.0625);
  EXPECT_THAT(results_csv(known, results), HasSubstr(",\"\",\"zb-h1\",0.0625\n"));
  std::map<std::string, std::string> plots;
  for (auto& [name, svg] : results_plots(known, results)) plots[name] = svg;
  EXPECT_THAT(plots["throughput.svg"], AllOf(HasSubstr(">stage 0, 1f1b<"), HasSubstr(">stage 0, zb-h1<")));
  EXPECT_THAT(plots["time.svg"], AllOf(HasSubstr("stage, schedule 1: 1f1b; 2: zb-h1"), HasSubstr(">0 (2)<"),
                                       HasSubstr(">exposed messages<")));
}

TEST(ScaleResults, AMeshWithoutAPipelineHasOneRunForAllSchedules) {
  StudyFacts known = two_schedules();
  const PointPlan plan = known.plans.begin()->second;
  known.meshes = {"shard=*", "pipeline=2"};
  known.without_pipeline = {{2, "shard=*"}};
  known.plans.clear();
  known.curves.clear();
  std::vector<RunFigures> runs;
  for (const auto& [mesh, schedule] :
       {std::pair("shard=*", ""), std::pair("pipeline=2", "1f1b"), std::pair("pipeline=2", "zb-h1")}) {
    PointPlan own = plan;
    own.mesh = mesh;
    own.schedule = schedule;
    known.plans[own.key()] = own;
    known.curves[{0, mesh, schedule}] = {own};
    for (const int repeat : {1, 2}) {
      runs.push_back(run_of(2, 0, repeat, 100));
      runs.back().mesh = mesh;
      runs.back().schedule = schedule;
    }
  }
  EXPECT_THAT(known.variants(), ElementsAre("shard=*", "pipeline=2, 1f1b", "pipeline=2, zb-h1"));
  const StudyResults results = results_of(known, runs);
  EXPECT_EQ(results.points.size(), 3u);
  EXPECT_TRUE(results.whole());
  EXPECT_THAT(results_table(known, results), AllOf(HasSubstr("| 2 | 0 | shard=* | - | 8 | 100 |"),
                                                   HasSubstr("| 2 | 0 | pipeline=2 | zb-h1 | 8 | 100 |")));
  EXPECT_FALSE(results_plots(known, results).empty());
}

TEST(ScaleResults, ChainsHaveNoFormulaToDifferFrom) {
  json chained = report();
  chained["traffic"]["formula_elements"] = chained["traffic"]["formula_bytes"] = nullptr;
  const RunFigures of_chains = figures_of(chained.dump(), 2);
  std::vector<RunFigures> runs = all_runs();
  for (RunFigures& run : runs) {
    run.formula_elements = of_chains.formula_elements;
    run.formula_bytes = of_chains.formula_bytes;
  }
  const StudyResults results = results_of(facts(), runs);
  EXPECT_THAT(results.differences, ElementsAre());
  EXPECT_THAT(results_table(facts(), results), AllOf(HasSubstr("| 30 | - |"), Not(HasSubstr("differs"))));
  EXPECT_TRUE(
      json::parse(results_json(facts(), results, "{}"))["points"][0]["runs"][0]["formula_bytes"].is_null());
  EXPECT_THAT(results_csv(facts(), results), HasSubstr(",15,,30,,"));
}

TEST(ScalePlots, ShowIdealMarksAndCurves) {
  const StudyResults results = results_of(facts(), all_runs());
  std::map<std::string, std::string> plots;
  for (auto& [name, svg] : results_plots(facts(), results)) plots[name] = svg;
  ASSERT_EQ(plots.size(), 5u);
  EXPECT_THAT(plots["throughput.svg"],
              AllOf(HasSubstr("ideal, from 1 rank<"), HasSubstr(">ranks share cores<"),
                    HasSubstr(">on shared cores<"), HasSubstr(">stage 3<"), HasSubstr("stroke-dasharray"),
                    HasSubstr(">median, lowest and highest of the repeats<")));
  EXPECT_THAT(plots["time.svg"],
              AllOf(HasSubstr(">step time (ms)<"), HasSubstr("rank 0 in the repeat of median speed"),
                    HasSubstr(">exposed gather<"), HasSubstr(">1000<"), Not(HasSubstr(">8<"))));
  EXPECT_THAT(plots["time_shared_cores.svg"], AllOf(HasSubstr("no speed-up is claimed"), HasSubstr(">8<")));
  EXPECT_THAT(plots["memory.svg"], AllOf(HasSubstr(">measured<"), HasSubstr(">predicted<"),
                                         HasSubstr(">stage 0<"), HasSubstr(">stage 3<")));
  EXPECT_THAT(plots["model_state.svg"], AllOf(HasSubstr(">formula<"), HasSubstr(">stage 3<")));
  StudyFacts away = facts();
  away.any_offload = true;
  EXPECT_EQ(results_plots(away, results).size(), 4u) << "the formula is of all tiers together";
  EXPECT_TRUE(results_plots(facts(), results_of(facts(), {})).empty());
}

TEST(ScaleTimeLeft, GoesByRunsOfAsManyRanks) {
  TimeLeft left;
  EXPECT_FALSE(std::isfinite(left.of({1, 0, 1})));
  left.took({1, 0, 1}, 2);
  EXPECT_DOUBLE_EQ(left.of({4, 0, 1}), 8) << "nothing is known of four: four times one";
  left.took({4, 0, 1}, 3);
  left.took({4, 3, 1}, 5);
  EXPECT_DOUBLE_EQ(left.of({4, 2, 2}), 4);
  EXPECT_DOUBLE_EQ(left.of({1, 3, 2}), 2);
}

}  // namespace
}  // namespace tranche::tools
