// A note appears if DeepSpeed interprets a file differently, and not if it interprets it in the same way.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tranche/config/config.h"
#include "tranche/optim/schedule.h"

namespace tranche {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

/// The notes for a file without differences, with these overrides.
std::vector<std::string> notes(const std::vector<std::string>& overrides) {
  return parse_config(R"({"bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"},
    "gradient_clipping": 0.5, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}})",
                      2, overrides)
      .notes;
}

TEST(ConfigNotes, AFileThatMeansTheSameHasNone) {
  EXPECT_THAT(notes({}), IsEmpty());
  EXPECT_THAT(notes({"bf16.enabled=false", "data_types.grad_accum_dtype=null"}), IsEmpty())
      << "fp32 is kept in fp32 there too";
}

TEST(ConfigNotes, WhereReducedGradientsAreKeptInFp32) {
  EXPECT_THAT(notes({"data_types.grad_accum_dtype=null"}),
              ElementsAre("data_types.grad_accum_dtype: not given: reduced gradients are kept in fp32 "
                          "(DeepSpeed: bf16)"));
  EXPECT_THAT(notes({"data_types.grad_accum_dtype=auto", "bf16.enabled=false", "fp16.enabled=true"}),
              Contains(HasSubstr("reduced gradients are kept in fp32 (DeepSpeed: fp16)")));
}

TEST(ConfigNotes, AKeyOfTheCommandLineWithoutEffectIsNamed) {
  const std::pair<std::vector<std::string>, std::string> cases[] = {
      {{"tensorboard.job_name=a"}, "tensorboard.job_name has no effect: tensorboard.enabled is not true"},
      {{"csv_monitor={\"output_path\": \"a\"}"},
       "csv_monitor.output_path has no effect: csv_monitor.enabled is not true"},
      {{"tranche.checkpoint_every=2"},
       "tranche.checkpoint_every has no effect: tranche.activation_checkpointing is not true"},
      {{"fp16.loss_scale=8"}, "fp16.loss_scale has no effect: losses are scaled in fp16 alone"},
      {{"fp16.initial_scale_power=8"},
       "fp16.initial_scale_power has no effect: losses are scaled in fp16 alone"},
      {{"tranche.gradient_noise_smoothing=0.5"},
       "tranche.gradient_noise_smoothing has no effect: tranche.gradient_noise_scale is not true"},
      {{"tranche.replica_sum=step"}, "tranche.replica_sum has no effect: the mesh has no axis replicate"},
      {{"zero_optimization.stage3_param_persistence_threshold=5", "zero_optimization.stage=2"},
       "zero_optimization.stage3_param_persistence_threshold has no effect: it is for stage 3"},
      {{"zero_optimization.offload_optimizer.ratio=0.5"},
       "zero_optimization.offload_optimizer.ratio has no effect: the optimizer's state stays on the device"},
      {{"zero_optimization.offload_param.nvme_path=a"},
       "zero_optimization.offload_param.nvme_path has no effect: nothing is on nvme"},
      {{"aio.block_size=8192"}, "aio.block_size has no effect: nothing is on nvme"},
      {{"tranche.nvme_space=8KiB"}, "tranche.nvme_space has no effect: nothing is on nvme"},
      {{"tranche.no_decay=[\"*\"]"}, "tranche.no_decay has no effect: there is no weight decay"},
      {{"wandb.enabled=true"},
       "wandb: no meaning here: every step's figures are in the report file, and with --metrics in a file as "
       "the run goes"}};
  for (const auto& [overrides, line] : cases) EXPECT_THAT(notes(overrides), ElementsAre(line));
  // Values that are the defaults ask for nothing.
  EXPECT_THAT(notes({"aio.block_size=0", "tranche.checkpoint_every=1", "fp16={\"loss_scale\": 0}",
                     "tensorboard.output_path=\"\"", "zero_optimization.offload_optimizer.ratio=1.0"}),
              IsEmpty());
  const std::vector<std::string> used = notes(
      {"tensorboard={\"enabled\": true, \"job_name\": \"a\"}",
       "csv_monitor={\"enabled\": true, \"job_name\": \"a\"}", "tranche.activation_checkpointing=true",
       "tranche.checkpoint_every=2", "tranche.gradient_noise_scale=true",
       "tranche.gradient_noise_smoothing=0.5", "tranche.reduction=micro_batch", "zero_optimization.stage=3",
       "zero_optimization.stage3_param_persistence_threshold=5", "optimizer.params.weight_decay=0.1",
       "tranche.decay=[\"*\"]", "tranche.no_decay=[\"a\"]", "aio.block_size=8192", "tranche.nvme_space=8GiB",
       "zero_optimization.offload_optimizer={\"device\": \"nvme\", \"nvme_path\": \"a\", \"ratio\": 0.5}"});
  EXPECT_THAT(used, IsEmpty());
  EXPECT_THAT(notes({"tranche.mesh=replicate=2", "tranche.replica_sum=step", "zero_optimization.stage=2"}),
              Not(Contains(HasSubstr("no effect"))));
  EXPECT_THAT(notes({"tranche.parameter_groups=[{\"pattern\": \"a\", \"weight_decay\": 0.1}]",
                     "tranche.no_decay=[\"b\"]"}),
              Not(Contains(HasSubstr("no effect"))));
  EXPECT_THAT(notes({"bf16.enabled=false", "fp16={\"enabled\": true, \"loss_scale\": 8}"}),
              Not(Contains(HasSubstr("no effect"))));
}

TEST(ConfigNotes, KeysOfTheFileWithoutEffectAreOneLine) {
  const auto line = [](const std::string& keys, const std::vector<std::string>& overrides) {
    std::vector<std::string> lines = parse_config("{" + keys + "}", 1, overrides).notes;
    std::erase_if(lines, [](const auto& each) { return each.find("no effect") == std::string::npos; });
    return lines;
  };
  EXPECT_THAT(line(R"("aio": {"block_size": 8192})", {}),
              ElementsAre("1 key has no effect beside the other keys: aio.block_size"));
  EXPECT_THAT(line(R"("aio": {"block_size": 8192, "queue_depth": 4}, "tranche": {"checkpoint_every": 3},
                      "fp16": {"initial_scale_power": 8, "hysteresis": "auto"})",
                   {"aio.queue_depth=8"}),
              ElementsAre("aio.queue_depth has no effect: nothing is on nvme",
                          "3 keys have no effect beside the other keys: tranche.checkpoint_every, "
                          "fp16.initial_scale_power, aio.block_size"));
  EXPECT_THAT(line(R"("tranche": {"checkpoint_every": 3, "no_decay": ["a"], "nvme_space": 4096},
                      "tensorboard": {"job_name": "a"}, "csv_monitor": {"job_name": "a"})",
                   {}),
              ElementsAre("5 keys have no effect beside the other keys: tensorboard.job_name, "
                          "csv_monitor.job_name, tranche.checkpoint_every and 2 more"));
  // A block that says whether it is on may hold what it likes.
  EXPECT_THAT(line(R"("fp16": {"enabled": "auto", "initial_scale_power": 8},
                      "tensorboard": {"enabled": false, "job_name": "a"})",
                   {}),
              IsEmpty());
}

TEST(ConfigNotes, WhereGradientsAreNotClipped) {
  EXPECT_THAT(
      notes({"gradient_clipping=null"}),
      ElementsAre("gradient_clipping: not given: gradients are not clipped (DeepSpeed since June 2026: "
                  "at 1.0)"));
  EXPECT_THAT(notes({"gradient_clipping=0"}), IsEmpty());
}

TEST(ConfigNotes, WhereTheOptimizerIsNotGiven) {
  EXPECT_THAT(
      notes({"optimizer.type=null"}),
      ElementsAre("optimizer.type: not given: AdamW with a learning rate of 0.0001 (DeepSpeed takes the "
                  "program's optimizer)"));
}

TEST(ConfigNotes, WhatDoesNotDecay) {
  const std::string line =
      "optimizer.params.weight_decay: tensors of less than two dimensions (biases, norms) do not decay "
      "(DeepSpeed: all do); tranche.decay: [\"*\"] decays them too";
  EXPECT_THAT(notes({"optimizer.params.weight_decay=0.1"}), ElementsAre(line));
  EXPECT_THAT(notes({"optimizer.params.weight_decay=0.1", "tranche.decay=[\"*.bias\"]"}), ElementsAre(line));
  EXPECT_THAT(notes({"optimizer.params.weight_decay=0.1", "tranche.decay=[\"*\"]"}), IsEmpty());
  EXPECT_THAT(notes({"optimizer.params.weight_decay=0"}), IsEmpty());
}

TEST(ConfigNotes, WhereKeepingForAStepHasNoEffect) {
  for (const char* stage : {"0", "1", "2"}) {
    const std::string at = std::string("zero_optimization.stage=") + stage;
    EXPECT_THAT(notes({"tranche.gather_for=step", at}),
                ElementsAre("tranche.gather_for: step has no effect: at stage " + std::string(stage) +
                            " every rank has all weights; they are gathered at stage 3"));
    EXPECT_THAT(notes({"tranche.gather_for=use", at}), IsEmpty());
  }
  EXPECT_THAT(notes({"tranche.gather_for=step", "zero_optimization.stage=3"}), IsEmpty());
}

TEST(ConfigNotes, WhatADynamicScaleAloneHasUseFor) {
  const auto of_scale = [](const std::string& more) {
    return notes({"bf16.enabled=false", "fp16={\"enabled\": true" + more + "}"});
  };
  const std::string power_and_hysteresis = ", \"initial_scale_power\": 12, \"hysteresis\": 3";
  EXPECT_THAT(
      of_scale(power_and_hysteresis + ", \"loss_scale\": 128"),
      ElementsAre(
          "fp16.initial_scale_power, fp16.hysteresis: no effect: fp16.loss_scale fixes the scale at 128"));
  EXPECT_THAT(of_scale(power_and_hysteresis + ", \"loss_scale\": 0"), IsEmpty());
  EXPECT_THAT(of_scale(", \"loss_scale\": 128"), IsEmpty());
}

TEST(ConfigNotes, WhereASchedulesStepsLie) {
  const std::string line =
      "scheduler: step 1 has its first rate (DeepSpeed: step 1 has the rate from before it began, and each "
      "after "
      "that the rate that the step before has here)";
  EXPECT_THAT(notes({"scheduler.type=WarmupLR"}), ElementsAre(line));
  EXPECT_THAT(notes({"scheduler.type=constant"}), IsEmpty());
  const std::string peak =
      "scheduler.params.warmup_max_lr: not given: the optimizer's rate, 0.0001 (DeepSpeed: 0.001)";
  EXPECT_THAT(notes({"scheduler.type=WarmupDecayLR"}), ElementsAre(line, peak));
  EXPECT_THAT(notes({"scheduler.type=WarmupDecayLR", "optimizer.params.lr=0.001"}), ElementsAre(line));
  EXPECT_THAT(notes({"scheduler.type=WarmupDecayLR", "scheduler.params.warmup_max_lr=0.3"}),
              ElementsAre(line));
}

TEST(ConfigNotes, WhatAutoStandsForIsOneLine) {
  EXPECT_THAT(
      notes({"bf16.enabled=auto", "fp16={\"enabled\": \"auto\", \"loss_scale_window\": \"auto\"}",
             "train_batch_size=auto", "gradient_clipping=auto", "optimizer.params.lr=auto",
             "optimizer.params.betas=auto", "zero_optimization.reduce_bucket_size=auto"}),
      ElementsAre(
          "\"auto\", which Hugging Face's trainer fills in, is bf16.enabled true, gradient_clipping 1.0, "
          "optimizer.params.lr 0.001, optimizer.params.betas [0.9,0.999], fp16.enabled false, "
          "train_batch_size 2",
          "optimizer.params.lr: \"auto\" is 0.001, as the trainer's learning_rate is not known here; write "
          "the "
          "rate, or give --lr"));
  EXPECT_THAT(notes({"bf16=null", "bfloat16.enabled=auto"}),
              ElementsAre("\"auto\", which Hugging Face's trainer fills in, is bfloat16.enabled true"));
  EXPECT_THAT(
      notes({"scheduler={\"type\": \"WarmupDecayLR\", \"params\": {\"total_num_steps\": \"auto\"}}"}),
      Contains("\"auto\", which Hugging Face's trainer fills in, is scheduler.params.total_num_steps the "
               "steps of the run"));
  EXPECT_THAT(notes({"bf16.enabled=false", "fp16={\"enabled\": true, \"hysteresis\": \"auto\"}"}),
              Contains(HasSubstr("fills in, is fp16.hysteresis 2")));
  EXPECT_THAT(notes({"zero_optimization.reduce_bucket_size=auto"}), IsEmpty()) << "no result depends on it";
  EXPECT_THAT(notes({"train_micro_batch_size_per_gpu=auto"}),
              Contains("train_micro_batch_size_per_gpu: \"auto\" is 1, as the trainer's "
                       "per_device_train_batch_size is not known here; write the samples, or give "
                       "--micro-batch"));
  EXPECT_THAT(notes({"train_micro_batch_size_per_gpu=auto", "train_batch_size=8"}),
              Not(Contains(HasSubstr("per_device_train_batch_size"))))
      << "it follows from the batch";
}

TEST(ConfigNotes, AnAutomaticWarmUpIsNone) {
  const auto warmup = [](const char* type) {
    return std::vector<std::string>{std::string("scheduler.type=") + type, "optimizer.params.lr=1",
                                    "scheduler.params.warmup_num_steps=auto", "tranche.total_steps=20"};
  };
  for (const char* type : {"WarmupLR", "WarmupDecayLR", "WarmupCosineLR"}) {
    const Config config = parse_config("{}", 1, warmup(type));
    EXPECT_GT(make_schedule(config)->learning_rate(3), 0.8) << type << ": the trainer's own default has none";
    EXPECT_THAT(config.notes, Contains("scheduler.params.warmup_num_steps: \"auto\" is no warm-up, as the "
                                       "trainer's warmup_steps or warmup_ratio is not known here; write the "
                                       "steps"));
    EXPECT_THAT(schedule_notes(config, 20), IsEmpty());
  }
}

TEST(ConfigNotes, SchedulesAndRunsOfAnotherLength) {
  const auto lines = [](const std::string& scheduler, std::int64_t steps) {
    return schedule_notes(parse_config("{}", 1, {"scheduler=" + scheduler}), steps);
  };
  EXPECT_THAT(lines(R"({"type": "constant"})", 20), IsEmpty());
  EXPECT_THAT(
      lines(R"({"type": "WarmupLR"})", 20),
      ElementsAre("scheduler.params.warmup_num_steps, not given, is 1000: the warm-up ends with step 1000, "
                  "and the run with step 20"));
  EXPECT_THAT(lines(R"({"type": "WarmupLR", "params": {"warmup_num_steps": 20}})", 20), IsEmpty());
  EXPECT_THAT(
      lines(R"({"type": "WarmupCosineLR", "params": {"warmup_num_steps": 100, "total_num_steps": 50}})", 20),
      ElementsAre(
          "scheduler.params.warmup_num_steps: the warm-up ends with step 100, and the run with step "
          "20",
          "scheduler.params.total_num_steps: the schedule is for 50 steps, and the run has 20 steps"));
  EXPECT_THAT(
      lines(R"({"type": "WarmupDecayLR", "params": {"warmup_num_steps": 100, "total_num_steps": 50}})", 200),
      ElementsAre("scheduler.params.total_num_steps: the schedule is for 50 steps, and the run has 200 steps",
                  "scheduler.params.warmup_num_steps: the warm-up ends with step 100, and the schedule with "
                  "step 50"));
  EXPECT_THAT(lines(R"({"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10}})", 20), IsEmpty());
  // A report's effective configuration has the length of its run, which --steps does not change.
  const auto of_length = [](const std::string& scheduler) {
    return schedule_notes(parse_config("{}", 1, {"scheduler=" + scheduler, "tranche.total_steps=20"}), 50);
  };
  EXPECT_THAT(of_length(R"({"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10}})"),
              ElementsAre("tranche.total_steps: the schedule is for 20 steps, and the run has 50 steps"));
  EXPECT_THAT(
      of_length(R"({"type": "WSD", "params": {"num_decay_steps": 10}})"),
      ElementsAre("scheduler.params.num_decay_steps: the decay ends with step 20, and the run with step "
                  "50"));
  EXPECT_THAT(of_length(R"({"type": "WarmupLR", "params": {"warmup_num_steps": 10}})"), IsEmpty());
  const std::string cycle = R"({"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1,
      "cycle_first_step_size": 15}})";
  EXPECT_THAT(lines(cycle, 10),
              ElementsAre("scheduler.params.cycle_first_step_size: the rise of the cycle ends with "
                          "step 15, and the run with step 10"));
  EXPECT_THAT(lines(cycle, 20),
              ElementsAre("scheduler.params.cycle_second_step_size: the cycle ends with step 30, "
                          "and the run with step 20"));
  EXPECT_THAT(lines(cycle, 30), IsEmpty());
  const std::string stable = R"({"type": "WSD", "params": {"num_warmup_steps": 5, "num_stable_steps": 10,
      "num_decay_steps": 10}})";
  EXPECT_THAT(lines(stable, 20),
              ElementsAre("scheduler.params.num_decay_steps: the decay ends with step 25, and the "
                          "run with step 20"));
  EXPECT_THAT(lines(stable, 25), IsEmpty());
  EXPECT_THAT(lines(stable, 30),
              ElementsAre("scheduler.params.num_decay_steps: the decay ends with step 25, and the "
                          "run with step 30"));
  EXPECT_THAT(
      lines(R"({"type": "InverseSquareRoot", "params": {"num_warmup_steps": 30}})", 20),
      ElementsAre("scheduler.params.num_warmup_steps: the warm-up ends with step 30, and the run with step "
                  "20"));
  EXPECT_THAT(
      lines(R"({"type": "LRRangeTest"})", 20),
      ElementsAre("scheduler.params.lr_range_test_step_size: the first interval ends with step 2000, and the "
                  "run with step 20"));
}

}  // namespace
}  // namespace tranche
