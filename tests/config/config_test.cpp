// Reading DeepSpeed's JSON: the keys that are honoured, and the reports of problems.
#include "tranche/config/config.h"
#include "tests/config/every_note.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <functional>
#include <limits>

#include "config/keys.h"
#include "tests/core/error_text.h"
#include "tranche/config/check.h"
#include "tranche/core/error.h"

namespace tranche {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

/// The text of the ConfigurationError that reading throws.
std::string problems(std::string_view json, int ranks = 1, const std::vector<std::string>& overrides = {}) {
  try {
    parse_config(json, ranks, overrides);
  } catch (const ConfigurationError& error) {
    EXPECT_EQ(error.exit_status(), ExitStatus::configuration);
    return error.message();
  }
  return "nothing was thrown";
}

/// The notes about keys in the file, without those about missing keys.
std::vector<std::string> notes_on_keys(const Config& config) {
  std::vector<std::string> notes = test::every_note(config);
  std::erase_if(notes, [](const std::string& note) { return note.find("not given") != std::string::npos; });
  return notes;
}

TEST(Config, AnEmptyFileIsTheDefaultsOfDeepSpeed) {
  const Config config = parse_config("{}", 3);
  EXPECT_EQ(config.precision.compute, DataType::float32);
  EXPECT_EQ(config.precision.communication, DataType::float32);
  EXPECT_EQ(config.gradient_clipping, 0);
  EXPECT_FALSE(config.precision_given);
  EXPECT_FALSE(config.clipping_given);
}

TEST(Config, AFileThatSpeaksOfPrecisionAndClippingHasTheDefaultsOfTheRest) {
  const Config config = parse_config(R"({"bf16": {"enabled": true}, "gradient_clipping": 1.0,
    "data_types": {"grad_accum_dtype": "fp32"}, "optimizer": {"type": "AdamW"}})",
                                     3);
  EXPECT_TRUE(config.precision_given);
  EXPECT_TRUE(config.clipping_given);
  EXPECT_EQ(config.train_batch_size, 3);
  EXPECT_EQ(config.micro_batch_size, 1);
  EXPECT_EQ(config.accumulation_steps, 1);
  EXPECT_EQ(config.stage, 0);
  EXPECT_EQ(config.precision.compute, DataType::bfloat16);
  EXPECT_EQ(config.precision.communication, DataType::bfloat16);
  EXPECT_EQ(config.precision.accumulation, DataType::float32);
  EXPECT_EQ(config.precision.moments, DataType::float32);
  EXPECT_FALSE(config.loss_scaling);
  EXPECT_EQ(config.gradient_clipping, 1.0);
  EXPECT_EQ(config.optimizer.type, "AdamW");
  EXPECT_EQ(config.schedule.type, "constant");
  EXPECT_THAT(test::every_note(config), IsEmpty());
  EXPECT_EQ(config.effective_reduction(2), ReductionPolicy::boundary);
}

TEST(Config, EveryFieldIsRead) {
  const Config config = parse_config(R"({
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3, "gradient_clipping": 0.5,
    "steps_per_print": 10, "wall_clock_breakdown": true, "communication_data_type": "fp32",
    "data_types": {"grad_accum_dtype": "bf16"}, "bf16": {"enabled": true},
    "zero_optimization": {"stage": 3, "overlap_comm": false, "reduce_bucket_size": 1e6,
      "allgather_bucket_size": 2e6,
      "stage3_prefetch_bucket_size": 3e6, "stage3_max_live_parameters": 4e6},
    "optimizer": {"type": "adam", "params": {"lr": 0.01, "betas": [0.8, 0.9], "eps": 1e-6,
      "weight_decay": 0.1,
      "adam_w_mode": false}},
    "scheduler": {"type": "warmuplr", "params": {"warmup_num_steps": 7}},
    "tranche": {"reduction": "boundary", "reduction_group": 2, "depth": 5, "communication_timeout": 12.5,
      "progress": "inline", "threads": 3, "device_memory": "1.5GiB", "workspace": 1024,
        "communication_slab": "2MB",
      "seed": 99, "frozen": ["wte.*"], "decay": ["*.scale"], "no_decay": ["*.w"],
      "parameter_groups": [{"pattern": "h.*", "learning_rate_factor": 0.5}], "collectives": "ours",
      "maximum_consecutive_skips": 8, "activation_checkpointing": true, "checkpoint_every": 2,
      "vocabulary_chunk": 512, "moments": "bf16", "total_steps": 1000, "save_buffer": true,
      "debug": {"poison_memory": true, "plan_memory": false, "ranks_per_host": 2}}})",
                                     2);
  EXPECT_EQ(config.train_batch_size, 24);
  EXPECT_EQ(config.gradient_clipping, 0.5);
  EXPECT_EQ(config.steps_per_print, 10);
  EXPECT_TRUE(config.wall_clock_breakdown);
  EXPECT_EQ(config.precision.communication, DataType::float32);
  EXPECT_EQ(config.precision.accumulation, DataType::bfloat16);
  EXPECT_EQ(config.precision.moments, DataType::bfloat16);
  EXPECT_EQ(config.stage, 3);
  EXPECT_FALSE(config.overlap);
  EXPECT_EQ(config.reduce_bucket_elements, 1'000'000);
  EXPECT_EQ(config.allgather_bucket_elements, 2'000'000);
  EXPECT_EQ(config.prefetch_elements, 3'000'000);
  EXPECT_EQ(config.max_live_elements, 4'000'000);
  EXPECT_EQ(config.optimizer.type, "Adam");
  EXPECT_EQ(config.optimizer.learning_rate, 0.01);
  EXPECT_EQ(config.optimizer.parameters.at("betas"), RuleValue(std::array{0.8, 0.9}));
  EXPECT_EQ(config.optimizer.parameters.at("eps"), RuleValue(1e-6));
  EXPECT_EQ(config.optimizer.parameters.at("weight_decay"), RuleValue(0.1));
  EXPECT_EQ(config.optimizer.parameters.at("adam_w_mode"), RuleValue(0));
  EXPECT_EQ(make_optimizer(config)->name(), "Adam");
  EXPECT_EQ(config.schedule.type, "WarmupLR");
  EXPECT_EQ(config.reduction, ReductionPolicy::boundary);
  EXPECT_EQ(config.effective_reduction(2), ReductionPolicy::boundary);
  EXPECT_EQ(config.reduction_group, 2);
  EXPECT_EQ(config.depth, 5);
  EXPECT_EQ(config.communication_timeout, 12.5);
  EXPECT_TRUE(config.inline_progress);
  EXPECT_EQ(config.threads, 3);
  EXPECT_EQ(config.device_memory_limit, 1610612736);
  EXPECT_EQ(config.workspace_bytes, 1024);
  EXPECT_EQ(config.staging_bytes, 2'000'000);
  EXPECT_EQ(config.seed, 99U);
  EXPECT_THAT(config.frozen, ElementsAre("wte.*"));
  EXPECT_THAT(config.group_rules, ElementsAre(ParameterGroupRule{"*.scale", std::nullopt, true},
                                              ParameterGroupRule{"*.w", std::nullopt, false},
                                              ParameterGroupRule{"h.*", 0.5, std::nullopt}));
  EXPECT_TRUE(config.save_buffer);
  EXPECT_EQ(config.collectives, "ours");
  EXPECT_EQ(config.maximum_consecutive_skips, 8);
  EXPECT_TRUE(config.activation_checkpointing);
  EXPECT_EQ(config.checkpoint_every, 2);
  EXPECT_EQ(config.vocabulary_chunk, 512);
  EXPECT_EQ(config.total_steps_hint, 1000);
  EXPECT_TRUE(config.debug.poison_memory);
  EXPECT_FALSE(config.debug.plan_memory);
  EXPECT_EQ(config.debug.ranks_per_host, 2);
}

TEST(Config, AnyTwoOfTheBatchFiguresGiveTheThird) {
  struct Case {
    const char* json;
    int ranks;
    std::int64_t train, micro, steps;
  };
  const Case cases[] = {
      {R"({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4})", 3, 24, 4, 2},
      {R"({"train_batch_size": 24, "gradient_accumulation_steps": 2})", 3, 24, 4, 2},
      {R"({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2})", 3, 24, 4, 2},
      {R"({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2})",
       3, 24, 4, 2},
      {R"({"train_batch_size": 24})", 3, 24, 8, 1},
      {R"({"train_micro_batch_size_per_gpu": 4})", 3, 12, 4, 1},
      {R"({"gradient_accumulation_steps": 5})", 3, 15, 1, 5},
      {R"({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 5})",
       1, 5, 1, 5},
  };
  for (const Case& entry : cases) {
    const Config config = parse_config(entry.json, entry.ranks);
    EXPECT_EQ(config.train_batch_size, entry.train) << entry.json;
    EXPECT_EQ(config.micro_batch_size, entry.micro) << entry.json;
    EXPECT_EQ(config.accumulation_steps, entry.steps) << entry.json;
  }
}

TEST(Config, ABatchThatDoesNotFitShowsTheArithmetic) {
  EXPECT_EQ(problems(R"({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4,
                         "gradient_accumulation_steps": 1})",
                     2),
            "configuration: train_batch_size 32 is not train_micro_batch_size_per_gpu 4 * "
            "gradient_accumulation_steps "
            "1 * 2 ranks = 8; change one, or leave one out and it is derived");
  EXPECT_EQ(problems(R"({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4})", 2),
            "configuration: train_batch_size 10 is not a multiple of train_micro_batch_size_per_gpu 4 * 2 "
            "ranks = 8, "
            "so no gradient_accumulation_steps fits");
  EXPECT_THAT(problems(R"({"train_batch_size": 10})", 3),
              HasSubstr("10 is not a multiple of gradient_accumulation_steps 1 * 3 ranks = 3, so no "
                        "train_micro_batch_size_per_gpu fits"));
  EXPECT_THAT(problems(R"({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3})", 4,
                       {"tranche.mesh=\"pipeline=2, tensor=2\""}),
              HasSubstr("train_micro_batch_size_per_gpu 3 * 1 data rank = 3"));
  EXPECT_THAT(problems(R"({"train_batch_size": 0})"), HasSubstr("train_batch_size: 0 is not at least 1"));
  EXPECT_THAT(problems(R"({"gradient_accumulation_steps": -2})"),
              HasSubstr("gradient_accumulation_steps: -2 is not between 1 and 1000000000"));
  EXPECT_THAT(problems(R"({"train_micro_batch_size_per_gpu": 1e9, "gradient_accumulation_steps": 1e9})", 4),
              HasSubstr("beyond any batch"));
  EXPECT_THAT(problems("{}", 0), HasSubstr("0 ranks; there must be at least one"));
}

TEST(Config, PrecisionFollowsWhatIsSwitchedOn) {
  const auto precision = [](const char* json) { return parse_config(json, 1).precision; };
  EXPECT_EQ(precision(R"({"bf16": {"enabled": true}})").compute, DataType::bfloat16);
  EXPECT_EQ(precision(R"({"bfloat16": {"enabled": true}})").compute, DataType::bfloat16);
  EXPECT_EQ(precision(R"({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}})").compute,
            DataType::bfloat16);
  EXPECT_EQ(precision(R"({"fp16": {"enabled": true}})").compute, DataType::float16);
  EXPECT_EQ(precision(R"({"fp16": {"enabled": true}})").communication, DataType::float16);
  EXPECT_EQ(precision(R"({"fp16": {"enabled": true}, "bf16": {"enabled": false}})").compute,
            DataType::float16);
  const PrecisionConfig plain = precision(R"({"fp16": {"enabled": false}, "bf16": {"enabled": false}})");
  EXPECT_EQ(plain.compute, DataType::float32);
  EXPECT_EQ(plain.communication, DataType::float32)
      << "fp32 gradients are not rounded on the wire by default";
  EXPECT_EQ(precision(R"({"bf16": {"enabled": false}})").compute, DataType::float32);
  for (const char* json : {"{}", R"({"fp16": {"enabled": false}})", R"({"fp16": {"enabled": "auto"}})",
                           R"({"bf16": {}, "fp16": {}})", R"({"bf16": {"enabled": null}})"}) {
    EXPECT_EQ(precision(json).compute, DataType::float32) << json;
    EXPECT_EQ(precision(json).communication, DataType::float32) << json;
    EXPECT_FALSE(parse_config(json, 1).precision_given) << json;
  }
  for (const char* json : {R"({"fp16": {"enabled": true}})", R"({"bf16": {"enabled": false}})",
                           R"({"bf16": {"enabled": "auto"}})", R"({"bfloat16": {"enabled": true}})"}) {
    EXPECT_TRUE(parse_config(json, 1).precision_given) << json;
  }
  EXPECT_EQ(precision(R"({"bf16": {"enabled": "auto"}, "fp16": {"enabled": true}})").compute,
            DataType::float16);
}

TEST(Config, PrecisionProblems) {
  EXPECT_THAT(problems(R"({"fp16": {"enabled": true}, "bf16": {"enabled": true}})"),
              HasSubstr("bf16.enabled and fp16.enabled are both true; choose one"));
  EXPECT_THAT(problems(R"({"communication_data_type": "int8"})"),
              HasSubstr("communication_data_type: 'int8' is not one of fp32, bf16, fp16"));
  EXPECT_THAT(problems(R"({"data_types": {"grad_accum_dtype": "fp16"}})"),
              HasSubstr("data_types.grad_accum_dtype: fp16 is not one of fp32, bf16"));
  EXPECT_THAT(problems(R"({"tranche": {"moments": "fp16"}})"),
              HasSubstr("tranche.moments: fp16 is not one of fp32, bf16, block8"));
  EXPECT_THAT(problems(R"({"tranche": {"moments": "int8"}})"),
              HasSubstr("tranche.moments: 'int8' is not one of fp32, bf16, block8"));
  EXPECT_THAT(problems(R"({"tranche": {"master": "bf16"}})"),
              HasSubstr("tranche.master: 'bf16' is not one of fp32, split, none"));
  EXPECT_THAT(problems(R"({"tranche": {"master": "split"}})"),
              HasSubstr("tranche.master: split is a format beside bf16 weights; these are fp32: set "
                        "bf16.enabled, or leave it out"));
  EXPECT_THAT(problems(R"({"bf16": {"enabled": true}, "tranche": {"stochastic_rounding": true}})"),
              HasSubstr("tranche.stochastic_rounding: with master weights (tranche.master fp32) no update is "
                        "lost to rounding; set tranche.master to none, or leave it out"));
  EXPECT_THAT(
      problems(R"({"bf16": {"enabled": true, "bf16_master_weights_and_grads": true}})"),
      HasSubstr("set tranche.master to \"none\" and data_types.grad_accum_dtype to \"bf16\" instead"));
  EXPECT_THAT(problems(R"({"optimizer": {"type": "Adagrad"}, "tranche": {"moments": "block8"}})"),
              HasSubstr("tranche.moments: Adagrad: its sum is kept in fp32 alone, not in block8"));
  EXPECT_THAT(problems(R"({"optimizer": {"type": "AdamW8bit"}})"),
              HasSubstr("the nearest is AdamW with tranche.moments block8"));
  EXPECT_THAT(
      problems(R"({"optimizer": {"type": "SGD"}, "tranche": {"moments": "bf16"}})"),
      HasSubstr("tranche.moments: SGD: it keeps no moments with these parameters, in bf16 or any dtype"));
  EXPECT_THAT(problems(R"({"fp16": {"enabled": true, "initial_scale_power": 81}})"),
              HasSubstr("fp16.initial_scale_power: 81 is not between 0 and 80"));
  EXPECT_THAT(problems(R"({"fp16": {"enabled": true, "loss_scale_window": 0}})"),
              HasSubstr("fp16: window 0"));
  EXPECT_THAT(problems(R"({"fp16": {"enabled": true, "loss_scale": -2}})"),
              HasSubstr("initial scale of the loss"));
  EXPECT_THAT(problems(R"({"bf16": {"enabled": true}, "bfloat16": {"enabled": true}})"),
              HasSubstr("bf16.enabled and bfloat16.enabled are two names of one key"));
}

TEST(Config, WhatEarlierVersionsHadByDefaultIsFoundInASavedConfiguration) {
  const std::string earlier =
      parse_config(R"({"bf16": {"enabled": true}, "gradient_clipping": 1.0})", 1).to_json();
  const auto found = [&](const char* json, const std::string& saved) {
    const EarlierDefaults defaults = earlier_defaults(parse_config(json, 1), saved);
    return std::string(defaults.bf16 ? "bf16 " : "") + (defaults.clipping ? "clipping" : "");
  };
  EXPECT_EQ(found("{}", earlier), "bf16 clipping");
  EXPECT_EQ(found(R"({"bf16": {"enabled": false}})", earlier), "clipping");
  EXPECT_EQ(found(R"({"gradient_clipping": 0, "fp16": {"enabled": false}})", earlier), "bf16 ");
  EXPECT_EQ(found(R"({"gradient_clipping": "auto", "fp16": {"enabled": true}})", earlier), "");
  EXPECT_EQ(found("{}", parse_config("{}", 1).to_json()), "");
  EXPECT_EQ(
      found("{}", parse_config(R"({"fp16": {"enabled": true}, "gradient_clipping": 0.5})", 1).to_json()), "");
  EXPECT_EQ(found("{}", ""), "");
  EXPECT_EQ(found("{}", "[1]"), "");
  EXPECT_FALSE(earlier_defaults(Config(), earlier).any()) << "a Config made in C++ says everything";
}

TEST(Config, Fp16BringsLossScaling) {
  const Config dynamic = parse_config(
      R"({"fp16": {"enabled": true, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 3,
          "consecutive_hysteresis": true, "min_loss_scale": 4}})",
      1);
  EXPECT_TRUE(dynamic.loss_scaling);
  EXPECT_TRUE(dynamic.loss_scaler.dynamic);
  EXPECT_EQ(dynamic.loss_scaler.initial_scale, 4096);
  EXPECT_EQ(dynamic.loss_scaler.window, 500);
  EXPECT_EQ(dynamic.loss_scaler.hysteresis, 3);
  EXPECT_TRUE(dynamic.loss_scaler.consecutive_hysteresis);
  EXPECT_EQ(dynamic.loss_scaler.minimum_scale, 4);
  const Config fixed = parse_config(R"({"fp16": {"enabled": true, "loss_scale": 100}})", 1);
  EXPECT_FALSE(fixed.loss_scaler.dynamic);
  EXPECT_EQ(fixed.loss_scaler.initial_scale, 100);
  EXPECT_FALSE(parse_config(R"({"fp16": {"enabled": false, "loss_scale": 100}})", 1).loss_scaling);
}

TEST(Config, UnknownKeysAreToldWithThePathAndTheNearest) {
  EXPECT_EQ(problems(R"({"train_batchsize": 8})"),
            "configuration: unknown key 'train_batchsize'; did you mean 'train_batch_size'?");
  EXPECT_THAT(
      problems(R"({"zero_optimization": {"overlap_com": true}})"),
      HasSubstr(
          "unknown key 'zero_optimization.overlap_com'; did you mean 'zero_optimization.overlap_comm'?"));
  EXPECT_THAT(problems(R"({"optimizer": {"params": {"beta": [0.9, 0.99]}}})"),
              HasSubstr("unknown key 'optimizer.params.beta'; did you mean 'optimizer.params.betas'?"));
  EXPECT_THAT(problems(R"({"optimizer": {"type": "AdamW", "params": {"learning_rate": 1, "epsilon": 1}}})"),
              AllOf(HasSubstr("'optimizer.params.learning_rate'; did you mean 'optimizer.params.lr'?"),
                    HasSubstr("'optimizer.params.epsilon'; did you mean 'optimizer.params.eps'?")));
  EXPECT_THAT(problems(R"({"micro_batch_size": 3})"),
              HasSubstr("did you mean 'train_micro_batch_size_per_gpu'?"));
  EXPECT_THAT(problems(R"({"optimizer": {"stage": 3}})"),
              HasSubstr("unknown key 'optimizer.stage'; did you mean 'zero_optimization.stage'?"));
  EXPECT_THAT(problems(R"({"zero_optimization": {"offload_param": {"devise": "none"}}})"),
              HasSubstr("unknown key 'zero_optimization.offload_param.devise'"));
  EXPECT_THAT(problems(R"({"aio": {"blok_size": 1}})"),
              HasSubstr("unknown key 'aio.blok_size'; did you mean 'aio.block_size'?"));
  EXPECT_THAT(problems(R"({"tranche": {"debug": {"poison": true}}})"),
              HasSubstr("did you mean 'tranche.debug.poison_memory'?"));
  EXPECT_EQ(problems(R"({"optimizer": {"xyzzy": 1}})"), "configuration: unknown key 'optimizer.xyzzy'");
  EXPECT_THAT(problems(R"({"fp_16": {"enabled": true}})"),
              HasSubstr("unknown key 'fp_16'; did you mean 'fp16'?"));
}

TEST(Config, SchedulesThatDoNotExistAreToldWithoutAPipelineToo) {
  EXPECT_THAT(
      problems(R"({"train_batch_size": 8, "tranche": {"pipeline_schedule": "zb-h"}})"),
      HasSubstr("tranche.pipeline_schedule: 'zb-h' is no schedule (did you mean zb-h1?); there are afab"));
  EXPECT_THAT(problems(R"({"train_batch_size": 8, "tranche": {"pipeline_chunks": 1025}})"),
              HasSubstr("tranche.pipeline_chunks: 1025 is not in 0 to 1024"));
}

TEST(Config, UnknownKeysOfTheTopLevelAreIgnoredUnlessTheyAreNearAKnownOne) {
  const Config config = parse_config(
      R"({"xyzzy": 1, "seed": {"a": [1]}, "learning_rate": 1, "name": "run", "// why": "x",
          "optimizer": {"params": {"lr": 2}}})",
      1, {"tranche.seed=3"});
  EXPECT_THAT(
      notes_on_keys(config),
      ElementsAre("unknown key 'xyzzy': ignored", "unknown key 'seed': ignored; there is 'tranche.seed'",
                  "unknown key 'learning_rate': ignored; there is 'optimizer.params.lr'",
                  "unknown key 'name': ignored", "unknown key '// why': ignored"));
  EXPECT_EQ(config.seed, 3u);
  EXPECT_EQ(config.optimizer.learning_rate, 2);
  const std::pair<const char*, const char*> mistyped[] = {
      {"micro_batch_size_per_gpu", "train_micro_batch_size_per_gpu"},
      {"micro_batch_size", "train_micro_batch_size_per_gpu"},
      {"batch_size", "train_batch_size"},
      {"train_batchsize", "train_batch_size"},
      {"gradient_accumulation_step", "gradient_accumulation_steps"},
      {"zero_optimisation", "zero_optimization"},
      {"Optimizer", "optimizer"},
      {"fp8", "fp16"},
      {"bf61", "bf16"},
      {"rtain_batch_size", "train_batch_size"},
  };
  for (const auto& [name, meant] : mistyped) {
    EXPECT_EQ(problems(std::string("{\"") + name + "\": 1}"),
              std::string("configuration: unknown key '") + name + "'; did you mean '" + meant + "'?");
  }
}

TEST(Config, OtherNamesAndPlacesOfKeysAreRefusedUnlessTheKeyItselfIsGiven) {
  const std::pair<const char*, const char*> others[] = {
      {"learning_rate", "optimizer.params.lr"},  {"lr", "optimizer.params.lr"},
      {"max_grad_norm", "gradient_clipping"},    {"weight_decay", "optimizer.params.weight_decay"},
      {"global_batch_size", "train_batch_size"}, {"seed", "tranche.seed"},
      {"stage", "zero_optimization.stage"}};
  for (const auto& [name, ours] : others) {
    EXPECT_EQ(problems(fmt::format(R"({{"{}": 1}})", name)),
              fmt::format("configuration: unknown key '{}'; did you mean '{}'? Where that is given too, this "
                          "one is ignored",
                          name, ours));
  }
  const std::string folder = std::string(TRANCHE_CONFIGS) + "/";
  const Config script = load_config(folder + "keys_of_the_script.json", 1, {"tranche.seed=42"});
  EXPECT_THAT(notes_on_keys(script), Contains("unknown key 'seed': ignored; there is 'tranche.seed'"));
  const Config neox = load_config(folder + "gpt_neox_small.json", 1, {"optimizer.params.weight_decay=0.1"});
  EXPECT_THAT(notes_on_keys(neox),
              Contains("unknown key 'weight_decay': ignored; there is 'optimizer.params.weight_decay'"));
}

TEST(Config, PeftsNamesOfKeysOfAdaptersAreToldOurs) {
  const std::pair<const char*, const char*> names[] = {{"r", "rank"},
                                                       {"lora_alpha", "alpha"},
                                                       {"target_modules", "targets"},
                                                       {"lora_dropout", "dropout"},
                                                       {"use_rslora", "rslora"}};
  for (const auto& [theirs, ours] : names) {
    EXPECT_THAT(problems(fmt::format(R"({{"tranche": {{"lora": {{"rank": 8, "{}": 1}}}}}})", theirs)),
                HasSubstr(fmt::format("unknown key 'tranche.lora.{}'; did you mean 'tranche.lora.{}'?",
                                      theirs, ours)));
  }
}

TEST(Config, UnknownKeysOfOverridesAreRefused) {
  const auto refused = [](const std::string& text) {
    try {
      parse_config("{}", 1, {text});
    } catch (const ConfigurationError& error) {
      return error.message();
    }
    return std::string("nothing");
  };
  EXPECT_EQ(refused("epochs=3"), "configuration: unknown key 'epochs'");
  EXPECT_EQ(refused("xyzzy.a=3"), "configuration: unknown key 'xyzzy'");
  EXPECT_EQ(refused("learning_rate=2e-5"),
            "configuration: unknown key 'learning_rate'; did you mean 'optimizer.params.lr'?");
  EXPECT_EQ(refused("wandb.enabled=true"), "nothing") << "a key without a meaning here";
}

TEST(Config, FilesOfOtherProgramsAreRefused) {
  const std::string block = "' is no key, but its block holds '";
  EXPECT_THAT(problems(R"({"ds_config": {"zero_optimization": {"stage": 3}}})"),
              AllOf(HasSubstr("'ds_config" + block +
                              "zero_optimization', which is one: the keys stand at the top "
                              "level of the file; make a file of that block")));
  EXPECT_THAT(problems(R"({"train_batch_size": 8, "deepspeed": {"x": 1, "optimizer": {}}})"),
              HasSubstr("'deepspeed" + block + "optimizer'"));
  const std::string model = "is a key of a model's config.json, which --model takes";
  EXPECT_EQ(problems(R"({"architectures": ["A"], "model_type": "llama"})"),
            "configuration: 'model_type' " + model);
  EXPECT_EQ(problems(R"({"architectures": ["A"]})"), "configuration: 'architectures' " + model);
  EXPECT_EQ(
      problems(R"({"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["c_attn"]})"),
      "configuration: 'peft_type' is a key of PEFT's adapter_config.json: keys like tranche.lora.rank ask "
      "for adapters, and tranche checkpoint import reads PEFT's folder");
  const std::string arguments = "' is a key of transformers' TrainingArguments, which are no configuration: ";
  EXPECT_THAT(problems(R"({"output_dir": "out", "per_device_train_batch_size": 8, "learning_rate": 1e-4})"),
              AllOf(HasSubstr("2 problems"), HasSubstr("'per_device_train_batch_size" + arguments),
                    HasSubstr("'optimizer.params.lr'")));
  EXPECT_THAT(problems(R"({"output_dir": "out"})"), HasSubstr("'output_dir" + arguments));
}

TEST(Config, StrictRefusesEveryUnknownKey) {
  try {
    parse_config(R"({"xyzzy": 1, "stage": 3, "train_batch_size": 1})", 1, {}, true);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const ConfigurationError& error) {
    EXPECT_EQ(error.message(),
              "configuration has 2 problems:\n  unknown key 'xyzzy'\n  unknown key 'stage'; did you mean "
              "'zero_optimization.stage'?");
  }
}

TEST(Config, WrongTypesNameKeyExpectationAndValue) {
  EXPECT_EQ(problems(R"({"train_batch_size": "sixteen"})"),
            "configuration: train_batch_size: expected an integer or \"auto\", found the text \"sixteen\"");
  EXPECT_THAT(problems(R"({"train_batch_size": 2.5})"),
              HasSubstr("expected an integer or \"auto\", found 2.5"));
  EXPECT_THAT(problems(R"({"zero_optimization": {"stage": true}})"),
              HasSubstr("zero_optimization.stage: expected an integer, found true"));
  EXPECT_THAT(problems(R"({"zero_optimization": 3})"),
              HasSubstr("zero_optimization: expected a block {...}, found 3"));
  EXPECT_THAT(problems(R"({"bf16": {"enabled": 1}})"),
              HasSubstr("expected true or false or \"auto\", found 1"));
  EXPECT_THAT(problems(R"({"gradient_clipping": [1]})"),
              HasSubstr("expected a number or \"auto\", found the list [1]"));
  EXPECT_THAT(problems(R"({"optimizer": {"params": {"betas": [0.9, "x"]}}})"),
              HasSubstr("optimizer.params.betas: expected a list of numbers"));
  EXPECT_THAT(problems(R"({"optimizer": {"params": {"betas": [0.9]}}})"),
              HasSubstr("optimizer.params.betas: expected two numbers, found 1"));
  EXPECT_THAT(problems(R"({"tranche": {"frozen": "wte"}})"),
              HasSubstr("expected a list of texts, found the text"));
  EXPECT_THAT(
      problems(R"({"tranche": {"workspace": "12 parsecs"}})"),
      HasSubstr("tranche.workspace: expected a size (bytes, or text such as \"16GiB\"), found the text"));
  EXPECT_THAT(problems(R"({"tranche": {"seed": "auto"}})"),
              HasSubstr("tranche.seed: expected an integer, found"));
  EXPECT_THAT(problems(R"({"train_batch_size": 1e300})"), HasSubstr("expected an integer"));
}

TEST(Config, FloatsAndNullStandWhereTheyMay) {
  const Config config =
      parse_config(R"({"train_batch_size": 8.0, "steps_per_print": null, "zero_optimization":
                       {"reduce_bucket_size": 5e8, "offload_param": null}, "scheduler": null})",
                   1);
  EXPECT_EQ(config.train_batch_size, 8);
  EXPECT_EQ(config.reduce_bucket_elements, 500'000'000);
}

TEST(Config, ParameterGroupsAreCheckedEntryByEntry) {
  EXPECT_THAT(problems(R"({"tranche": {"parameter_groups": {"pattern": "x"}}})"),
              HasSubstr("tranche.parameter_groups: expected a list of blocks, found the block"));
  EXPECT_THAT(problems(R"({"tranche": {"parameter_groups": ["x"]}})"),
              HasSubstr("tranche.parameter_groups[0]: expected a block {...}, found the text \"x\""));
  EXPECT_THAT(problems(R"({"tranche": {"parameter_groups": [{"pattern": "x"}, {"patern": "y"}]}})"),
              AllOf(HasSubstr("unknown key 'tranche.parameter_groups[1].patern'"),
                    HasSubstr("tranche.parameter_groups[1]: the key 'pattern' is missing")));
  EXPECT_THAT(problems(R"({"tranche": {"parameter_groups": [{"pattern": "x", "decay": "no"}]}})"),
              HasSubstr("tranche.parameter_groups[0].decay: expected true or false, found the text \"no\""));
  EXPECT_THAT(
      problems(R"({"tranche": {"parameter_groups": [{"pattern": "x", "learning_rate_factor": -1}]}})"),
      HasSubstr("'x' has a learning rate factor of -1"));
}

TEST(Config, ParameterGroupsHaveValuesOfTheirOwn) {
  const std::string text = R"({"train_batch_size": 2, "bf16": {"enabled": true}, "gradient_clipping": 0,
    "scheduler": {"type": "WarmupLR"},
    "tranche": {"parameter_groups": [{"pattern": "h.*", "learning_rate": 0.5, "weight_decay": 0.25,
      "betas": [0.5, 0.75], "eps": 1e-3}]}})";
  const Config config = parse_config(text, 2);
  ParameterGroupRule rule{"h.*", std::nullopt, std::nullopt};
  rule.learning_rate = 0.5;
  rule.weight_decay = 0.25;
  rule.betas = {0.5, 0.75};
  rule.epsilon = 1e-3;
  EXPECT_THAT(config.group_rules, ElementsAre(rule));
  EXPECT_EQ(parse_config(config.to_json(), 2).group_rules, config.group_rules);
  EXPECT_THAT(config.notes,
              Contains("tranche.parameter_groups: the rate of 'h.*' is 0.5 in every step; WarmupLR "
                       "does not change it (learning_rate_factor follows the schedule)"));
  EXPECT_THAT(problems(R"({"tranche": {"parameter_groups": [{"pattern": "x", "betas": [0.5]}]}})"),
              HasSubstr("tranche.parameter_groups: pattern 'x': expected two betas, found 1"));
  EXPECT_THAT(problems(R"({"tranche": {"parameter_groups": [{"pattern": "x", "betas": [0.5, 1]}]}})"),
              HasSubstr("'x' has betas [0.5, 1]"));
  EXPECT_THAT(problems(R"({"tranche": {"parameter_groups": [{"pattern": "x", "eps": "small"}]}})"),
              HasSubstr("tranche.parameter_groups[0].eps: expected a number, found the text \"small\""));
}

TEST(Config, ValuesOutOfRange) {
  EXPECT_EQ(problems(R"({"zero_optimization": {"stage": 4}})"),
            "configuration: zero_optimization.stage: stage is 0 to 3, not 4");
  EXPECT_THAT(problems(R"({"zero_optimization": {"stage": -1}})"), HasSubstr("stage is 0 to 3, not -1"));
  EXPECT_THAT(problems(R"({"zero_optimization": {"reduce_bucket_size": -1}})"),
              HasSubstr("zero_optimization.reduce_bucket_size: -1 is not at least 1"));
  EXPECT_THAT(problems(R"({"zero_optimization": {"stage3_prefetch_bucket_size": -1}})"),
              HasSubstr("zero_optimization.stage3_prefetch_bucket_size: -1 is not at least 0"));
  EXPECT_THAT(problems(R"({"tranche": {"depth": 0}})"), HasSubstr("tranche.depth: 0 is not at least 1"));
  EXPECT_THAT(problems(R"({"tranche": {"depth": 9e12}})"),
              HasSubstr("tranche.depth: 9000000000000 is out of range"));
  EXPECT_THAT(problems(R"({"tranche": {"seed": -1}})"), HasSubstr("tranche.seed: -1 is negative"));
  EXPECT_THAT(problems(R"({"tranche": {"communication_timeout": 0}})"),
              HasSubstr("0 seconds is not above 0"));
  EXPECT_THAT(problems(R"({"tranche": {"maximum_consecutive_skips": 0}})"),
              HasSubstr("skips: 0 is not at least 1"));
  EXPECT_THAT(problems(R"({"gradient_clipping": -1})"),
              HasSubstr("gradient_clipping: -1 is neither 0 (off) nor above"));
  EXPECT_THAT(problems(R"({"optimizer": {"params": {"lr": -1}}})"), HasSubstr("optimizer.params.lr: -1"));
  EXPECT_THAT(problems(R"({"optimizer": {"params": {"betas": [0.9, 1.0]}}})"),
              HasSubstr("optimizer.params: AdamW: betas are [0.9, 1]"));
  EXPECT_THAT(problems(R"({"tranche": {"reduction": "never"}})"),
              HasSubstr("tranche.reduction: 'never' is not one of auto, boundary, micro_batch"));
  EXPECT_THAT(problems(R"({"tranche": {"progress": "magic"}})"),
              HasSubstr("'magic' is not one of thread, inline"));
  EXPECT_THAT(problems(R"({"tranche": {"device_transport": "gdr"}})"),
              HasSubstr("tranche.device_transport: 'gdr' is not one of auto, nccl, staged, shared"));
  EXPECT_THAT(problems(R"({"tranche": {"collectives": "nccl", "device_transport": "staged"}})"),
              HasSubstr("tranche.collectives: nccl does not go with tranche.device_transport: staged"));
  EXPECT_THAT(problems(R"({"tranche": {"collectives": "gloo"}})"),
              HasSubstr("tranche.collectives: 'gloo' is not one of auto, ours, messages, shared, nccl"));
  EXPECT_EQ(problems(R"({"tranche": {"collectives": "shared"}})"), "nothing was thrown");
  EXPECT_EQ(problems(R"({"tranche": {"collectives": "messages"}})"), "nothing was thrown");
}

TEST(Config, AllProblemsAreToldAtOnceInTheOrderOfTheFile) {
  EXPECT_EQ(
      problems(
          R"({"trane": 1, "zero_optimization": {"stage": 4, "overlap_comm": 3}, "amp": {"enabled": true}})"),
      "configuration has 4 problems:\n"
      "  unknown key 'trane'; did you mean 'tranche'?\n"
      "  zero_optimization.overlap_comm: expected true or false or \"auto\", found 3\n"
      "  amp: {\"enabled\":true} cannot be honoured: Apex AMP is a PyTorch extension; use bf16 or fp16\n"
      "  zero_optimization.stage: stage is 0 to 3, not 4");
}

TEST(Config, ZeroIsTheDefaultOfSizesThatDeepSpeedAllowsToBeZero) {
  const Config config = parse_config(R"({"zero_optimization": {"stage": 3, "sub_group_size": 0,
    "reduce_bucket_size": 0, "allgather_bucket_size": 0.0, "stage3_prefetch_bucket_size": 0,
    "max_live_parameters": 0}})",
                                     1);
  EXPECT_EQ(config.reduce_bucket_elements, 500'000'000);
  EXPECT_EQ(config.allgather_bucket_elements, 500'000'000);
  EXPECT_EQ(config.prefetch_elements, 50'000'000);
  EXPECT_EQ(config.max_live_elements, 1'000'000'000);
  EXPECT_EQ(config.offload.tile_elements, 1 << 20);
  EXPECT_THAT(
      notes_on_keys(config),
      ElementsAre("zero_optimization.reduce_bucket_size: 0 is taken as 500000000, the default",
                  "zero_optimization.allgather_bucket_size: 0 is taken as 500000000, the default",
                  "zero_optimization.stage3_prefetch_bucket_size: 0 is taken as 50000000, the default",
                  "zero_optimization.max_live_parameters: 0 is taken as 1000000000, the default",
                  "zero_optimization.sub_group_size: 0 is taken as 1000000000, the default"));
}

TEST(Config, TheOlderBooleanOfZeroOptimizationIsAStage) {
  const Config on = parse_config(R"({"zero_optimization": true})", 1);
  EXPECT_EQ(on.stage, 1);
  EXPECT_THAT(on.notes, Contains("zero_optimization: true is taken as stage 1"));
  const Config off = parse_config(R"({"zero_optimization": false})", 1);
  EXPECT_EQ(off.stage, 0);
  EXPECT_THAT(off.notes, Contains("zero_optimization: false is taken as stage 0"));
  EXPECT_EQ(parse_config(R"({"zero_optimization": true})", 1, {"zero_optimization.stage=3"}).stage, 3);
  EXPECT_EQ(parse_config("{}", 1, {"zero_optimization=true"}).stage, 1);
}

TEST(Config, WhatAsksForWhatIsAlwaysSoIsSaid) {
  EXPECT_THAT(
      test::every_note(
          parse_config(R"({"optimizer": {"type": "AdamW", "params": {"bias_correction": true}}})", 1)),
      Contains("optimizer.params.bias_correction: no meaning here: moments are always bias-corrected"));
  EXPECT_EQ(problems(R"({"optimizer": {"params": {"bias_correction": false}}})"),
            "configuration: optimizer.params.bias_correction: false cannot be honoured: moments are always "
            "bias-corrected");
  EXPECT_THAT(test::every_note(parse_config(R"({"compile": {"deepcompile": true}})", 1)),
              Contains("compile: no meaning here: there is no graph compiler"));
  // Older files of Hugging Face have these values.
  EXPECT_EQ(problems(R"({"amp": {"enabled": "auto", "opt_level": "auto"}})"), "nothing was thrown");
}

TEST(Config, WhatIsNotPartOfThisVersionComesFirstAndItsParametersNotAtAll) {
  EXPECT_EQ(
      problems(R"({"nebula": {"enabled": true}, "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3,
    "freeze_step": 100, "cuda_aware": false, "comm_backend_name": "nccl"}}, "scheduler": {"type": "Cyclic",
    "params": {"up": 1e-5, "down": 200}}})"),
      "configuration has 3 problems:\n"
      "  optimizer.type: OneBitAdam is not part of this version; the nearest is AdamW (1-bit Adam compresses "
      "what ranks exchange; communication_data_type says its dtype)\n"
      "  scheduler.type: 'Cyclic' is not one of constant, WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, "
      "LRRangeTest, WSD, InverseSquareRoot\n"
      "  nebula: {\"enabled\":true} cannot be honoured: checkpoints go to file systems");
}

TEST(Config, JsonAsPeopleWriteIt) {
  const Config config = parse_config(R"(# for two nodes
{
  train_micro_batch_size_per_gpu: 4,  // each
  "zero_optimization": {
    stage: 3
    'overlap_comm': True,  /* as always */
  },
  optimizer: {type: SGD, params: {lr: 1e-2,},},
})",
                                     2);
  EXPECT_EQ(config.micro_batch_size, 4);
  EXPECT_EQ(config.stage, 3);
  EXPECT_EQ(config.optimizer.type, "SGD");
  EXPECT_EQ(config.optimizer.learning_rate, 0.01);
  EXPECT_EQ(problems("{\n  # why\n  zero_optimization: {stage: three}\n}"),
            "configuration: zero_optimization.stage: expected an integer, found the text \"three\"");
  EXPECT_EQ(problems("{\n  optimizer: {type: Adam W}\n}"),
            "configuration is not JSON: line 2, column 21: text that is not one word needs quotes");
  EXPECT_THAT(problems(std::string(100, '[')),
              HasSubstr("is not JSON: line 1, column 65: blocks are nested deeper than 64"));
}

TEST(Config, TextThatIsNotJsonIsToldWithItsPlace) {
  EXPECT_THAT(problems("{\n  \"train_batch_size\": 8,,\n}"),
              HasSubstr("is not JSON: line 2, column 25: syntax error"));
  EXPECT_THAT(problems("{\n  // eight\n  train_batch_size: 8 # of them\n"),
              HasSubstr("is not JSON: line 4, column 1"));
  EXPECT_THAT(problems(""), HasSubstr("is not JSON: line 1, column 1"));
  EXPECT_THAT(problems("[1]"), HasSubstr("configuration holds array instead of a block {...} of keys"));
}

TEST(Config, WhatJsonCannotHoldIsRefused) {
  EXPECT_EQ(problems(""), "configuration is not JSON: line 1, column 1: it is empty");
  EXPECT_EQ(problems("# nothing\n"), "configuration is not JSON: line 1, column 1: it is empty");
  EXPECT_THAT(problems("{\n  gradient_clipping: 1e999\n}"),
              HasSubstr("is not JSON: line 2, column 26: number overflow parsing '1e999'"));
  Config config;
  config.offload.nvme_path = "/x/\xff";
  EXPECT_THAT(test::message_of<ConfigurationError>([&] { validate_config(config, 1); }),
              HasSubstr("nvme_path: '/x/\xff' is not UTF-8"));
}

TEST(Config, NumbersTooSmallAndTextInUtf16AreRefused) {
  EXPECT_EQ(
      problems("{\n  gradient_clipping: 1e-400\n}"),
      "configuration is not JSON: line 2, column 22: number underflow parsing '1e-400'; write 0 if that is "
      "meant");
  EXPECT_EQ(
      problems("{}", 1, {"optimizer.params.lr=1e-400"}),
      "configuration: override 'optimizer.params.lr=1e-400': number underflow parsing '1e-400'; write 0 if "
      "that is meant");
  EXPECT_EQ(parse_config(R"({"gradient_clipping": 0e-999, "optimizer": {"params": {"lr": 1e-320}}})", 1)
                .gradient_clipping,
            0);
  for (const char* mark : {"\xff\xfe", "\xfe\xff"}) {
    EXPECT_EQ(problems(mark + std::string("{\0}\0", 4)), "configuration is UTF-16 text; save it as UTF-8");
  }
}

TEST(Config, AKeyGivenTwiceIsAnError) {
  EXPECT_EQ(problems(R"({"bf16": {"enabled": true, "enabled": false}})"),
            "configuration: key 'bf16.enabled' is given twice; keep one");
  EXPECT_THAT(problems(R"({"amp": null, "bf16": {}, "amp": null})"), HasSubstr("key 'amp' is given twice"));
  EXPECT_THAT(
      problems(R"({"tranche": {"parameter_groups": [{"pattern": "a"}, {"pattern": "b", "pattern": "c"}]}})"),
      HasSubstr("key 'tranche.parameter_groups.pattern' is given twice"));
  // The same name in two blocks is not a repetition.
  EXPECT_NO_THROW(parse_config(R"({"bf16": {"enabled": true}, "fp16": {"enabled": false}})", 1));
}

TEST(Config, AdaptersWithoutAlphaOrTargetsAreRefused) {
  EXPECT_EQ(problems("{}", 1, {"tranche.lora.rank=8", "tranche.lora.alpha=0"}),
            "configuration: tranche.lora.alpha: 0 would multiply what an adapter adds by 0; write a positive "
            "number, or leave it out, which is the rank");
  EXPECT_EQ(
      problems(R"({"tranche": {"lora": {"rank": 8, "targets": []}}})"),
      "configuration: tranche.lora.targets: the list names no linear layer; name some, or leave it out, "
      "which is all but the head");
  EXPECT_EQ(parse_config(R"({"tranche": {"lora": {"rank": 8, "alpha": null}}})", 1).lora.effective_alpha(),
            8);
  EXPECT_FALSE(parse_config(R"({"tranche": {"lora": {"rank": 0, "alpha": 0}}})", 1).lora.any());
}

TEST(Config, AKeyWithDotsIsTheKeyInItsBlock) {
  EXPECT_EQ(
      problems(R"({"zero_optimization": {"stage": 3}, "zero_optimization.stage": 1})"),
      "configuration: zero_optimization.stage: given twice, with dots in its name and in its block; keep "
      "one");
  EXPECT_THAT(problems(R"({"optimizer.params.lr": 0.25, "optimizer": {"type": "AdamW", "params.lr": 0.5}})"),
              HasSubstr("optimizer.params.lr: given twice"));
  EXPECT_THAT(problems(R"({"train_batch_size": 4, "optimizer": {"params": {"lr": 0.5, "eps": 1}},
                           "optimizer.params": {"betas": [0.5, 0.5], "lr": "auto"}})"),
              HasSubstr("optimizer.params.lr: given twice"));
  EXPECT_THAT(problems(R"({"zero_optimization": true, "zero_optimization.stage": 2})"),
              HasSubstr("zero_optimization.stage: given twice"));
  EXPECT_THAT(problems(R"({"bf16": 1, "bf16.enabled": true})"), HasSubstr("bf16: given twice"));
  const Config config = parse_config(
      R"({"optimizer.params.lr": 0.25, "optimizer": {"type": "SGD", "params": {"lr": null, "momentum": 0.5}},
          "bf16.enabled": true, "another.program": 1})",
      1, {"optimizer.params.lr=0.125", "bf16={\"enabled\": false}", R"(optimizer={"params.lr": 0.0625})"});
  EXPECT_EQ(config.optimizer.learning_rate, 0.0625);
  EXPECT_EQ(config.precision.compute, DataType::float32);
}

TEST(Config, AnOverrideIsNoPlaceForAKeyTwice) {
  EXPECT_EQ(
      problems("{}", 1, {R"(tranche.lora={"rank": 4, "rank": 8})"}),
      R"(configuration: override 'tranche.lora={"rank": 4, "rank": 8}': key 'rank' is given twice; keep one)");
  EXPECT_THAT(problems("{}", 1, {R"(optimizer={"params.lr": 1, "params": {"lr": 2}})"}),
              HasSubstr("optimizer.params.lr: given twice"));
}

TEST(Config, ANoteNamesTheKeysThatABlockOfAnOverrideRemoves) {
  constexpr const char* file =
      R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.5, "weight_decay": 0.1}}})";
  const auto notes = [&](const std::vector<std::string>& overrides) {
    std::vector<std::string> found = parse_config(file, 1, overrides).notes;
    std::erase_if(found, [](const auto& note) { return note.find("replaces") == std::string::npos; });
    return found;
  };
  EXPECT_THAT(
      notes({R"(optimizer.params={"betas": [0.8, 0.9]})"}),
      ElementsAre(R"(optimizer.params={"betas": [0.8, 0.9]} replaces the whole block, and so removes )"
                  "optimizer.params.lr, optimizer.params.weight_decay of the configuration"));
  EXPECT_THAT(notes({R"(optimizer={"type": "SGD", "params": {"lr": 1}})"}),
              ElementsAre(HasSubstr("removes optimizer.params.weight_decay of")));
  EXPECT_THAT(notes({R"(optimizer.params={"lr": 1, "weight_decay": 0})", "tranche.lora={\"rank\": 4}",
                     "tranche.lora={\"rank\": 8}"}),
              IsEmpty());
  EXPECT_THAT(notes({"optimizer=null"}), IsEmpty());  // it says so itself
  EXPECT_THAT(parse_config(R"({"zero_optimization": {"stage": 3}})", 1, {"zero_optimization=true"}).notes,
              Contains(HasSubstr("zero_optimization=true replaces the whole block, and so removes "
                                 "zero_optimization.stage of the configuration")));
  EXPECT_THAT(problems("{}", 1, {"a~b/c=1"}), HasSubstr("unknown key 'a~b/c'"));
  std::string keys;
  for (int i = 0; i < 10; ++i) keys += fmt::format("{}\"{}\": 1", i == 0 ? "" : ", ", i);
  EXPECT_THAT(check_config("{\"another\": {" + keys + "}}", 1, {"another={}"}).notes,
              Contains(HasSubstr("another.6, another.7 and 2 more keys of the configuration")));
}

TEST(Config, OverridesReachEveryKeyBeforeAnythingIsChecked) {
  const Config config =
      parse_config(R"({"zero_optimization": {"stage": 4}})", 2,
                   {"zero_optimization.stage=2", "optimizer.params.lr=3e-4", "optimizer.type=SGD",
                    "tranche.debug.poison_memory=true", "tranche.frozen=[\"a\", \"b\"]",
                    "train_batch_size=auto", "train_batch_size=6"});
  EXPECT_EQ(config.stage, 2);
  EXPECT_EQ(config.optimizer.learning_rate, 3e-4);
  EXPECT_EQ(config.optimizer.type, "SGD");
  EXPECT_TRUE(config.debug.poison_memory);
  EXPECT_THAT(config.frozen, ElementsAre("a", "b"));
  EXPECT_EQ(config.train_batch_size, 6);
}

TEST(Config, TheAxisTensorByDeepSpeedsBlock) {
  const auto block = [](const std::string& keys) { return R"({"tensor_parallel": {)" + keys + "}}"; };
  const std::string two = block(R"("autotp_size": 2)");
  EXPECT_EQ(parse_config(two, 8).mesh, "shard=*, tensor=2");
  EXPECT_EQ(parse_config(two, 8, {"pipeline.stages=2"}).mesh, "pipeline=2, shard=*, tensor=2");
  EXPECT_EQ(parse_config(two, 8, {"zero_optimization.mics_shard_size=2"}).mesh,
            "replicate=*, shard=2, tensor=2");
  EXPECT_EQ(parse_config(two, 8, {"tranche.mesh=\"tensor=2, shard=*\""}).mesh, "tensor=2, shard=*");
  for (const char* off : {"0", "1"}) {
    EXPECT_EQ(parse_config(block(std::string("\"autotp_size\": ") + off), 8).mesh, "") << off;
  }
  EXPECT_EQ(parse_config(block(R"("autotp_size": 0)"), 8, {"tranche.mesh=\"shard=*, tensor=4\""})
                .mesh_of(8)
                .size(MeshAxis::tensor),
            4);
  const Config automatic = parse_config(block(R"("autotp_size": "auto")"), 8);
  EXPECT_EQ(automatic.mesh, "");
  EXPECT_THAT(automatic.notes,
              Contains("tensor_parallel.autotp_size: \"auto\" is 1: write the number of ranks "
                       "that share layers"));
  EXPECT_EQ(problems(two, 8, {"tranche.mesh=\"shard=*, tensor=4\""}),
            "configuration: tensor_parallel.autotp_size: 2 with tranche.mesh (--mesh) \"shard=*, tensor=4\", "
            "whose axis tensor has 4; give one of the two");
  EXPECT_EQ(problems(block(R"("autotp_size": 1)"), 8, {"tranche.mesh=\"shard=*, tensor=4\""}),
            "configuration: tensor_parallel.autotp_size: 1 with tranche.mesh (--mesh) \"shard=*, tensor=4\", "
            "whose axis tensor has 4; give one of the two");
  EXPECT_EQ(
      problems(two, 3),
      "configuration: tensor_parallel.autotp_size, tranche.mesh: mesh \"shard=*, tensor=2\": tensor 2 does "
      "not divide the 3 ranks, so shard cannot take the rest; the closest mesh of 3 ranks is \"shard=*, "
      "tensor=3\"");
  EXPECT_EQ(problems(block(R"("autotp_size": -1)"), 8),
            "configuration: tensor_parallel.autotp_size: -1 is neither a number of ranks nor 0 (off)");
  EXPECT_THAT(problems(block(R"("tp": {"tp_size": 2})"), 8),
              HasSubstr("tensor_parallel.tp: {\"tp_size\":2} cannot be honoured: write "
                        "tensor_parallel.autotp_size instead"));
  // Batch sizes refer to data ranks, each of which has six ranks here.
  const std::string six = R"({"pipeline": {"stages": 3}, "tensor_parallel": {"autotp_size": 2})";
  EXPECT_EQ(check_config(six + "}").ranks, 6);
  EXPECT_EQ(check_config(six + R"(, "train_batch_size": 8, "gradient_accumulation_steps": 2,
                                  "train_micro_batch_size_per_gpu": 2})")
                .ranks,
            12);
}

TEST(Config, TheAxisContextByDeepSpeedsKey) {
  const std::string two = R"({"sequence_parallel_size": 2})";
  const Config config = parse_config(two, 8);
  EXPECT_EQ(config.mesh, "shard=*, context=2");
  EXPECT_EQ(config.context_exchange, ContextExchange::ulysses) << "as DeepSpeed exchanges attention";
  EXPECT_EQ(config.train_batch_size, 4) << "ranks of context see the same samples";
  EXPECT_EQ(parse_config(config.to_json(), 8).mesh, config.mesh);
  EXPECT_EQ(parse_config(two, 8, {"tranche.context_exchange=gather"}).context_exchange,
            ContextExchange::gather);
  EXPECT_EQ(parse_config(R"({"sequence_parallel_size": 1})", 8).mesh, "");
  EXPECT_EQ(parse_config(R"({"sequence_parallel_size": 1})", 8).context_exchange, ContextExchange::gather);
  // All of DeepSpeed's keys together make the mesh, slowest axis first.
  const std::string all = R"({"sequence_parallel_size": 2, "pipeline": {"stages": 2},
                              "tensor_parallel": {"autotp_size": 2}})";
  EXPECT_EQ(parse_config(all, 16).mesh, "pipeline=2, shard=*, context=2, tensor=2");
  EXPECT_EQ(parse_config(all, 32, {"zero_optimization.mics_shard_size=2"}).mesh,
            "pipeline=2, replicate=*, shard=2, context=2, tensor=2");
  EXPECT_EQ(check_config(all).ranks, 8);
  EXPECT_EQ(parse_config(two, 8, {"tranche.mesh=\"context=2, shard=*\""}).mesh, "context=2, shard=*");
  EXPECT_EQ(
      problems(two, 8, {"tranche.mesh=\"shard=*, context=4\""}),
      "configuration: sequence_parallel_size: 2 with tranche.mesh (--mesh) \"shard=*, context=4\", whose "
      "axis context has 4; give one of the two");
  EXPECT_EQ(
      problems(two, 3),
      "configuration: sequence_parallel_size, tranche.mesh: mesh \"shard=*, context=2\": context 2 does "
      "not divide the 3 ranks, so shard cannot take the rest; the closest mesh of 3 ranks is \"shard=*, "
      "context=3\"");
  EXPECT_EQ(problems(R"({"sequence_parallel_size": 0})", 8),
            "configuration: sequence_parallel_size: 0 is not at least 1");
  EXPECT_THAT(parse_config(R"({"sequence_parallel_size": "auto"})", 8).notes,
              Contains("sequence_parallel_size: \"auto\" is 1: write the number of ranks that share each "
                       "sequence"));
}

TEST(Config, ALayoutNamesDimensions) {
  const auto layout = [](const std::string& json) { return R"({"tranche": {"layout": )" + json + "}}"; };
  const std::string two = R"({"vocabulary": "whole", "inner": "tensor"})";
  const Config config = parse_config(layout(two), 2, {"tranche.mesh=tensor=2"});
  EXPECT_TRUE(config.leaves_whole("vocabulary"));
  EXPECT_FALSE(config.leaves_whole("inner"));
  EXPECT_FALSE(config.leaves_whole("heads"));
  EXPECT_THAT(config.notes, Not(Contains(HasSubstr("tranche.layout"))));
  EXPECT_EQ(parse_config(config.to_json(), 2).layout, config.layout);
  Config idle = parse_config(layout(two), 2);
  validate_config(idle, 2);
  EXPECT_EQ(std::count(idle.notes.begin(), idle.notes.end(),
                       "tranche.layout has no effect: the mesh has no axis tensor"),
            1)
      << "however often it is validated";
  EXPECT_TRUE(
      parse_config("{}", 2, {"tranche.mesh=tensor=2", "tranche.layout.inner=whole"}).leaves_whole("inner"));
  EXPECT_EQ(problems(layout(R"({"vocabulary": "all", "inner": 2})"), 2),
            "configuration has 2 problems:\n"
            "  tranche.layout: expected whole or tensor for each dimension, found 2 for inner\n"
            "  tranche.layout: vocabulary is 'all', which is neither whole nor tensor");
  EXPECT_EQ(problems(layout(R"(["vocabulary"])"), 2),
            "configuration: tranche.layout: expected an object such as {\"vocabulary\": \"whole\"}, not "
            "[\"vocabulary\"]");
  EXPECT_THAT(
      problems(layout(R"({"inner": "whole"})"), 2,
               {"tranche.mesh=tensor=2", "tranche.lora.rank=2", "tranche.lora.dropout=0.1"}),
      HasSubstr(
          "tranche.lora.dropout: tranche.layout leaves inner whole, so adapters of the MLP see only their "
          "rank's own rows, and their dropout masks would differ from those of a run on one rank; set it to "
          "0, or leave inner out of the layout"));
}

TEST(Config, APipelineByDeepSpeedsBlock) {
  const auto block = [](const std::string& keys) { return R"({"pipeline": {)" + keys + "}}"; };
  const std::string two = block(R"("stages": 2)");
  EXPECT_EQ(parse_config(two, 8).mesh, "pipeline=2, shard=*");
  EXPECT_EQ(parse_config(two, 8).tie_sum, TieSum::by_use);
  const std::string taken =
      "tranche.tie_sum: together is taken as by_use: the stages of a pipeline add each use's gradients";
  EXPECT_THAT(parse_config(two, 8).notes, Not(Contains(taken)));
  EXPECT_THAT(parse_config(two, 8, {"tranche.tie_sum=together"}).notes, Contains(taken));
  EXPECT_THAT(parse_config("{}", 8, {"tranche.tie_sum=together"}).notes, Not(Contains(taken)));
  EXPECT_THAT(
      problems("{}", 2, {"tranche.tie_sum=by_use", "tranche.gradient_noise_scale=true"}),
      HasSubstr(
          "tranche.gradient_noise_scale: not with tranche.tie_sum by_use: gradients are added by use, as "
          "on a pipeline, whose stages each have only part of a gradient; turn the noise scale off"));
  EXPECT_EQ(parse_config(two, 8, {"zero_optimization.mics_shard_size=2"}).mesh,
            "pipeline=2, replicate=*, shard=2");
  EXPECT_EQ(parse_config(block(R"("stages": 1)"), 8).mesh, "");
  const Config automatic = parse_config(block(R"("stages": "auto", "partition": "auto")"), 8);
  EXPECT_EQ(automatic.mesh, "");
  EXPECT_THAT(automatic.notes, Contains("pipeline.stages: \"auto\" is 1: write the number of stages for a "
                                        "pipeline"));
  const Config filled =
      parse_config(block(R"("stages": "auto")"), 8, {"tranche.mesh=\"pipeline=4, shard=*\""});
  EXPECT_EQ(filled.mesh_of(8).size(MeshAxis::pipeline), 4);
  EXPECT_THAT(filled.notes, Not(Contains(HasSubstr("\"auto\" is 1"))));

  EXPECT_EQ(parse_config(two, 8, {"tranche.mesh=\"shard=*, pipeline=2\""}).mesh, "shard=*, pipeline=2");
  EXPECT_EQ(
      problems(two, 8, {"tranche.mesh=\"pipeline=4, shard=*\""}),
      "configuration: pipeline.stages: 2 with tranche.mesh (--mesh) \"pipeline=4, shard=*\", whose axis "
      "pipeline has 4; give one of the two");
  EXPECT_EQ(
      problems(two, 8, {"tranche.mesh=\"replicate=2, shard=*\""}),
      "configuration: pipeline.stages: 2 with tranche.mesh (--mesh) \"replicate=2, shard=*\", whose axis "
      "pipeline has 1; give one of the two");
  EXPECT_EQ(problems(two, 3),
            "configuration: pipeline.stages, tranche.mesh: mesh \"pipeline=2, shard=*\": pipeline 2 does not "
            "divide the 3 ranks, so shard cannot take the rest; the closest mesh of 3 ranks is \"pipeline=3, "
            "shard=*\"");
  EXPECT_EQ(problems(block(R"("stages": 0)"), 8), "configuration: pipeline.stages: 0 is not at least 1");
  // Batch sizes refer to data ranks.
  EXPECT_EQ(
      check_config(R"({"pipeline": {"stages": 2}, "train_batch_size": 8, "gradient_accumulation_steps": 2,
                             "train_micro_batch_size_per_gpu": 2})")
          .ranks,
      4);
  EXPECT_EQ(check_config(two).ranks, 2);

  const auto cuts = [&](const std::string& method) {
    return parse_config(block(R"("stages": 2, "partition": ")" + method + "\""), 2);
  };
  EXPECT_EQ(cuts("uniform").pipeline_cuts, PipelineCuts::equal);
  EXPECT_EQ(cuts("Parameters").pipeline_cuts, PipelineCuts::parameters);
  EXPECT_EQ(parse_config(cuts("parameters").to_json(), 2).pipeline_cuts, PipelineCuts::parameters);
  EXPECT_EQ(cuts("best").pipeline_cuts, PipelineCuts::balanced);
  EXPECT_THAT(cuts("best").notes,
              Contains("pipeline.partition: best is taken as tranche.pipeline_cuts balanced: the largest "
                       "stage gets as few forward operations as possible"));
  EXPECT_THAT(parse_config(block(R"("partition": "uniform")"), 2).notes,
              Contains("pipeline.partition has no effect: the mesh has no axis pipeline"));
  const auto refused_cuts = [&](const std::string& method, const std::vector<std::string>& set = {}) {
    return problems(block(R"("stages": 2, "partition": ")" + method + "\""), 2, set);
  };
  EXPECT_EQ(
      refused_cuts("type:transformer"),
      "configuration: pipeline.partition: 'type:transformer' balances layers by the names of their Python "
      "classes, which units do not have; write uniform, parameters or best, or list the cuts in "
      "tranche.pipeline_cuts");
  EXPECT_EQ(refused_cuts("profile"),
            "configuration: pipeline.partition: 'profile' is not one of uniform, parameters, best");
  EXPECT_EQ(refused_cuts("uniform", {"tranche.pipeline_cuts=balanced"}),
            "configuration: pipeline.partition: uniform means tranche.pipeline_cuts equal, but that key is "
            "\"balanced\" in the same configuration; give one of the two");
  EXPECT_THAT(
      refused_cuts("uniform", {"tranche.pipeline_cuts=\"even\""}),
      HasSubstr("tranche.pipeline_cuts: expected balanced, equal, parameters, or a list with the number of "
                "the first unit of every stage (or chunk) except the first one, not \"even\""));

  const Config others = parse_config(
      block(R"("stages": 2, "seed_layers": true, "activation_checkpoint_interval": 1, "use_reentrant": true,
               "pipe_partitioned": true, "grad_partitioned": true)"),
      2);
  EXPECT_EQ(others.ignored.size(), 5u);
  EXPECT_EQ(
      describe(others.ignored[1]),
      "pipeline.activation_checkpoint_interval: no meaning here: set tranche.activation_checkpointing and "
      "tranche.checkpoint_every");
  EXPECT_THAT(problems(block(R"("stagez": 2)"), 2), HasSubstr("pipeline.stagez"));
}

TEST(Config, CopiesOfTheStateByDeepSpeedsKeys) {
  const auto zero = [](const std::string& keys) {
    return R"({"zero_optimization": {"stage": 3, )" + keys + "}}";
  };
  const Config hpz = parse_config(zero(R"("zero_hpz_partition_size": 2)"), 8);
  EXPECT_EQ(hpz.mesh, "replicate=*, shard=2");
  EXPECT_EQ(hpz.replicate, Replicate::parameters);
  const Config off = parse_config(zero(R"("zero_hpz_partition_size": 1)"), 8);
  EXPECT_EQ(off.mesh, "");
  EXPECT_EQ(off.replicate, Replicate::all);
  const Config mics = parse_config(zero(R"("mics_shard_size": 4)"), 8, {"tranche.replica_sum=step"});
  EXPECT_EQ(mics.mesh, "replicate=*, shard=4");
  EXPECT_EQ(mics.replicate, Replicate::all);
  EXPECT_EQ(mics.replica_sum, ReplicaSum::step);
  const std::string once =
      "tranche.replica_sum has no effect: gradients are reduced once a step (tranche.reduction boundary)";
  EXPECT_THAT(mics.notes, Not(Contains(once)));
  const std::string copies = R"({"tranche": {"mesh": "replicate=2, shard=*", "replica_sum": "step"}})";
  EXPECT_THAT(parse_config(copies, 8).notes, Contains(once)) << "stage 0";
  const std::vector<std::string> stage_2{"zero_optimization.stage=2"};
  EXPECT_THAT(parse_config(copies, 8, stage_2).notes, Not(Contains(once)));
  EXPECT_THAT(parse_config(copies, 8, {stage_2[0], "tranche.reduction=boundary"}).notes, Contains(once));
  const std::string idle = "tranche.replicate has no effect: the mesh has no axis replicate";
  EXPECT_THAT(parse_config("{}", 8, {stage_2[0], "tranche.replicate=parameters"}).notes, Contains(idle));
  EXPECT_THAT(hpz.notes, Not(Contains(idle)));
  // A mesh with the same replicas may be given as well; another mesh may not.
  const std::string four = zero(R"("mics_shard_size": 4)"), two = zero(R"("zero_hpz_partition_size": 2)");
  EXPECT_EQ(parse_config(four, 8, {"tranche.mesh=\"shard=4, replicate=*\""}).mesh, "shard=4, replicate=*");
  EXPECT_EQ(problems(four, 8, {"tranche.mesh=\"replicate=4, shard=*\""}),
            "configuration: zero_optimization.mics_shard_size: 4 with tranche.mesh (--mesh) \"replicate=4, "
            "shard=*\", where 2 ranks share a copy; give one of the two");
  EXPECT_EQ(problems(two, 8, {"tranche.mesh=\"replicate=2, shard=*\""}),
            "configuration: zero_optimization.zero_hpz_partition_size: 2 with tranche.mesh (--mesh) "
            "\"replicate=2, shard=*\", where 4 ranks share a copy; give one of the two");
  EXPECT_EQ(problems(two, 3),
            "configuration: zero_optimization.zero_hpz_partition_size, tranche.mesh: mesh \"replicate=*, "
            "shard=2\": shard 2 does not divide the 3 ranks, so replicate cannot take the rest; the closest "
            "mesh of 3 ranks is \"replicate=*, shard=3\"");
  EXPECT_EQ(problems(two, 8, {"zero_optimization.stage=2"}),
            "configuration: zero_optimization.zero_hpz_partition_size: 2 needs stage 3, not 2");
  EXPECT_EQ(problems(two, 8, {"tranche.replicate=all"}),
            "configuration: zero_optimization.zero_hpz_partition_size: 2 replicates parameters alone, but "
            "tranche.replicate is all");
  EXPECT_THAT(
      problems(two, 8, {"zero_optimization.mics_shard_size=2"}),
      HasSubstr("zero_optimization.mics_shard_size and zero_optimization.zero_hpz_partition_size both "
                "say how many ranks share a copy; give one of them"));
  EXPECT_THAT(problems(zero(R"("zero_hpz_partition_size": 0)"), 8),
              HasSubstr("zero_hpz_partition_size: 0 is neither a number of ranks nor 1 (off)"));
  EXPECT_THAT(problems("{}", 8, {"tranche.replicate=weights"}),
              HasSubstr("tranche.replicate: 'weights' is not one of all, parameters"));
  EXPECT_THAT(problems("{}", 8, {"tranche.replica_sum=never"}),
              HasSubstr("tranche.replica_sum: 'never' is not one of micro_batch, step"));
}

TEST(Config, UpdatesBeforeTheNormNeedNothingOfIt) {
  const auto problems = [](const std::string& json) {
    return test::message_of<ConfigurationError>(
        [&] { parse_config(json, 2, {"tranche.update=as_reduced"}); });
  };
  EXPECT_EQ(parse_config("{}", 2).update, UpdateTime::at_the_boundary);
  EXPECT_THAT(parse_config("{}", 2).to_json(), Not(HasSubstr("\"update\"")));
  const Config early = parse_config("{}", 2, {"tranche.update=as_reduced"});
  EXPECT_EQ(early.update, UpdateTime::as_reduced);
  EXPECT_EQ(parse_config(early.to_json(), 2).update, UpdateTime::as_reduced);
  EXPECT_TRUE(detail::find_configuration_key("tranche.update")->same_results);
  EXPECT_THAT(problems(R"({"gradient_clipping": 0.5})"),
              HasSubstr("tranche.update: as_reduced cannot be used with gradient_clipping 0.5, which needs "
                        "the norm of all gradients before the first update"));
  EXPECT_THAT(
      problems(R"({"fp16": {"enabled": true}})"),
      HasSubstr("tranche.update: as_reduced cannot be used with fp16, whose loss scale skips a step"));
  EXPECT_THAT(
      problems(R"({"tranche": {"gradient_noise_scale": true}})"),
      HasSubstr(
          "tranche.update: as_reduced cannot be used with tranche.gradient_noise_scale, which measures all"));
  EXPECT_THAT(
      problems(
          R"({"tranche": {"activation_checkpointing": true}, "activation_checkpointing": {"cpu_checkpointing": true},
              "zero_optimization": {"offload_optimizer": {"device": "cpu"}}})"),
      HasSubstr(
          "tranche.update: as_reduced cannot be used with activation_checkpointing.cpu_checkpointing plus "
          "offload_optimizer, because kept block inputs would queue behind new weights on the host link"));
  EXPECT_THAT(test::message_of<ConfigurationError>([] { parse_config("{}", 2, {"tranche.update=early"}); }),
              HasSubstr("tranche.update: 'early' is not one of at_the_boundary, as_reduced"));
}

TEST(Config, OneBatchForEveryNumberOfRanks) {
  const std::string step =
      R"({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "tranche": {"world_size_invariant": true}})";
  for (int ranks = 1; ranks <= 12; ++ranks) {
    const Config config = parse_config(step, ranks);
    EXPECT_EQ(config.reduction, ReductionPolicy::micro_batch);
    EXPECT_EQ(config.accumulation_steps, (12 + ranks - 1) / ranks);
    std::int64_t micro_batches = 0;
    for (int rank = 0; rank < ranks; ++rank) micro_batches += config.micro_batches_of(rank, ranks);
    EXPECT_EQ(micro_batches, 12);
    // The effective configuration does not contain the number of ranks, so that a run can continue with any
    // number of them.
    const Config again = parse_config(config.to_json(), ranks % 12 + 1, {"tranche.communication_slab=1MiB"});
    EXPECT_EQ(again.train_batch_size, 24);
    EXPECT_EQ(again.to_json(), parse_config(step, 1, {"tranche.communication_slab=1MiB"}).to_json());
  }
  EXPECT_EQ(parse_config(step, 12).batch_text(12),
            "24 = 2 per micro-batch x 12, for any number of ranks; 1 round on 12 ranks");
  EXPECT_EQ(parse_config(step, 1).batch_text(1),
            "24 = 2 per micro-batch x 12, for any number of ranks; 12 rounds on 1 rank");
  EXPECT_EQ(parse_config(step, 5).batch_text(5),
            "24 = 2 per micro-batch x 12, for any number of ranks; 3 rounds on 5 ranks, the last on 2");
  EXPECT_EQ(parse_config(step, 5, {"gradient_accumulation_steps=3"}).accumulation_steps, 3);
  EXPECT_EQ(parse_config(step, 5, {"tranche.reduction_group=1"}).reduction_group, 1);
  EXPECT_EQ(problems(step, 5, {"gradient_accumulation_steps=2"}),
            "configuration: gradient_accumulation_steps 2: with tranche.world_size_invariant the 12 "
            "micro-batches of a step take 3 on 5 ranks; leave it out, so that any number of ranks fits");
  EXPECT_EQ(
      problems(step, 14),
      "configuration: tranche.world_size_invariant: the 12 micro-batches of a step (train_batch_size 24 / "
      "train_micro_batch_size_per_gpu 2) leave 2 of 14 ranks without any; start at most 12");
  EXPECT_EQ(problems(step, 2, {"train_batch_size=23"}),
            "configuration: tranche.world_size_invariant: train_batch_size 23 is not a multiple of "
            "train_micro_batch_size_per_gpu 2");
  EXPECT_EQ(
      problems(R"({"train_batch_size": 24})", 2, {"tranche.world_size_invariant=true"}),
      "configuration: tranche.world_size_invariant: train_batch_size and train_micro_batch_size_per_gpu "
      "say what a step is for every number of ranks; give both");
}

TEST(Config, WhatAddsUpByRanksIsRefusedWhereRanksMustNotMatter) {
  const auto refused = [](const std::string& setting, int ranks = 4) {
    return problems(
        R"({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 1, "tranche": {"world_size_invariant": true}})",
        ranks, {setting});
  };
  EXPECT_THAT(refused("tranche.reduction=boundary"),
              HasSubstr("tranche.reduction boundary adds up the micro-batches of each rank first; write "
                        "micro_batch"));
  EXPECT_THAT(refused("tranche.reduction_group=2"),
              HasSubstr("tranche.reduction_group 2 adds up groups of ranks first; leave it out"));
  EXPECT_THAT(refused("data_types.grad_accum_dtype=bf16"),
              HasSubstr("data_types.grad_accum_dtype bf16 rounds the sum once per round, and the number of "
                        "rounds depends on the ranks; write fp32"));
  EXPECT_THAT(refused("tranche.collectives=nccl"),
              HasSubstr("tranche.collectives nccl leaves the order to NCCL; write auto"));
  EXPECT_THAT(refused("tranche.mesh=\"replicate=2, shard=2\""),
              HasSubstr("tranche.world_size_invariant: tranche.mesh \"replicate=2, shard=2\" has 2 copies of "
                        "the model, whose ranks add up each on their own first; leave the mesh out"));
  EXPECT_THAT(refused("zero_optimization.zero_hpz_partition_size=2"), HasSubstr("has 2 copies of the model"));
}

TEST(Config, BlocksAreRefusedWhereFp16Travels) {
  const auto refused = [](const std::string& json, const std::vector<std::string>& settings) {
    return problems(json, 2, settings);
  };
  const std::string fp16 = R"({"fp16": {"enabled": true}})";
  EXPECT_THAT(
      refused(fp16, {"zero_optimization.zero_quantized_gradients=true"}),
      HasSubstr("zero_optimization.zero_quantized_gradients: gradients travel as int8 blocks in place of "
                "fp16, whose range loss scaling is made for; write communication_data_type fp32 or bf16, "
                "or leave one of the two out"));
  EXPECT_THAT(
      refused("{}", {"zero_optimization.zero_quantized_gradients=true", "communication_data_type=fp16"}),
      HasSubstr("in place of fp16"));
  EXPECT_THAT(
      refused(fp16, {"zero_optimization.zero_quantized_weights=true", "communication_data_type=fp32"}),
      HasSubstr("zero_optimization.zero_quantized_weights: with fp16.enabled weights travel in fp16; "
                "compute in bf16 or fp32, or leave it out"));
  const Config config = parse_config(
      fp16, 2, {"zero_optimization.zero_quantized_gradients=true", "communication_data_type=fp32"});
  EXPECT_TRUE(config.quantized_gradients);
  EXPECT_FALSE(config.quantized_weights);
  EXPECT_EQ(config.communication_text(), "int8 blocks");
}

TEST(Config, BlocksAreReadAndWritten) {
  for (const bool gradients : {false, true}) {
    for (const bool weights : {false, true}) {
      const Config config = parse_config(
          R"({"bf16": {"enabled": true}})", 2,
          {std::string("zero_optimization.zero_quantized_gradients=") + (gradients ? "true" : "false"),
           std::string("zero_optimization.zero_quantized_weights=") + (weights ? "true" : "false")});
      EXPECT_EQ(config.quantized_gradients, gradients);
      EXPECT_EQ(config.quantized_weights, weights);
      const Config again = parse_config(config.to_json(), 2);
      EXPECT_EQ(again.quantized_gradients, gradients);
      EXPECT_EQ(again.quantized_weights, weights);
      EXPECT_EQ(config.communication_text(), std::string(gradients ? "int8 blocks" : "bf16") +
                                                 (weights ? ", weights in training int8 blocks" : ""));
    }
  }
}

TEST(Config, OverrideProblems) {
  EXPECT_EQ(problems("{}", 1, {"stage"}),
            "configuration: override 'stage' is not of the form key.path=value");
  EXPECT_THAT(problems("{}", 1, {"=3"}), HasSubstr("override '=3' is not of the form"));
  EXPECT_THAT(problems("{}", 1, {"a..b=3"}), HasSubstr("'a..b' is not a path of blocks and a key"));
  EXPECT_THAT(problems(R"({"train_batch_size": 1})", 1, {"train_batch_size.x=3"}),
              HasSubstr("'train_batch_size.x' is not a path of blocks and a key"));
  EXPECT_THAT(problems("{}", 1, {"zero_optimization.stge=3"}),
              HasSubstr("unknown key 'zero_optimization.stge'; did you mean 'zero_optimization.stage'?"));
}

TEST(Config, AFileIsNamedInItsErrors) {
  const std::string path = ::testing::TempDir() + "/tranche_config_" + std::to_string(::getpid()) + ".json";
  std::ofstream(path) << R"({"zero_optimization": {"stage": 7}})";
  try {
    load_config(path, 1);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const ConfigurationError& error) {
    EXPECT_EQ(error.message(),
              "configuration file '" + path + "': zero_optimization.stage: stage is 0 to 3, not 7");
  }
  EXPECT_EQ(load_config(path, 1, {"zero_optimization.stage=1"}).stage, 1);
  std::remove(path.c_str());
  try {
    load_config(path, 1);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const ConfigurationError& error) {
    EXPECT_EQ(error.message(), "configuration file '" + path + "' cannot be read: No such file or directory");
  }
}

TEST(Config, AConfigMadeInCodeIsCheckedTheSameWay) {
  Config config;
  config.micro_batch_size = 3;
  config.accumulation_steps = 2;
  validate_config(config, 4);
  EXPECT_EQ(config.train_batch_size, 24);
  config.stage = 5;
  config.depth = 0;
  config.precision.compute = DataType::float16;
  config.optimizer.type = "Lyon";
  config.schedule.type = "OneCycle";
  config.train_batch_size = 25;
  try {
    validate_config(config, 4);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const ConfigurationError& error) {
    EXPECT_THAT(
        error.message(),
        AllOf(HasSubstr("configuration has 6 problems"), HasSubstr("stage is 0 to 3, not 5"),
              HasSubstr("tranche.depth: 0"), HasSubstr("loss_scaling goes with fp16"),
              HasSubstr("'Lyon' is not one of AdamW, Adagrad, Adam, LARS, Lamb, Lion, Muon, RMSprop, SGD"),
              HasSubstr("scheduler.params.cycle_min_lr: OneCycle needs it"), HasSubstr("= 24; change one")));
  }
}

TEST(Config, SizesInTextForm) {
  EXPECT_EQ(parse_byte_size("1024"), 1024);
  EXPECT_EQ(parse_byte_size("32MiB"), 33554432);
  EXPECT_EQ(parse_byte_size("1.5 GiB"), 1610612736);
  EXPECT_EQ(parse_byte_size("2GB"), 2'000'000'000);
  EXPECT_EQ(parse_byte_size("1K"), 1024);
  EXPECT_EQ(parse_byte_size("3TiB"), 3298534883328);
  EXPECT_EQ(parse_byte_size("2gb"), 2'000'000'000);
  EXPECT_EQ(parse_byte_size("32mib"), 32 << 20);
  EXPECT_EQ(parse_byte_size("1k"), 1024);
  EXPECT_EQ(parse_byte_size("0"), 0);
  EXPECT_EQ(parse_byte_size("0.5KiB"), 512);
  for (const char* text : {"", "GiB", "-1", "1 furlong", "1e300", "0x10", "nan", "1GiBB", "0.5"}) {
    try {
      parse_byte_size(text);
      ADD_FAILURE() << "'" << text << "' was read";
    } catch (const ConfigurationError& error) {
      EXPECT_THAT(error.message(), HasSubstr("is not a size; write bytes or a number with KiB")) << text;
    }
  }
}

/// Reads the configuration that a configuration prints, and expects the same text again.
void expect_round_trip(const std::string& json, int ranks) {
  const Config config = parse_config(json, ranks);
  const std::string text = config.to_json();
  Config again;
  ASSERT_NO_THROW(again = parse_config(text, ranks)) << text;
  EXPECT_EQ(again.to_json(), text) << json;
  EXPECT_THAT(test::every_note(again), Not(Contains(HasSubstr("no meaning"))))
      << "only honoured keys are printed";
}

TEST(Config, SaysHowLongParametersStayWhole) {
  const Config plain = parse_config("{}", 2);
  EXPECT_EQ(plain.gather_for, GatherFor::use);
  EXPECT_EQ(plain.persistent_tensor_elements, 0);
  EXPECT_EQ(plain.persistent_model_elements, std::numeric_limits<std::int64_t>::max());
  const auto of = [](const std::string& zero, const std::string& own) {
    return parse_config(R"({"zero_optimization": {"stage": 3, )" + zero + R"(}, "tranche": {)" + own + "}}",
                        2);
  };
  const Config stages =
      of(R"("stage3_param_persistence_threshold": 1e5, "stage3_model_persistence_threshold": 0)",
         R"("gather_for": "step")");
  EXPECT_EQ(stages.gather_for, GatherFor::step);
  EXPECT_EQ(stages.persistent_tensor_elements, 100'000);
  EXPECT_EQ(stages.persistent_model_elements, 0);
  const Config others = of(R"("param_persistence_threshold": 7, "model_persistence_threshold": 8)", "");
  EXPECT_EQ(others.persistent_tensor_elements, 7);
  EXPECT_EQ(others.persistent_model_elements, 8);
  EXPECT_EQ(of(R"("stage3_param_persistence_threshold": "auto")", "").persistent_tensor_elements, 0);
  const auto problem = [&](const std::string& zero, const std::string& own) {
    return test::message_of<ConfigurationError>([&] { (void)of(zero, own); });
  };
  EXPECT_THAT(problem(R"("overlap_comm": true)", R"("gather_for": "epoch")"),
              HasSubstr("tranche.gather_for: 'epoch' is not one of use, step"));
  EXPECT_THAT(problem(R"("stage3_param_persistence_threshold": -1)", ""),
              HasSubstr("zero_optimization.stage3_param_persistence_threshold: -1 is not at least 0"));
  EXPECT_THAT(problem(R"("stage3_model_persistence_threshold": -1)", ""),
              HasSubstr("zero_optimization.stage3_model_persistence_threshold: -1 is not at least 0"));
  EXPECT_THAT(problem(R"("stage3_param_persistence_threshold": 1, "param_persistence_threshold": 1)", ""),
              HasSubstr("are two names of one key; write one"));
}

TEST(Config, TheEffectiveConfigurationReadsBackToItself) {
  expect_round_trip("{}", 3);
  expect_round_trip(
      R"({"bf16": {"enabled": false}, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9,
                        "nesterov": true}}, "zero_optimization": {"stage": 2}})",
      1);
  expect_round_trip(R"({"fp16": {"enabled": true, "loss_scale": 100}, "train_batch_size": 16,
                        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 1e3}}})",
                    4);
  expect_round_trip(R"({"fp16": {"enabled": true, "initial_scale_power": 5, "min_loss_scale": 0.25},
                        "optimizer": {"type": "Adam", "params": {"adam_w_mode": false, "eps": 1e-7}},
                        "communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "bf16"},
                        "tranche": {"parameter_groups": [{"pattern": "a*", "decay": true}], "no_decay": ["b"],
                        "decay": ["c"], "frozen": ["d"], "device_memory": "1GiB", "reduction": "boundary",
                        "progress": "inline", "seed": 9223372036854775807, "communication_timeout": 0.125}})",
                    2);
  Config made;
  made.schedule = {"OneCycle", R"({"cycle_min_lr": 0.1, "cycle_max_lr": 0.3})"};
  validate_config(made, 5);
  EXPECT_EQ(parse_config(made.to_json(), 5).to_json(), made.to_json());
}

TEST(Config, ANoiseScaleWithoutABatchNamesTheBatchAlone) {
  EXPECT_EQ(
      problems(R"({"tranche": {"world_size_invariant": true, "gradient_noise_scale": true}})"),
      "configuration: tranche.world_size_invariant: train_batch_size and train_micro_batch_size_per_gpu say "
      "what a step is for every number of ranks; give both");
}

}  // namespace
}  // namespace tranche
