#include "tranche/tools/report.h"

#include <gmock/gmock.h>

#include <limits>
#include <nlohmann/json.hpp>

namespace tranche::tools {
namespace {

using nlohmann::json;

TEST(Report, WritesWhatItWasGiven) {
  Report report;
  report.set_start(2, 3, R"({"zero_optimization": {"stage": 3}})", "cpu", "gpt-nano", "a.txt");
  StepResult step;
  step.step = 1;
  step.applied = true;
  step.loss = 2.5;
  report.add_step(step);
  report.add_step_digest({{1, 0xabcdef}});
  step.step = 2;
  step.applied = false;
  step.skipped_because = "norm";
  report.add_step(step);
  report.add_validation(1, {3.5, 10});
  report.add_validation(2, {3.25, 10});
  report.set_ngrams({1, 2, 3});
  const json document = json::parse(report.to_json());
  EXPECT_EQ(document["schema"], "tranche-report-1");
  EXPECT_EQ(document["world"], 2);
  EXPECT_EQ(document["config"]["zero_optimization"]["stage"], 3);
  ASSERT_EQ(document["steps"].size(), 2u);
  EXPECT_EQ(document["steps"][0]["weights_digest"], "00000000000000010000000000abcdef");
  EXPECT_FALSE(document["steps"][1].contains("weights_digest"));
  EXPECT_EQ(document["steps"][1]["skipped_because"], "norm");
  EXPECT_EQ(document["validation"].size(), 2u);
  EXPECT_EQ(document["validation_loss"], 3.25) << "the last";
  EXPECT_EQ(document["trigram_entropy"], 3);
}

TEST(Report, StaysJsonWhateverHappens) {
  Report report;
  StepResult step;
  step.loss = std::numeric_limits<double>::quiet_NaN();
  step.gradient_norm = std::numeric_limits<double>::infinity();
  report.add_step(step);
  report.set_sample("not \xff utf-8");
  const json document = json::parse(report.to_json());
  EXPECT_TRUE(document["steps"][0]["loss"].is_null());
  EXPECT_TRUE(document["steps"][0]["grad_norm"].is_null());
  EXPECT_EQ(document["sample"], "not \xef\xbf\xbd utf-8");
}

}  // namespace
}  // namespace tranche::tools
