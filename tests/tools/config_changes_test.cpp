#include "tools/train/config_changes.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "tests/tools/temporary.h"
#include "tranche/config/config.h"
#include "tranche/core/error.h"
#include "tranche/models/gpt.h"
#include "tranche/models/llama.h"

namespace tranche::tools {
namespace {

using test::message_of;
using testing::AllOf;
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
              ElementsAre("tranche.mesh is 'replicate=2', was '': the command line wins"));
  const std::string now = parse_config("{}", 2).to_json();
  auto before_meshes = nlohmann::json::parse(now);
  before_meshes["tranche"].erase("mesh");
  EXPECT_THAT(configuration_changes(before_meshes.dump(), now), IsEmpty());
}

TEST(ConfigurationChanges, ALineForEachWithBothSides) {
  EXPECT_THAT(changes("{}", {"optimizer.params.lr=0.0001"}),
              ElementsAre("optimizer.params.lr is 0.0001, was 0.001: the command line wins"));
  EXPECT_THAT(changes("{}", {"train_micro_batch_size_per_gpu=4", "tranche.seed=7"}),
              UnorderedElementsAre("train_micro_batch_size_per_gpu is 4, was 1: the command line wins",
                                   "train_batch_size is 8, was 2: the command line wins",
                                   "tranche.seed is 7, was 1234: the command line wins"));
  EXPECT_THAT(changes("{}", {}, {}, 3), ElementsAre("train_batch_size is 3, was 2: the command line wins"));
  EXPECT_THAT(changes(R"({"bf16": {"enabled": "auto"}})", {"fp16.enabled=true"}),
              testing::Contains("bf16.enabled is false, was true: the command line wins"));
}

TEST(ConfigurationChanges, KeysOfOneSideOnly) {
  const std::string warmup = R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}})";
  const std::vector<std::string> lines =
      configuration_changes(parse_config("{}", 2).to_json(), parse_config(warmup, 2).to_json());
  EXPECT_THAT(lines, UnorderedElementsAre(
                         "scheduler.type is 'WarmupLR', was 'constant': the command line wins",
                         "scheduler.params.warmup_num_steps is 10, was not set: the command line wins"));
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
              ElementsAre("tranche.replica_sum is 'step', was not set: the command line wins"));
  EXPECT_THAT(changes(hybrid, {"tranche.replicate=parameters"}), IsEmpty());
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
              ElementsAre("tranche.total_steps is 20, was 10: the command line wins"));
  const std::string fixed =
      R"({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 9}}})";
  EXPECT_THAT(changes(fixed, {"tranche.total_steps=20"}, {"tranche.total_steps=10"}), IsEmpty());
  const std::string stable = R"({"scheduler": {"type": "WSD", "params": {"num_decay_steps": 2}}})";
  EXPECT_THAT(changes(stable, {"tranche.total_steps=20"}, {"tranche.total_steps=10"}),
              ElementsAre("tranche.total_steps is 20, was 10: the command line wins"))
      << "the decay moves with the end";
  EXPECT_THAT(changes(stable, {"tranche.total_steps=20", "scheduler.params.num_stable_steps=5"},
                      {"tranche.total_steps=10", "scheduler.params.num_stable_steps=5"}),
              IsEmpty());
}

TEST(ConfigurationChanges, AStageThatBringsAnotherPolicySaysSo) {
  EXPECT_THAT(changes("{}", {"zero_optimization.stage=1"}),
              ElementsAre("zero_optimization.stage is 1, was 0: the command line wins"));
  EXPECT_THAT(changes("{}", {"zero_optimization.stage=2"}),
              ElementsAre("zero_optimization.stage is 2, was 0: the command line wins",
                          AllOf(HasSubstr("reduction policy is micro_batch, was boundary"),
                                HasSubstr("tranche.reduction=boundary keeps it"))));
}

TEST(ConfigurationChanges, TextThatIsNoJsonHasNoKeys) {
  EXPECT_THAT(configuration_changes("", ""), IsEmpty());
  EXPECT_THAT(configuration_changes("[1]", R"({"a": {"b": null}})"),
              ElementsAre("a.b is null, was not set: the command line wins"));
}

TEST(ConfigurationChanges, ValuesOfParameterGroups) {
  const std::string rule = R"({"tranche": {"parameter_groups": [{"pattern": "h.*", "betas": [0.5, 0.75]}]}})";
  const std::string other = R"({"tranche": {"parameter_groups": [{"pattern": "h.*", "betas": [0.5, 0.5]}]}})";
  EXPECT_THAT(configuration_changes(rule, rule), IsEmpty());
  EXPECT_THAT(
      configuration_changes(rule, other),
      ElementsAre(HasSubstr(R"(tranche.parameter_groups is [{"betas":[0.5,0.5],"pattern":"h.*"}], was )")));
}

RunIdentity identity(models::GptConfig model = models::GptConfig::preset("gpt-nano")) {
  return {std::make_shared<models::Gpt>(model), 16, {}, "a.txt"};
}

TEST(IdentityChanges, DropoutSequenceAndData) {
  EXPECT_THAT(identity_changes(identity(), identity()), IsEmpty());
  models::GptConfig model = models::GptConfig::preset("gpt-nano");
  model.residual_dropout += 0.25f;
  RunIdentity now = identity(model);
  now.sequence = 32;
  now.data = "b.txt";
  EXPECT_THAT(
      identity_changes(identity(), now),
      ElementsAre(HasSubstr("the model's resid_pdrop is"), "--sequence is 32, was 16: the command line wins",
                  "--data is 'b.txt', was 'a.txt': the command line wins"));
}

TEST(IdentityChanges, OtherBytesInTheSameFiles) {
  RunIdentity saved = identity(), now = identity();
  now.data_digest = "0123456789abcdef";
  EXPECT_THAT(identity_changes(saved, now), IsEmpty()) << "an older checkpoint does not know";
  saved.data_digest = now.data_digest;
  EXPECT_THAT(identity_changes(saved, now), IsEmpty());
  saved.data_digest = "89abcdef01234567";
  now.validation_digest = "fedcba9876543210";
  EXPECT_THAT(
      identity_changes(saved, now),
      ElementsAre("the digest of --data is 0123456789abcdef, was 89abcdef01234567: the command line wins",
                  "the digest of --validation-data is fedcba9876543210, was none: the command line wins"));
}

TEST(RequireSameModel, NamesBothSides) {
  models::GptConfig model = models::GptConfig::preset("gpt-nano");
  model.inner = model.inner_width();  // given explicitly, but the same
  model.residual_dropout = 0.5f;
  model.initializer_range = 0.5f;
  EXPECT_NO_THROW(require_same_model(identity(), identity(model), "ckpt/step-00000004"));
  model.layers = 3;
  model.vocabulary = 300;
  EXPECT_THAT(
      message_of<CheckpointError>(
          [&] { require_same_model(identity(), identity(model), "ckpt/step-00000004"); }),
      AllOf(HasSubstr("ckpt/step-00000004 is of another model"), HasSubstr("n_layer is 2 there, 3 here"),
            HasSubstr("vocab_size is 256 there, 300 here"), HasSubstr("--model")));
}

TEST(RequireSameModel, NamesTheArchitecturesWhereTheyDiffer) {
  RunIdentity now = identity();
  now.model = models::ModelRegistry::with_builtin().preset("llama-nano");
  const std::string refused =
      message_of<CheckpointError>([&] { require_same_model(identity(), now, "ckpt"); });
  EXPECT_THAT(
      refused,
      HasSubstr("gives: it is a GPT2LMHeadModel there, a LlamaForCausalLM here; give its own --model"));
}

TEST(RequireSameModel, ComparesModelsOfAnyArchitecture) {
  const models::ModelRegistry models = models::ModelRegistry::with_builtin();
  RunIdentity saved = identity(), now = identity();
  saved.model = models.preset("llama-nano");
  models::LlamaConfig config = models::LlamaConfig::preset("llama-nano");
  config.attention_dropout = 0.25f;
  now.model = std::make_shared<models::Llama>(config);
  EXPECT_NO_THROW(require_same_model(saved, now, "ckpt"));
  EXPECT_THAT(identity_changes(saved, now),
              ElementsAre(HasSubstr("the model's attention_dropout is 0.25, was 0")));
  config.key_value_heads = 1;
  now.model = std::make_shared<models::Llama>(config);
  EXPECT_THAT(
      message_of<CheckpointError>([&] { require_same_model(saved, now, "ckpt"); }),
      AllOf(HasSubstr("num_key_value_heads is "), HasSubstr(" there, 1 here"), Not(HasSubstr("dropout"))));
}

TEST(RequireSameTokenizer, NamesBothSides) {
  RunIdentity now = identity();
  EXPECT_NO_THROW(require_same_tokenizer(identity(), now, "x"));
  now.tokenizer = {Tokenizer::Kind::tokens, 256};
  EXPECT_THAT(message_of<CheckpointError>([&] { require_same_tokenizer(identity(), now, "ckpt"); }),
              AllOf(HasSubstr("ckpt was trained on bytes"), HasSubstr("--data holds tokens below 256"),
                    HasSubstr("--resume-weights-only")));
}

}  // namespace
}  // namespace tranche::tools
