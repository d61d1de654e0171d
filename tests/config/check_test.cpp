// The results for configuration files, key by key.
#include "tranche/config/check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "tranche/core/error.h"

namespace tranche {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

std::vector<std::string> honoured(const ConfigCheck& check) {
  std::vector<std::string> keys;
  for (const ConfigCheck::Honoured& key : check.honoured)
    keys.push_back(key.key + "=" + key.value + (key.automatic ? " auto" : ""));
  return keys;
}

TEST(ConfigCheck, TellsOfEachKeyWhatBecomesOfIt) {
  const ConfigCheck check = check_config(R"({"zero_optimization": {"stage": 2, "contiguous_gradients": true},
      "bf16": {"enabled": "auto"}, "epochs": 3, "wandb": {"enabled": true}, "train_batch_size": null})");
  EXPECT_TRUE(check.accepted());
  EXPECT_EQ(check.ranks, 1);
  EXPECT_THAT(honoured(check), ElementsAre("bf16.enabled=true auto", "zero_optimization.stage=2"));
  ASSERT_EQ(check.ignored.size(), 3U);
  EXPECT_EQ(check.ignored[0].key, "zero_optimization.contiguous_gradients");
  EXPECT_THAT(check.ignored[0].reason, HasSubstr("one flat buffer"));
  EXPECT_EQ(check.ignored[1].key, "epochs");
  EXPECT_TRUE(check.ignored[1].unknown);
  EXPECT_EQ(check.ignored[2].key, "wandb");
  EXPECT_FALSE(check.ignored[2].unknown);
  EXPECT_THAT(check.notes, ::testing::Contains(StartsWith("data_types.grad_accum_dtype: not given")));
}

TEST(ConfigCheck, KeysThatAreRefusedAreNotAmongTheHonoured) {
  const ConfigCheck check = check_config(
      R"({"zero_optimization": {"stage": 7, "zero_quantized_nontrainable_weights": true}, "gradient_clipping": 1.0})");
  EXPECT_FALSE(check.accepted());
  EXPECT_THAT(
      check.refused,
      ElementsAre(
          StartsWith("zero_optimization.zero_quantized_nontrainable_weights: true cannot be honoured: "),
          StartsWith("zero_optimization.stage")));
  EXPECT_THAT(honoured(check), ElementsAre("gradient_clipping=1.0"));
  EXPECT_EQ(check_config(R"({"epochs": 3})", 1, {}, true).refused,
            std::vector<std::string>{"unknown key 'epochs'"});
}

TEST(ConfigCheck, RanksAreThoseOfTheBatchFiguresUnlessTheyAreGiven) {
  const char* three =
      R"({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2})";
  EXPECT_EQ(check_config(three).ranks, 8);
  EXPECT_TRUE(check_config(three).accepted());
  const ConfigCheck two = check_config(three, 2);
  EXPECT_EQ(two.ranks, 2);
  EXPECT_THAT(two.refused,
              ElementsAre(HasSubstr("train_batch_size 64 is not train_micro_batch_size_per_gpu 4")));
  EXPECT_EQ(check_config(three, 0, {"train_batch_size=63"}).ranks, 1) << "63 is of no number of ranks";
  EXPECT_EQ(check_config(R"({"train_batch_size": 64})").ranks, 1);
  const char* huge = R"({"train_batch_size": 9007199254740992, "train_micro_batch_size_per_gpu": 1,
      "gradient_accumulation_steps": 1})";
  EXPECT_EQ(check_config(huge).ranks, 1) << "beyond an int";
}

TEST(ConfigCheck, ValuesAreJsonWhateverAutoStandsFor) {
  const ConfigCheck check = check_config(R"({"scheduler": {"type": "WarmupDecayLR",
      "params": {"total_num_steps": "auto", "warmup_max_lr": "auto", "warmup_num_steps": 10}}})");
  EXPECT_TRUE(check.accepted());
  EXPECT_THAT(honoured(check),
              ::testing::Contains("scheduler.params.warmup_max_lr=\"the optimizer's lr\" auto"));
  for (const ConfigCheck::Honoured& key : check.honoured) {
    EXPECT_TRUE(nlohmann::json::accept(key.value)) << key.key << " " << key.value;
  }
}

TEST(ConfigCheck, TextThatIsNotJsonIsAnError) {
  EXPECT_THROW(check_config("{"), ConfigurationError);
  EXPECT_THROW(check_config(R"({"a": 1, "a": 2})"), ConfigurationError);
}

/// Checks each file of the table against parse_config; no key of the file may be missing in the result.
TEST(ConfigCheck, AgreesWithTheOutcomesOfTheTable) {
  const std::string folder = TRANCHE_CONFIGS "/";
  std::ifstream table(folder + "outcomes.json");
  const nlohmann::json outcomes = nlohmann::json::parse(table);
  for (const auto& [name, expected] : outcomes.items()) {
    std::ifstream file(folder + name, std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    const bool refused = expected.contains("refused");
    ConfigCheck check;
    try {
      check = check_config(text, 1);
    } catch (const ConfigurationError& error) {
      EXPECT_TRUE(refused && error.message().find("is not JSON") != std::string::npos) << name;
      continue;
    }
    EXPECT_EQ(check.accepted(), !refused) << name;
    std::vector<std::string> notes;
    for (const IgnoredKey& key : check.ignored) notes.push_back(describe(key));
    notes.insert(notes.end(), check.notes.begin(), check.notes.end());
    if (refused) {
      for (const std::string& line : check.refused)
        EXPECT_THAT(expected["refused"].get<std::string>(), HasSubstr(line)) << name;
    } else {
      EXPECT_EQ(notes, expected["notes"].get<std::vector<std::string>>()) << name;
    }
  }
}

TEST(ConfigCheck, ASchedulePastTheEndOfTheRunIsNoted) {
  const auto notes = [](const std::string& scheduler, const std::string& more = "") {
    std::vector<std::string> found = check_config("{\"scheduler\": " + scheduler + more + "}").notes;
    std::erase_if(found, [](const auto& note) { return note.find("ends with") == std::string::npos; });
    return found;
  };
  const std::string cosine =
      R"({"type": "WarmupCosineLR", "params": {"warmup_num_steps": 100, "total_num_steps": 50}})";
  EXPECT_THAT(notes(cosine),
              ElementsAre("scheduler.params.warmup_num_steps: the warm-up ends with step 100, and "
                          "the schedule with step 50"));
  EXPECT_THAT(
      notes(R"({"type": "WSD", "params": {"num_decay_steps": 100}})", R"(, "tranche": {"total_steps": 10})"),
      ElementsAre("scheduler.params.num_decay_steps: the decay ends with step 100, and the run with step "
                  "10"));
  EXPECT_THAT(notes(R"({"type": "WarmupLR", "params": {"warmup_num_steps": 100}})"), IsEmpty());
}

TEST(ConfigCheck, IgnoredKeysInOneLine) {
  EXPECT_EQ(describe(std::vector<IgnoredKey>{{"wandb", "why"}}),
            "1 key of the configuration has no effect here (--verbose lists it)");
  EXPECT_EQ(describe(std::vector<IgnoredKey>{{"wandb", "why"}, {"epochs", "", true}}),
            "2 keys of the configuration have no effect here; unknown: 'epochs' (--verbose lists them)");
  EXPECT_EQ(
      describe(std::vector<IgnoredKey>(5, {"x", "", true})),
      "5 keys of the configuration have no effect here; unknown: 'x', 'x', 'x' and 2 more (--verbose lists "
      "them)");
}

}  // namespace
}  // namespace tranche
