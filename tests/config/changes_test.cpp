#include "config/changes.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "tranche/config/config.h"

namespace tranche {
namespace {

using detail::configuration_changes;
using testing::AllOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::UnorderedElementsAre;

std::vector<std::string> changes(const std::string& saved, const std::vector<std::string>& overrides,
                                 const std::vector<std::string>& before = {}, int ranks = 2) {
  return configuration_changes(parse_config(saved, 2, before).to_json(),
                               parse_config(saved, ranks, overrides).to_json());
}

TEST(ConfigurationChanges, NoneInTheSameRun) {
  EXPECT_THAT(changes("{}", {}), IsEmpty());
}

TEST(ConfigurationChanges, OtherWordsOfOneMeshAreNone) {
  EXPECT_THAT(changes("{}", {"tranche.mesh=shard=*"}), IsEmpty());
  EXPECT_THAT(changes("{}", {"tranche.mesh=replicate=1, shard=2"}, {"tranche.mesh=shard=*"}), IsEmpty());
  EXPECT_THAT(changes("{}", {"tranche.mesh=replicate=2"}, {"tranche.mesh=shard=1, replicate=*"}), IsEmpty());
  EXPECT_THAT(changes("{}", {"tranche.mesh=replicate=2"}),
              ElementsAre("tranche.mesh is 'replicate=2', was ''"));
  const std::string now = parse_config("{}", 2).to_json();
  auto before_meshes = nlohmann::json::parse(now);
  before_meshes["tranche"].erase("mesh");
  EXPECT_THAT(configuration_changes(before_meshes.dump(), now), IsEmpty());
}

TEST(ConfigurationChanges, ALineForEachWithBothSides) {
  EXPECT_THAT(changes("{}", {"optimizer.params.lr=0.0001"}),
              ElementsAre("optimizer.params.lr is 0.0001, was 0.001"));
  EXPECT_THAT(changes("{}", {"train_micro_batch_size_per_gpu=4", "tranche.seed=7"}),
              UnorderedElementsAre("train_micro_batch_size_per_gpu is 4, was 1",
                                   "train_batch_size is 8, was 2", "tranche.seed is 7, was 1234"));
  EXPECT_THAT(changes("{}", {}, {}, 3), ElementsAre("train_batch_size is 3, was 2"));
  EXPECT_THAT(changes(R"({"bf16": {"enabled": "auto"}})", {"fp16.enabled=true"}),
              testing::Contains("bf16.enabled is false, was true"));
}

TEST(ConfigurationChanges, KeysOfOneSideOnly) {
  const std::string warmup = R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}})";
  const std::vector<std::string> lines =
      configuration_changes(parse_config("{}", 2).to_json(), parse_config(warmup, 2).to_json());
  EXPECT_THAT(lines, UnorderedElementsAre("scheduler.type is 'WarmupLR', was 'constant'",
                                          "scheduler.params.warmup_num_steps is 10, was not set"));
}

TEST(ConfigurationChanges, ReplicasAddedUpAsVersionsWithoutTheKeyDidAreNoChange) {
  const std::string hybrid =
      R"({"tranche": {"mesh": "replicate=2, shard=*"}, "zero_optimization": {"stage": 3}})";
  std::string before = parse_config(hybrid, 2).to_json();
  const std::string key = R"("replica_sum": "micro_batch",)";
  ASSERT_NE(before.find(key), std::string::npos);
  before.erase(before.find(key), key.size());
  EXPECT_THAT(configuration_changes(before, parse_config(hybrid, 2).to_json()), IsEmpty());
  EXPECT_THAT(configuration_changes(before, parse_config(hybrid, 2, {"tranche.replica_sum=step"}).to_json()),
              ElementsAre("tranche.replica_sum is 'step', was not set"));
  EXPECT_THAT(changes(hybrid, {"tranche.replicate=parameters"}), IsEmpty());
}

TEST(ConfigurationChanges, APipelinesSumsByUseAreNoChangeOfTheirOwn) {
  const std::string one = R"({"gradient_accumulation_steps": 2})";
  EXPECT_THAT(changes(one, {"tranche.mesh=pipeline=2"}), Not(Contains(HasSubstr("tie_sum"))));
  EXPECT_THAT(changes(one, {"tranche.tie_sum=by_use"}),
              ElementsAre("tranche.tie_sum is 'by_use', was not set"));
}

TEST(ConfigurationChanges, KeysThatChangeNoBitsAreQuiet) {
  EXPECT_THAT(
      changes("{}", {"tranche.threads=1", "tranche.communication_timeout=7", "steps_per_print=9",
                     "zero_optimization.overlap_comm=false", "zero_optimization.reduce_bucket_size=1000",
                     "tranche.depth=5", "tranche.debug.poison_memory=true", "tranche.device_memory=1GiB",
                     "tranche.activation_checkpointing=true", "tranche.total_steps=77",
                     "zero_optimization.offload_optimizer.device=nvme",
                     "zero_optimization.offload_optimizer.nvme_path=/scratch",
                     "activation_checkpointing.cpu_checkpointing=true", "aio.block_size=1MiB",
                     "tranche.host_memory=1GiB", "tranche.host_state=1MiB", "tranche.nvme_space=1GiB",
                     "tranche.offload_tile=4096", "tranche.io_engine=threads"}),
      IsEmpty());
}

TEST(ConfigurationChanges, TheEndOfTheRunMattersToSchedulesThatFollowIt) {
  const std::string decay = R"({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2}}})";
  EXPECT_THAT(changes(decay, {"tranche.total_steps=20"}, {"tranche.total_steps=10"}),
              ElementsAre("tranche.total_steps is 20, was 10"));
  const std::string fixed =
      R"({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 9}}})";
  EXPECT_THAT(changes(fixed, {"tranche.total_steps=20"}, {"tranche.total_steps=10"}), IsEmpty());
  const std::string stable = R"({"scheduler": {"type": "WSD", "params": {"num_decay_steps": 2}}})";
  EXPECT_THAT(changes(stable, {"tranche.total_steps=20"}, {"tranche.total_steps=10"}),
              ElementsAre("tranche.total_steps is 20, was 10"))
      << "the decay moves with the end";
  EXPECT_THAT(changes(stable, {"tranche.total_steps=20", "scheduler.params.num_stable_steps=5"},
                      {"tranche.total_steps=10", "scheduler.params.num_stable_steps=5"}),
              IsEmpty());
}

TEST(ConfigurationChanges, AStageThatBringsAnotherPolicySaysSo) {
  EXPECT_THAT(changes("{}", {"zero_optimization.stage=1"}),
              ElementsAre("zero_optimization.stage is 1, was 0"));
  EXPECT_THAT(changes("{}", {"zero_optimization.stage=2"}),
              ElementsAre("zero_optimization.stage is 2, was 0",
                          AllOf(HasSubstr("reduction policy is micro_batch, was boundary"),
                                HasSubstr("tranche.reduction=boundary keeps it"))));
}

TEST(ConfigurationChanges, TextThatIsNoJsonHasNoKeys) {
  EXPECT_THAT(configuration_changes("", ""), IsEmpty());
  EXPECT_THAT(configuration_changes("[1]", R"({"a": {"b": null}})"), ElementsAre("a.b is null, was not set"));
}

TEST(ConfigurationChanges, ValuesOfParameterGroups) {
  const std::string rule = R"({"tranche": {"parameter_groups": [{"pattern": "h.*", "betas": [0.5, 0.75]}]}})";
  const std::string other = R"({"tranche": {"parameter_groups": [{"pattern": "h.*", "betas": [0.5, 0.5]}]}})";
  EXPECT_THAT(configuration_changes(rule, rule), IsEmpty());
  EXPECT_THAT(
      configuration_changes(rule, other),
      ElementsAre(HasSubstr(R"(tranche.parameter_groups is [{"betas":[0.5,0.5],"pattern":"h.*"}], was )")));
}

}  // namespace
}  // namespace tranche
