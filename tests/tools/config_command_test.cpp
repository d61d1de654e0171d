// tranche config check, for people and for programs.
#include "tools/config_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/tools/program_fixture.h"

namespace tranche::tools {
namespace {

using test::ProgramResult;
using test::TemporaryFolder;
using testing::HasSubstr;

ProgramResult check_file(const std::vector<std::string>& more) {
  std::vector<std::string> arguments{"config", "check"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return test::run(arguments);
}

TEST(ConfigCommand, SaysWhatBecomesOfEachKey) {
  const TemporaryFolder folder;
  const std::string file =
      folder.write("ds.json", R"({"zero_optimization": {"stage": 2, "contiguous_gradients": true},
      "bf16": {"enabled": "auto"}, "epochs": 3, "gradient_clipping": 1.0,
      "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}})");
  const ProgramResult done = check_file({file});
  EXPECT_EQ(done.status, 0);
  EXPECT_EQ(done.errors, "");
  EXPECT_EQ(done.out, file + R"( on 1 rank: accepted: 5 keys honoured, 2 without effect
no effect
  zero_optimization.contiguous_gradients      gradients always live in one flat buffer a unit
  epochs                                      unknown key
honoured
  bf16.enabled                                true ("auto")
  gradient_clipping                           1.0
  optimizer.params.lr                         0.001
  optimizer.type                              "AdamW"
  zero_optimization.stage                     2
notes
  "auto", which Hugging Face's trainer fills in, is bf16.enabled true
  data_types.grad_accum_dtype: not given: reduced gradients are kept in fp32 (DeepSpeed: bf16)
)");
}

TEST(ConfigCommand, RefusedKeysComeFirstAndMakeTheStatus) {
  const TemporaryFolder folder;
  const std::string file = folder.write(
      "ds.json",
      R"({"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": true}, "train_batch_size": 3})");
  const ProgramResult done = check_file({file, "--ranks", "2"});
  EXPECT_EQ(done.status, 2);
  EXPECT_EQ(done.errors, "");
  EXPECT_THAT(
      done.out,
      testing::StartsWith(
          file + " on 2 ranks: refused: 2 problems; 1 key honoured, 0 without effect\nrefused\n"
                 "  zero_optimization.zero_quantized_nontrainable_weights: true cannot be honoured: "));
  EXPECT_THAT(done.out, HasSubstr("\n  train_batch_size 3 is not a multiple"));
  EXPECT_THAT(done.out, HasSubstr("\nhonoured\n  zero_optimization.stage                     3\n"));
  const ProgramResult set =
      check_file({file, "--set", "zero_optimization.zero_quantized_nontrainable_weights=false"});
  EXPECT_EQ(set.status, 0) << set.out;
}

TEST(ConfigCommand, UnknownKeysAreRefusedWithStrict) {
  const TemporaryFolder folder;
  const std::string file = folder.write("ds.json", R"({"epochs": 3})");
  EXPECT_EQ(check_file({file}).status, 0);
  const ProgramResult strict = check_file({file, "--strict"});
  EXPECT_EQ(strict.status, 2);
  EXPECT_THAT(strict.out, HasSubstr("refused\n  unknown key 'epochs'\n"));
}

TEST(ConfigCommand, Json) {
  const TemporaryFolder folder;
  const std::string file = folder.write(
      "ds.json",
      R"({"bf16": {"enabled": "auto"}, "wandb": {}, "epochs": 3, "zero_optimization": {"zero_quantized_nontrainable_weights": true}})");
  const ProgramResult done = check_file({file, "--json"});
  EXPECT_EQ(done.status, 2);
  const auto json = nlohmann::json::parse(done.out);
  EXPECT_EQ(json["schema"], "tranche-config-check-1");
  EXPECT_EQ(json["file"], file);
  EXPECT_EQ(json["ranks"], 1);
  EXPECT_EQ(json["accepted"], false);
  ASSERT_EQ(json["refused"].size(), 1U) << done.out;
  EXPECT_THAT(
      json["refused"][0].get<std::string>(),
      testing::StartsWith("zero_optimization.zero_quantized_nontrainable_weights: true cannot be honoured"));
  EXPECT_EQ(json["honoured"],
            nlohmann::json::parse(R"([{"key": "bf16.enabled", "value": true, "automatic": true}])"));
  ASSERT_EQ(json["no_effect"].size(), 2U);
  EXPECT_EQ(json["no_effect"][0]["key"], "wandb");
  EXPECT_EQ(json["no_effect"][0]["unknown"], false);
  EXPECT_EQ(json["no_effect"][1],
            nlohmann::json::parse(R"({"key": "epochs", "reason": "unknown key", "unknown": true})"));
  EXPECT_TRUE(json["notes"].is_array());
}

TEST(ConfigCommand, WhatIsNoConfigurationIsAnError) {
  const TemporaryFolder folder;
  const ProgramResult broken = check_file({folder.write("ds.json", "{")});
  EXPECT_EQ(broken.status, 2);
  EXPECT_EQ(broken.out, "");
  EXPECT_THAT(broken.errors, HasSubstr("ds.json' is not JSON: "));
  const ProgramResult none = check_file({folder.path("none.json")});
  EXPECT_EQ(none.status, 2);
  EXPECT_THAT(none.errors, HasSubstr("none.json"));
  EXPECT_THAT(check_file({folder.path("none.json"), "--ranks", "-1"}).errors,
              HasSubstr("--ranks is -1, but must be 1 to 65536"));
  EXPECT_THAT(test::run({"config"}).errors, HasSubstr("which of check? see tranche config --help"));
  EXPECT_THAT(test::run({"config", "chek"}).errors,
              HasSubstr("'chek' is no command of tranche config (did you mean check?)"));
}

/// The files of the table in tests/configs: refused files have status 2 and their texts, the others their
/// notes.
TEST(ConfigCommand, EveryFileOfTheTable) {
  const std::string folder = TRANCHE_CONFIGS "/";
  const auto outcomes = nlohmann::json::parse(test::read_file(folder + "outcomes.json"));
  for (const auto& [name, expected] : outcomes.items()) {
    const ProgramResult done = check_file({folder + name, "--ranks", "1"});
    EXPECT_EQ(done.status, expected.contains("refused") ? 2 : 0) << name << done.out << done.errors;
    std::istringstream lines(done.out);
    std::string line;
    std::getline(lines, line);  // contains the path, which may be long
    while (std::getline(lines, line)) {
      const bool one_word = line.find(' ', line.find_first_not_of(' ')) == std::string::npos;
      EXPECT_TRUE(line.size() <= 100 || one_word) << name << ": " << line;
    }
  }
}

}  // namespace
}  // namespace tranche::tools
