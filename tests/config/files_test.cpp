// Whole files as users of DeepSpeed write them, and the optimizers and schedules that they request.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>

#include "tests/config/every_note.h"
#include "tranche/config/config.h"
#include "tranche/core/error.h"

namespace tranche {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using ::testing::StartsWith;

/// The same files are used to run the program (tests/tools/program_test.py).
std::string file(const char* name) {
  return std::string(TRANCHE_CONFIGS) + "/" + name;
}

TEST(ConfigFiles, StageTwoWithItsUsualBuckets) {
  const Config config = load_config(file("deepspeed_stage2.json"), 2);
  EXPECT_EQ(config.stage, 2);
  EXPECT_EQ(config.micro_batch_size, 4);
  EXPECT_EQ(config.reduce_bucket_elements, 200'000'000);
  EXPECT_EQ(config.allgather_bucket_elements, 200'000'000);
  EXPECT_EQ(config.effective_reduction(2), ReductionPolicy::micro_batch);
  EXPECT_EQ(config.precision.compute, DataType::bfloat16);
  EXPECT_THAT(config.ignored, SizeIs(3)) << "allgather_partitions, reduce_scatter, contiguous_gradients";
  EXPECT_EQ(make_optimizer(config)->name(), "AdamW");
  const auto schedule = make_schedule(config);
  EXPECT_EQ(schedule->learning_rate(1), 0);
  EXPECT_DOUBLE_EQ(schedule->learning_rate(501), 3e-5);
}

TEST(ConfigFiles, StageThreeWithFp16AndEveryStageThreeKey) {
  const Config config = load_config(file("deepspeed_stage3_fp16.json"), 4);
  EXPECT_EQ(config.train_batch_size, 8);
  EXPECT_EQ(config.stage, 3);
  EXPECT_TRUE(config.loss_scaling);
  EXPECT_EQ(config.loss_scaler.initial_scale, 65536);
  EXPECT_EQ(config.prefetch_elements, 50'000'000);
  EXPECT_EQ(config.max_live_elements, 1'000'000'000);
  EXPECT_EQ(make_optimizer(config)->name(), "AdamW") << "DeepSpeed's Adam has adam_w_mode on";
  const std::vector<std::string> notes = test::every_note(config);
  EXPECT_EQ(config.persistent_tensor_elements, 100'000);
  EXPECT_EQ(config.persistent_model_elements, std::numeric_limits<std::int64_t>::max());
  EXPECT_TRUE(config.tensorboard.enabled);
  EXPECT_EQ(config.tensorboard.folder(), "logs/run");
  EXPECT_FALSE(config.csv_monitor.enabled);
  EXPECT_EQ(config.csv_monitor.folder(), "DeepSpeedJobName");
}

TEST(ConfigFiles, HuggingFaceWithAutoEverywhere) {
  const Config config = load_config(file("hugging_face_auto.json"), 2);
  EXPECT_EQ(config.train_batch_size, 2);
  EXPECT_EQ(config.stage, 3);
  EXPECT_EQ(config.precision.compute, DataType::bfloat16);
  EXPECT_EQ(config.optimizer.learning_rate, 1e-3);
  EXPECT_EQ(config.gradient_clipping, 1.0);
  EXPECT_EQ(config.reduce_bucket_elements, 500'000'000);
  const Config two =
      load_config(file("hugging_face_auto.json"), 2, {"zero_optimization.stage=2", "train_batch_size=64"});
  EXPECT_EQ(two.stage, 2);
  EXPECT_EQ(two.micro_batch_size, 32);
}

TEST(ConfigFiles, HuggingFaceWithOffload) {
  const Config config = load_config(
      file("hugging_face_auto.json"), 1,
      {"zero_optimization.offload_optimizer.device=cpu", "zero_optimization.offload_param.device=nvme",
       "zero_optimization.offload_param.nvme_path=/local_nvme"});
  EXPECT_EQ(config.offload.optimizer, OffloadTier::cpu);
  EXPECT_EQ(config.offload.parameters, OffloadTier::nvme);
  EXPECT_EQ(config.offload.nvme_path, "/local_nvme");
  EXPECT_EQ(config.offload.tile_elements, 1 << 20) << "a sub_group_size of 1e9 bounds nothing";
}

/// The result for a file on `ranks` ranks, in the format of outcomes.json.
nlohmann::json outcome_of(const std::string& path, int ranks) {
  nlohmann::json outcome;
  try {
    const Config config = load_config(path, ranks);
    outcome["stage"] = config.stage;
    outcome["compute"] = name_of(config.precision.compute);
    outcome["gradient_clipping"] = config.gradient_clipping;
    outcome["micro_batch"] = config.micro_batch_size;
    outcome["accumulation"] = config.accumulation_steps;
    outcome["optimizer"] = name_of(config.offload.optimizer);
    outcome["parameters"] = name_of(config.offload.parameters);
    outcome["notes"] = test::every_note(config);
    EXPECT_EQ(parse_config(config.to_json(), ranks).to_json(), config.to_json()) << path;
  } catch (const ConfigurationError& error) {
    const std::string origin = "configuration file '" + path + "'";
    EXPECT_EQ(error.message().substr(0, origin.size()), origin);
    outcome["refused"] = error.message().substr(origin.size());
  }
  return outcome;
}

/// The files were written for these tests in the style of libraries and their users. outcomes.json has the
/// result for each on one rank, and under "on 8 ranks" the differences there.
TEST(ConfigFiles, EachHasItsOutcome) {
  std::ifstream table(file("outcomes.json"));
  nlohmann::json outcomes = nlohmann::json::parse(table);
  for (const auto& entry : std::filesystem::directory_iterator(TRANCHE_CONFIGS)) {
    const std::string name = entry.path().filename().string();
    if (name == "outcomes.json") continue;
    ASSERT_TRUE(outcomes.contains(name)) << name << " has no outcome";
    nlohmann::json expected = outcomes[name];
    outcomes.erase(name);
    const nlohmann::json otherwise = expected.value("on 8 ranks", nlohmann::json::object());
    expected.erase("on 8 ranks");
    EXPECT_EQ(outcome_of(entry.path().string(), 1), expected) << name;
    if (expected.contains("refused") && !otherwise.empty()) expected.clear();
    expected.update(otherwise);
    EXPECT_EQ(outcome_of(entry.path().string(), 8), expected) << name << " on 8 ranks";
  }
  EXPECT_TRUE(outcomes.empty()) << outcomes << " are of files that are not there";
}

std::string problems(std::string_view json) {
  try {
    parse_config(json, 1);
  } catch (const ConfigurationError& error) {
    return error.message();
  }
  return "nothing was thrown";
}

TEST(ConfigFiles, OptimizersAndSchedulesThatWeLackOrThatDoNotExist) {
  for (const char* type :
       {"OneBitAdam", "ZeroOneAdam", "OneBitLamb", "MuAdam", "MuAdamW", "MuSGD", "Adafactor", "ScheduleFree",
        "Schedule-Free", "SOAP", "Shampoo", "Sophia", "GaLore", "APOLLO", "1-bit Adam", "adamw8bit"}) {
    EXPECT_THAT(problems(std::string(R"({"optimizer": {"type": ")") + type + R"("}})"),
                StartsWith(std::string("configuration: optimizer.type: ") + type +
                           " is not part of this version; the nearest is "));
  }
  EXPECT_EQ(problems(R"({"optimizer": {"type": "AdmaW"}})"),
            "configuration: optimizer.type: 'AdmaW' is not one of AdamW, Adagrad, Adam, LARS, "
            "Lamb, Lion, Muon, RMSprop, SGD; did you mean AdamW?");
  EXPECT_THAT(problems(R"({"scheduler": {"type": "WarmLR"}})"), HasSubstr("did you mean WarmupLR?"));
}

TEST(ConfigFiles, ChoicesAreTexts) {
  const Config config = parse_config(
      R"({"optimizer": {"type": "muon", "params": {"lr": 0.02, "ns_coefficients": "keller", "adam_lr": 0.001}}})",
      1);
  EXPECT_EQ(config.optimizer.parameters.at("ns_coefficients").first, 1);
  EXPECT_THAT(config.to_json(), HasSubstr(R"("ns_coefficients": "keller")"));
  EXPECT_THAT(config.to_json(), HasSubstr(R"("adjust_lr_fn": "match_rms_adamw")"));
  EXPECT_EQ(parse_config(config.to_json(), 1).to_json(), config.to_json());
  EXPECT_THAT(make_optimizer(config)->describe(), HasSubstr(R"("adam_lr": 0.001)"));
  EXPECT_THAT(test::every_note(config), ::testing::Contains(HasSubstr("(DeepSpeed: original)")));
  EXPECT_EQ(problems(R"({"optimizer": {"type": "Muon", "params": {"ns_coefficients": "kelly"}}})"),
            "configuration: optimizer.params.ns_coefficients: 'kelly' is not one of polar_express, keller");
  EXPECT_EQ(problems(R"({"optimizer": {"type": "Muon", "params": {"lr": 0, "muon_lr": 0.1}}})"),
            "configuration: optimizer.params: Muon: muon_lr is taken relative to lr, which schedules set, so "
            "lr has to be above 0, not 0");
}

TEST(ConfigFiles, ParametersBelongToTheirType) {
  EXPECT_EQ(problems(R"({"optimizer": {"type": "AdamW", "params": {"momentum": 0.9}}})"),
            "configuration: optimizer.params.momentum is no parameter of AdamW, which has lr, betas, eps, "
            "weight_decay, adam_w_mode, amsgrad");
  EXPECT_THAT(problems(R"({"optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.9]}}})"),
              HasSubstr("optimizer.params.betas is no parameter of SGD"));
  EXPECT_THAT(
      problems(R"({"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 5}}})"),
      HasSubstr("scheduler.params.total_num_steps is no parameter of WarmupLR, which has warmup_min_lr"));
  EXPECT_EQ(problems(R"({"scheduler": {"params": {"warmup_steps": 5}, "type": "WarmupLR"}})"),
            "configuration: unknown key 'scheduler.params.warmup_steps'; did you mean "
            "'scheduler.params.warmup_num_steps'?");
  EXPECT_THAT(
      problems(R"({"scheduler": {"type": "WSD", "params": {"warmup_steps": 5, "num_decay_steps": 1}}})"),
      HasSubstr("did you mean 'scheduler.params.num_warmup_steps'?"));
  EXPECT_THAT(problems(R"({"scheduler": {"params": {"warmup_num_steps": 5}}})"),
              HasSubstr("scheduler.params.warmup_num_steps is no parameter of constant, which has none"));
  EXPECT_THAT(problems(R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}}})"),
              HasSubstr("scheduler.params.warmup_type: 'cubic' is not one of log, linear"));
  EXPECT_THAT(problems(R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}})"),
              HasSubstr("scheduler.params: warmup_num_steps is 0"));
  EXPECT_THAT(problems(R"({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0}}})"),
              HasSubstr("scheduler.params.cycle_max_lr: OneCycle needs it"));
}

TEST(ConfigFiles, SchedulesThatEndTakeTheRunsLengthFromTheProgram) {
  Config config = load_config(file("hugging_face_auto.json"), 1, {"scheduler.params.warmup_num_steps=10"});
  try {
    make_schedule(config);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const ConfigurationError& error) {
    EXPECT_THAT(error.message(), HasSubstr("schedule WarmupDecayLR must know where the run ends: set "
                                           "scheduler.params.total_num_steps or tranche.total_steps"));
  }
  config.total_steps_hint = 110;
  // (110 - 60) / (110 - 10) of the optimizer's rate at iteration 60.
  EXPECT_DOUBLE_EQ(make_schedule(config)->learning_rate(61), 0.5e-3);
  // The file's own values have priority.
  config = load_config(file("hugging_face_auto.json"), 1,
                       {"scheduler.params.warmup_num_steps=10", "scheduler.params.total_num_steps=210",
                        "tranche.total_steps=110"});
  EXPECT_DOUBLE_EQ(make_schedule(config)->learning_rate(111), 0.5e-3);
}

TEST(ConfigFiles, EverySchedulesParametersArrive) {
  const auto rate = [](const char* scheduler, std::int64_t step, const char* optimizer = "AdamW") {
    const Config config = parse_config("{}", 1,
                                       {std::string("scheduler=") + scheduler, "optimizer.params.lr=2",
                                        std::string("optimizer.type=") + optimizer});
    const auto schedule = make_schedule(config);
    return std::pair(schedule->learning_rate(step), schedule->momentum(step));
  };
  EXPECT_EQ(rate(R"({"type": "constant"})", 7).first, 2);
  // Without a maximum the optimizer's rate is the maximum.
  EXPECT_EQ(
      rate(R"({"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}})", 3).first,
      1);
  EXPECT_DOUBLE_EQ(
      rate(R"({"type": "WarmupCosineLR", "params": {"warmup_num_steps": 10, "total_num_steps": 110,
      "warmup_min_ratio": 0.1, "cos_min_ratio": 0.2, "warmup_type": "linear"}})",
           60)
          .first,
      1.2);
  constexpr const char* cycle = R"({"type": "OneCycle", "params": {"cycle_min_lr": 1, "cycle_max_lr": 5,
      "cycle_first_step_size": 4, "cycle_second_step_size": 6, "cycle_first_stair_count": 2,
      "cycle_second_stair_count": 3, "decay_step_size": 2, "decay_lr_rate": 0.5, "cycle_min_mom": 0.5,
      "cycle_max_mom": 0.7, "decay_mom_rate": 0.1}})";
  EXPECT_DOUBLE_EQ(rate(cycle, 2).first, 3);                // stair 1 of 2
  EXPECT_DOUBLE_EQ(rate(cycle, 2).second, 0.6);             // 0.7 - 0.2 / 2
  EXPECT_DOUBLE_EQ(rate(cycle, 6).first, 1 + 4 * 2 / 3.0);  // 4 of 6 left, 3 stairs: 2 of 3
  EXPECT_DOUBLE_EQ(rate(cycle, 14).first, 0.5);             // 4 past the cycle: two intervals
  EXPECT_LT(rate(cycle, 2, "SGD").second, 0) << "SGD has no beta1 to cycle";
  EXPECT_DOUBLE_EQ(rate(cycle, 2, "Lion").second, 0.6);
  EXPECT_DOUBLE_EQ(rate(R"({"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.5,
      "lr_range_test_step_size": 10, "lr_range_test_step_rate": 2, "lr_range_test_staircase": true}})",
                        25)
                       .first,
                   0.5 * (1 + 2 * 2));
  // total_num_steps leaves 60 at the full rate.
  constexpr const char* stable = R"({"type": "WSD", "params": {"num_warmup_steps": 10, "num_decay_steps": 30,
      "total_num_steps": 100, "min_lr_ratio": 0.1, "decay_type": "linear"}})";
  EXPECT_DOUBLE_EQ(rate(stable, 6).first, 2 * (0.5 * 0.9 + 0.1));
  EXPECT_DOUBLE_EQ(rate(stable, 70).first, 2);
  EXPECT_DOUBLE_EQ(rate(stable, 86).first, 2 * (0.5 * 0.9 + 0.1));
  EXPECT_DOUBLE_EQ(rate(stable, 101).first, 2 * 0.1);
  EXPECT_DOUBLE_EQ(
      rate(R"({"type": "InverseSquareRoot", "params": {"num_warmup_steps": 4, "timescale": 9}})", 32).first,
      2 / std::sqrt(36 / 9.0));
}

TEST(ConfigFiles, WhatACyclingScheduleDoesDifferentlyIsSaid) {
  const char* params = R"(scheduler={"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1}})";
  EXPECT_THAT(parse_config("{}", 1, {params}).notes, Contains(HasSubstr("beta2 stays the optimizer's")));
  EXPECT_THAT(parse_config("{}", 1, {params, "optimizer.type=SGD"}).notes,
              Contains(HasSubstr("SGD has no beta1")));
}

TEST(ConfigFiles, ScheduleTypesSetInCppAreCheckedAsThoseOfFiles) {
  const std::string known =
      "is not one of constant, WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, WSD, "
      "InverseSquareRoot";
  const auto told = [](const std::function<void()>& call) -> std::string {
    try {
      call();
    } catch (const ConfigurationError& error) {
      return error.message();
    }
    return "nothing was thrown";
  };
  for (const char* type : {"Cosine", "WarmupDecayLrs", ""}) {
    Config config;
    config.schedule = {type, R"({"warmup_num_steps": 3})"};
    const std::string expected = std::string("configuration: scheduler.type: '") + type + "' " + known;
    EXPECT_THAT(told([&] { make_schedule(config); }), StartsWith(expected));
    EXPECT_THAT(told([&] { validate_config(config, 1); }), StartsWith(expected));
  }
  Config config;
  config.schedule = {"warmuplr", R"({"warmup_num_steps": 4, "warmup_type": "linear", "warmup_max_lr": 1})"};
  EXPECT_EQ(make_schedule(config)->learning_rate(3), 0.5) << "in any case, as in files";
  validate_config(config, 1);
  EXPECT_EQ(config.schedule.type, "WarmupLR");
}

TEST(ConfigFiles, MakersNameWhatTheyCannotMake) {
  Config config;
  config.optimizer.type = "Lyon";
  EXPECT_THROW(make_optimizer(config), ConfigurationError);
  config = {};
  config.schedule = {"WarmupLR", R"({"warmup_num_step": 3})"};
  try {
    make_schedule(config);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const ConfigurationError& error) {
    EXPECT_THAT(error.message(), HasSubstr("unknown key 'scheduler.params.warmup_num_step'"));
  }
}

}  // namespace
}  // namespace tranche
