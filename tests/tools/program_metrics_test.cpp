// --metrics: a line is written with each step, and the file continues when a run is resumed.
#include <gmock/gmock.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/tools/program_fixture.h"

namespace tranche::tools {
namespace {

using nlohmann::json;
using test::ProgramResult;
using test::read_file;
using test::TemporaryFolder;
using test::tiny_train;
using testing::ElementsAre;
using testing::HasSubstr;

std::vector<json> lines_of(const std::string& path) {
  std::vector<json> lines;
  std::istringstream text(read_file(path));
  for (std::string line; std::getline(text, line);) lines.push_back(json::parse(line));
  return lines;
}

std::vector<std::int64_t> steps_of(const std::string& path) {
  std::vector<std::int64_t> steps;
  for (const json& line : lines_of(path)) steps.push_back(line["step"].get<std::int64_t>());
  return steps;
}

TEST(Metrics, ARunAndItsResumptionLeaveEveryStepOnce) {
  const TemporaryFolder folder;
  const std::string path = folder.path("m.jsonl"), checkpoints = folder.path("c"), report = folder.path("r");
  const auto train = [&](std::vector<std::string> more) {
    more.insert(more.end(), {"--metrics", path, "--report", report});
    return test::run(tiny_train(folder, more));
  };
  const ProgramResult first = train({"--steps", "5", "--eval-every", "2"});
  ASSERT_EQ(first.status, 0) << first.errors;
  EXPECT_THAT(steps_of(path), ElementsAre(1, 2, 2, 3, 4, 4, 5, 5)) << "with three validations";
  const json whole = json::parse(read_file(report));
  const json begin = lines_of(path)[0];
  for (const auto& [key, value] : begin.items()) {
    EXPECT_EQ(value, whole["steps"][0][key]) << key << ": a line is what the report has";
  }
  EXPECT_EQ(lines_of(path)[7]["validation_loss"], whole["validation_loss"]);
  const ProgramResult other = train({});
  EXPECT_EQ(other.status, 2);
  EXPECT_THAT(other.errors, HasSubstr("--metrics '" + path + "' has lines of another run; name another"));
  EXPECT_EQ(steps_of(path).size(), 8u);
  std::filesystem::remove(path);

  ASSERT_EQ(train({"--steps", "3", "--checkpoint-dir", checkpoints}).status, 0);
  const ProgramResult more = train({"--steps", "5", "--checkpoint-dir", checkpoints, "--resume", "latest"});
  ASSERT_EQ(more.status, 0) << more.errors;
  EXPECT_THAT(steps_of(path), ElementsAre(1, 2, 3, 3, 4, 5, 5));
  EXPECT_EQ(lines_of(path)[4]["loss"], whole["steps"][3]["loss"]) << "the run that never stopped";
}

TEST(Metrics, LinesOfAnotherRunThatGoAreTold) {
  const TemporaryFolder folder;
  const std::string path = folder.path("m.jsonl");
  const auto train = [&](const std::string& name, std::vector<std::string> more) {
    more.insert(more.end(),
                {"--metrics", path, "--checkpoint-dir", folder.path(name), "--set",
                 "csv_monitor.enabled=true", "--set", "csv_monitor.output_path=" + folder.path("csv")});
    return test::run(tiny_train(folder, more));
  };
  const ProgramResult first = train("a", {"--steps", "8", "--save-every", "4"});
  ASSERT_EQ(first.status, 0) << first.errors;
  EXPECT_THAT(first.out, testing::Not(HasSubstr("removed")));
  const ProgramResult other =
      train("b", {"--steps", "6", "--lr", "0.1", "--resume", folder.path("a") + "/step-00000004"});
  ASSERT_EQ(other.status, 0) << other.errors;
  EXPECT_THAT(
      other.out,
      testing::AllOf(HasSubstr("note: --metrics '" + path +
                               "': 5 lines of steps 5 to 8 behind step 4, from which the run goes on, "
                               "are removed\n"),
                     HasSubstr("Train_Samples_lr.csv': 4 rows behind ")));
}

TEST(Metrics, AndTheReportMayLieInTheFolderThatTheRunMakes) {
  const TemporaryFolder folder;
  const std::string run = folder.path("run");
  const ProgramResult result =
      test::run(tiny_train(folder, {"--checkpoint-dir", run, "--metrics", run + "/m.jsonl", "--report",
                                    run + "/r.json", "--trace", run + "/t.json"}));
  ASSERT_EQ(result.status, 0) << result.errors;
  EXPECT_THAT(steps_of(run + "/m.jsonl"), ElementsAre(1, 2, 3, 3));
  EXPECT_EQ(json::parse(read_file(run + "/r.json"))["steps"].size(), 3u);
  EXPECT_TRUE(std::filesystem::exists(run + "/t.json"));
  const ProgramResult none = test::run(
      tiny_train(folder, {"--checkpoint-dir", folder.path("other"), "--metrics", run + "/no/m.jsonl"}));
  EXPECT_EQ(none.status, 2);
  EXPECT_THAT(none.errors, HasSubstr("m.jsonl' cannot be written: No such file or directory"));
}

TEST(Metrics, TheReportOfARunThatTrainsNothingMoreStays) {
  const TemporaryFolder folder;
  const std::string report = folder.path("r.json");
  const auto train = [&](const std::string& steps) {
    return test::run(tiny_train(folder, {"--steps", steps, "--checkpoint-dir", folder.path("run"), "--resume",
                                         "latest", "--report", report}));
  };
  ASSERT_EQ(train("2").status, 0);
  ASSERT_EQ(train("4").status, 0);
  const std::string text = read_file(report);
  ASSERT_EQ(json::parse(text)["steps"].size(), 2u) << "those since the last start";
  const ProgramResult again = train("4");
  EXPECT_EQ(again.status, 0) << again.errors;
  EXPECT_THAT(again.out, HasSubstr("report: " + report + " stays as it is, because no step was trained\n"));
  EXPECT_EQ(read_file(report), text);
  json other = json::parse(text);
  other["state_digest"] = "0";
  (void)folder.write("r.json", other.dump());
  ASSERT_EQ(train("4").status, 0);
  EXPECT_EQ(json::parse(read_file(report))["state_digest"], json::parse(text)["state_digest"])
      << "the report of another state is replaced";
  std::filesystem::remove(report);
  ASSERT_EQ(train("4").status, 0);
  EXPECT_TRUE(json::parse(read_file(report))["steps"].empty()) << "where there is none, one is written";
}

TEST(Metrics, HaveADigestBeforeTheStepIsSaved) {
  const TemporaryFolder folder;
  const std::string path = folder.path("m.jsonl"), report = folder.path("r");
  const ProgramResult run = test::run(
      tiny_train(folder, {"--metrics", path, "--report", report, "--steps", "4", "--digest-every", "2"}));
  ASSERT_EQ(run.status, 0) << run.errors;
  EXPECT_THAT(steps_of(path), ElementsAre(1, 2, 2, 3, 4, 4, 4)) << "two digests and a validation";
  const json step = json::parse(read_file(report))["steps"][1];
  EXPECT_EQ(lines_of(path)[2], json({{"step", 2},
                                     {"weights_digest", step["weights_digest"]},
                                     {"state_digest", step["state_digest"]}}));
}

}  // namespace
}  // namespace tranche::tools
