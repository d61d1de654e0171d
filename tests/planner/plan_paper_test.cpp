// Compares with the table of the ZeRO paper, and plans models that exceed every machine of ours.

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <string>

#include "core/clock.h"
#include "tranche/models/gpt.h"
#include "tranche/planner/planner.h"

namespace tranche::planner {
namespace {

struct Paper {
  double parameters;  ///< billions
  const char* units;  ///< number of parameters up to the last one
  int ranks[6] = {1, 4, 16, 64, 256, 1024};
  double sharded[3][6];  ///< GB: Pos, Pos+g, Pos+g+p
};

// Rajbhandari, Rasley, Ruwase, He: "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (SC
// 2020), table 1. K = 12, gradients in 16 bits.
const Paper table[] = {
    {7.5,
     R"({"units": [{"name": "block", "repeat": 15, "tensors": {"weight": [20000, 25000]}}]})",
     {1, 4, 16, 64, 256, 1024},
     {{120, 52.5, 35.6, 31.4, 30.4, 30.1},
      {120, 41.3, 21.6, 16.6, 15.4, 15.1},
      {120, 30, 7.5, 1.88, 0.47, 0.12}}},
    {128,
     R"({"units": [{"name": "block", "repeat": 80, "tensors": {"weight": [40000, 40000]}}]})",
     {1, 4, 16, 64, 256, 1024},
     {{2048, 896, 608, 536, 518, 513}, {2048, 704, 368, 284, 263, 257}, {2048, 512, 128, 32, 8, 2}}},
    {1000,
     R"({"units": [{"name": "block", "repeat": 100, "tensors": {"weight": [100000, 100000]}}]})",
     {1, 4, 16, 64, 256, 1024},
     {{16000, 7000, 4750, 4187, 4046, 4011},
      {16000, 5500, 2875, 2218, 2054, 2013},
      {16000, 4000, 1000, 250, 62.5, 15.6}}},
};

TEST(ZeroPaper, Table1) {
  for (const Paper& paper : table) {
    const PlanModel model = parse_unit_list(paper.units, "paper");
    ASSERT_EQ(static_cast<double>(model.list.parameters()), paper.parameters * 1e9);
    for (int level = 0; level < 3; ++level) {
      for (int column = 0; column < 6; ++column) {
        PlanRequest request;
        request.model = model;
        request.ranks = paper.ranks[column];
        request.config.stage =
            level + 1;  // the default policies: boundary for stage 1, micro_batch for 2 and 3
        request.config.precision.accumulation = DataType::bfloat16;
        const PlanResult plan = plan_run(request);
        const double n = request.ranks,
                     held = static_cast<double>(plan.state.parameters + plan.state.gradients +
                                                plan.state.optimizer - plan.state.padding);
        const double formula = paper.parameters * (level == 0   ? 4 + 12 / n
                                                   : level == 1 ? 2 + 14 / n
                                                                : 16 / n);
        const std::string where = std::to_string(paper.parameters) + "B, stage " + std::to_string(level + 1) +
                                  ", " + std::to_string(request.ranks) + " ranks";
        EXPECT_NEAR(held / 1e9, formula, 1e-3 * formula) << where;
        // The paper rounds some of its figures and truncates others, so the bound is one unit of the last
        // printed digit.
        const double printed = paper.sharded[level][column];
        const double digit = printed >= 100 || printed == std::floor(printed) ? 1 : printed >= 2 ? 0.1 : 0.01;
        EXPECT_NEAR(held / 1e9, printed, digit) << where;
        // Allocated bytes equal counted bytes.
        const CategoryBytes& always = plan.tier(Tier::device).persistent;
        EXPECT_EQ(always[Category::parameters], plan.state.parameters) << where;
        EXPECT_EQ(always[Category::gradients], plan.state.gradients) << where;
        EXPECT_EQ(always[Category::optimizer], plan.state.optimizer) << where;
        EXPECT_LT(static_cast<double>(plan.state.padding), 1e-3 * held) << where;
      }
    }
  }
}

/// The peak of this process's memory so far, in KiB.
[[maybe_unused]] std::int64_t peak_resident() {  // unused under sanitizers, which hold memory of their own
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    std::int64_t value = 0;
    if (word == "VmHWM:" && status >> value) return value;
  }
  return 0;
}

TEST(Plan, OfATrillionParametersTakesSecondsAndLittleMemory) {
  models::GptConfig gpt = models::GptConfig::preset("gpt2");
  gpt.layers = 128;
  gpt.width = 25600;
  gpt.heads = 160;
  gpt.vocabulary = 51200;
  gpt.positions = 2048;
  ASSERT_GT(gpt.parameters(), 1'000'000'000'000);
  std::int64_t peaks[3] = {};
  int at = 0;
  for (const int ranks : {1, 1024, 65536}) {
    const detail::Stopwatch clock;
    PlanRequest request;
    request.model.language = std::make_shared<models::Gpt>(gpt);
    request.ranks = ranks;
    request.rank = ranks - 1;
    request.ranks_per_node = 8;
    request.config.stage = 3;
    request.config.accumulation_steps = 4;
    request.config.activation_checkpointing = true;
    const PlanResult plan = plan_run(request);
    peaks[at++] = plan.tier(Tier::device).peak;
    // It takes a third of a second on an idle core; sanitizers and busy machines take many times that.
    EXPECT_LT(clock.seconds(), 60) << ranks;
    if (ranks == 1) continue;
    EXPECT_EQ(plan.formula_elements,
              plan.data.at("all_gather").elements + plan.data.at("reduce_scatter").elements);
  }
  EXPECT_GT(peaks[0], peaks[1]);
  EXPECT_GT(peaks[1], peaks[2]);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  // 230 MiB of it are the program's libraries.
  EXPECT_LT(peak_resident(), 400 * 1024);
#endif
}

TEST(Plan, ManyUnitsAndRanksTakeLittleToo) {
  PlanRequest request;
  request.model =
      parse_unit_list(R"({"units": [{"name": "u", "repeat": 3000, "tensors": {"w": [77]}}]})", "many");
  request.ranks = 65536;
  request.config.stage = 1;
  const detail::Stopwatch clock;
  const PlanResult plan = plan_run(request);
  EXPECT_EQ(plan.state.parameters, std::int64_t{3000} * 65536 * 256 * 2);  // the smallest shard of each unit
  EXPECT_LT(clock.seconds(), 60);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_LT(peak_resident(), 400 * 1024);
#endif
}

}  // namespace
}  // namespace tranche::planner
