#include "tranche/training/metrics.h"

#include <gmock/gmock.h>
#include <sys/resource.h>

#include <csignal>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/tools/temporary.h"
#include "tranche/core/error.h"

namespace tranche::training {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;
using tools::test::message_of;
using tools::test::read_file;
using tools::test::TemporaryFolder;

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
  const auto lines = lines_of(folder.path("m.jsonl"));  // while the file is open
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0]["loss"], nullptr) << "JSON has no NaN";
  EXPECT_EQ(lines[1], json::parse(R"({"step": 1, "validation_loss": 2.5, "tokens": 7})"));
  EXPECT_EQ(validation_line(2, {.loss = 1.5, .tokens = 8}, "code"),
            R"({"step":2,"validation_loss":1.5,"tokens":8,"set":"code"})");
}

TEST(MetricsFile, ALossOverNoTokensIsNull) {
  EXPECT_EQ(validation_line(2, {.loss = 0, .tokens = 0}), R"({"step":2,"validation_loss":null,"tokens":0})");
  StepResult result;
  result.loss = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(json::parse(step_line(result))["loss"], nullptr);
  EXPECT_EQ(step_scalars(result).front().tag, "Train/Samples/lr") << "a curve has no point there";
  result.tokens = 1;
  EXPECT_EQ(step_scalars(result).front().tag, "Train/Samples/train_loss") << "of a loss that is none";
}

TEST(Scalars, HaveDeepSpeedsNames) {
  StepResult result;
  result.loss = 2;
  result.tokens = result.positions = 30;
  const auto tags = [](const std::vector<Scalar>& scalars) {
    std::vector<std::string> names;
    for (const Scalar& scalar : scalars) names.push_back(scalar.tag);
    return names;
  };
  EXPECT_THAT(tags(step_scalars(result)),
              ElementsAre("Train/Samples/train_loss", "Train/Samples/lr", "Train/Samples/gradient_norm"));
  result.seconds = 2;
  const std::vector<Scalar> scalars = step_scalars(result, true);
  EXPECT_THAT(tags(scalars), testing::Contains("Train/Samples/loss_scale"));
  EXPECT_EQ(scalars.back().tag, "Train/Samples/tokens_per_second");
  EXPECT_EQ(scalars.back().value, 15);
  EXPECT_THAT(tags(scalars), ::testing::Not(::testing::Contains("Train/Samples/learned_tokens_per_second")));
  result.tokens = 8;
  const std::vector<Scalar> masked = step_scalars(result);
  EXPECT_EQ(masked.back().value, 15) << "of positions";
  EXPECT_EQ(masked[masked.size() - 2].tag, "Train/Samples/learned_tokens_per_second");
  EXPECT_EQ(masked[masked.size() - 2].value, 4);
  EXPECT_EQ(validation_scalar({.loss = 3, .tokens = 1}).tag, "Validation/Samples/loss");
  EXPECT_EQ(validation_scalar({.loss = 3, .tokens = 1}, "code").tag, "Validation/code/loss");
}

TEST(Scalars, AndLinesHaveTheNoiseOfGradientsWhereItWasMeasured) {
  StepResult result;
  EXPECT_FALSE(json::parse(step_line(result)).contains("gradient_noise_scale"));
  result.noise = {.measured = true, .variance = 6, .squares = 2, .scale = 3};
  const json line = json::parse(step_line(result));
  EXPECT_EQ(line["gradient_noise_scale"], 3);
  EXPECT_EQ(line["gradient_variance"], 6);
  EXPECT_EQ(line["gradient_squares"], 2);
  EXPECT_EQ(step_scalars(result).back().tag, "Train/Samples/gradient_noise_scale");
  EXPECT_EQ(step_scalars(result).back().value, 3);
  result.noise.scale = std::numeric_limits<double>::infinity();
  EXPECT_EQ(json::parse(step_line(result))["gradient_noise_scale"], nullptr) << "JSON has no infinity";
  EXPECT_EQ(step_scalars(result).back().tag, "Train/Samples/gradient_norm");
}

TEST(MetricsFile, LinesBehindTheCheckpointAndACutOneGo) {
  const TemporaryFolder folder;
  const std::string path =
      folder.write("m.jsonl",
                   "{\"step\": 1}\n{\"step\": 2}\n{\"step\": 2, \"validation_loss\": 1.5}\n"
                   "{\"step\": 3}\n{\"step\": 4, \"lo");
  MetricsFile metrics(path, 2);
  EXPECT_EQ(metrics.note(), "metrics file '" + path +
                                "': 1 line of step 3 behind step 2, from which the run goes on, is removed")
      << "the cut one tells nothing";
  EXPECT_EQ(metrics.add("{\"step\": 3, \"again\": true}"), "");
  EXPECT_THAT(steps_of(path), ElementsAre(1, 2, 2, 3));
  EXPECT_EQ(lines_of(path)[3]["again"], true);
}

TEST(MetricsFile, LinesThatStayBehindRemovedOnesAreKept) {
  const TemporaryFolder folder;
  const std::string path = folder.write("m.jsonl",
                                        "{\"step\": 1}\n{\"step\": 5}\n{\"step\": 2}\n{\"step\": 7}\n"
                                        "{\"step\": 3}\n");
  const MetricsFile metrics(path, 3, "--log");
  EXPECT_THAT(steps_of(path), ElementsAre(1, 2, 3));
  EXPECT_EQ(metrics.note(), "--log '" + path +
                                "': 2 lines of steps 5 to 7 behind step 3, from which the run goes on, are "
                                "removed");
}

TEST(MetricsFile, AFileThatAnotherRunWritesIsRefusedUntouched) {
  const TemporaryFolder folder;
  const std::string path = folder.path("m.jsonl");
  {
    MetricsFile first(path, 0);
    EXPECT_EQ(first.note(), "");
    EXPECT_EQ(first.add("{\"step\": 1}"), "");
    EXPECT_THAT(message_of<ConfigurationError>([&] { MetricsFile(path, 0); }),
                HasSubstr("metrics file '" + path + "' is being written by another run; name another file"));
    EXPECT_EQ(first.add("{\"step\": 2}"), "");
    EXPECT_THAT(steps_of(path), ElementsAre(1, 2));
  }
  EXPECT_EQ(MetricsFile(path, 2).note(), "");
  EXPECT_THAT(steps_of(path), ElementsAre(1, 2));
}

TEST(MetricsFile, OtherFilesAreRefusedUntouched) {
  const TemporaryFolder folder;
  const std::string path = folder.write("notes.txt", "my notes\nof value\n");
  EXPECT_THAT(message_of<ConfigurationError>([&] { MetricsFile(path, 2); }),
              HasSubstr("notes.txt' has lines that are not of such a file; name another, or remove it"));
  EXPECT_EQ(read_file(path), "my notes\nof value\n");
  EXPECT_THAT(message_of<ConfigurationError>([&] { MetricsFile::require(path, false); }),
              HasSubstr("has lines of another run; name another file, remove it, or resume that run"));
  MetricsFile::require(path, true);
  MetricsFile::require(folder.path("none"), false);
  EXPECT_THAT(message_of<ConfigurationError>([&] { MetricsFile::require("/dev/null", true); }),
              HasSubstr("metrics file '/dev/null' is there and no regular file; name another"));
  EXPECT_THAT(
      message_of<ConfigurationError>([&] { MetricsFile::require(folder.path("no/where"), true, "--log"); }),
      HasSubstr("--log '"));
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

}  // namespace
}  // namespace tranche::training
