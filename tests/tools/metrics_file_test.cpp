// --metrics: lines that are there as soon as steps are, and go on where a run does.
#include "tools/metrics_file.h"

#include <gmock/gmock.h>
#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/tools/program_fixture.h"
#include "tools/report.h"
#include "tranche/core/error.h"

namespace tranche::tools {
namespace {

using nlohmann::json;
using test::message_of;
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

TEST(MetricsFile, HasALineAsSoonAsItIsAdded) {
  const TemporaryFolder folder;
  MetricsFile metrics(folder.path("m.jsonl"), 0);
  StepResult result;
  result.step = 1;
  result.loss = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(metrics.add(step_line(result)), "");
  EXPECT_EQ(metrics.add(validation_line(1, {.loss = 2.5, .tokens = 7})), "");
  const auto lines = lines_of(folder.path("m.jsonl"));  // while it is open
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0]["loss"], nullptr) << "JSON has no NaN";
  EXPECT_EQ(lines[1], json::parse(R"({"step": 1, "validation_loss": 2.5, "tokens": 7})"));
}

TEST(MetricsFile, LinesBehindTheCheckpointAndACutOneGo) {
  const TemporaryFolder folder;
  const std::string path =
      folder.write("m.jsonl",
                   "{\"step\": 1}\n{\"step\": 2}\n{\"step\": 2, \"validation_loss\": 1.5}\n"
                   "{\"step\": 3}\n{\"step\": 4, \"lo");
  MetricsFile metrics(path, 2);
  EXPECT_EQ(metrics.add("{\"step\": 3, \"again\": true}"), "");
  EXPECT_THAT(steps_of(path), ElementsAre(1, 2, 2, 3));
  EXPECT_EQ(lines_of(path)[3]["again"], true);
}

TEST(MetricsFile, OtherFilesAreRefusedUntouched) {
  const TemporaryFolder folder;
  const std::string path = folder.write("notes.txt", "my notes\nof value\n");
  EXPECT_THAT(message_of<ConfigurationError>([&] { MetricsFile(path, 2); }),
              HasSubstr("notes.txt' has lines that are not of such a file; name another, or remove it"));
  EXPECT_EQ(read_file(path), "my notes\nof value\n");
  EXPECT_THAT(message_of<ConfigurationError>([&] { require_metrics(path, false); }),
              HasSubstr("has lines of another run; name another file, remove it, or go on with --resume"));
  require_metrics(path, true);
  require_metrics(folder.path("none"), false);
  require_metrics("", false);
  EXPECT_THAT(message_of<ConfigurationError>([&] { require_metrics("/dev/null", true); }),
              HasSubstr("--metrics '/dev/null'"));
  EXPECT_THAT(message_of<ConfigurationError>([&] { require_metrics(folder.path("no/where"), true); }),
              HasSubstr("--metrics '"));
}

TEST(MetricsFile, AFileThatMayNotGrowIsToldOnce) {
  const TemporaryFolder folder;
  MetricsFile metrics(folder.path("m.jsonl"), 0);
  const auto before = std::signal(SIGXFSZ, SIG_IGN);
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &limit), 0);
  rlimit small = limit;
  small.rlim_cur = 16;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string problem = metrics.add("{\"step\": 1, \"loss\": 5.25}"),
                    again = metrics.add("{\"step\": 2}");
  ::setrlimit(RLIMIT_FSIZE, &limit);
  std::signal(SIGXFSZ, before);
  EXPECT_THAT(problem,
              HasSubstr("m.jsonl' cannot be written any more: File too large; training goes on without"));
  EXPECT_EQ(again, "");
}

TEST(MetricsFile, ARunAndItsResumptionLeaveEveryStepOnce) {
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
  EXPECT_EQ(train({}).status, 2) << "another run's lines are not mixed in";
  EXPECT_EQ(steps_of(path).size(), 8u);
  std::filesystem::remove(path);

  ASSERT_EQ(train({"--steps", "3", "--checkpoint-dir", checkpoints}).status, 0);
  const ProgramResult more = train({"--steps", "5", "--checkpoint-dir", checkpoints, "--resume", "latest"});
  ASSERT_EQ(more.status, 0) << more.errors;
  EXPECT_THAT(steps_of(path), ElementsAre(1, 2, 3, 3, 4, 5, 5));
  EXPECT_EQ(lines_of(path)[4]["loss"], whole["steps"][3]["loss"]) << "the run that never stopped";
}

}  // namespace
}  // namespace tranche::tools
