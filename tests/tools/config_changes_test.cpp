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
  EXPECT_THAT(identity_changes(identity(), now),
              ElementsAre(HasSubstr("the model's resid_pdrop is"), "--sequence is 32, was 16",
                          "--data is 'b.txt', was 'a.txt'"));
}

TEST(IdentityChanges, OtherBytesInTheSameFiles) {
  RunIdentity saved = identity(), now = identity();
  now.data_digest = "0123456789abcdef";
  EXPECT_THAT(identity_changes(saved, now), IsEmpty()) << "an older checkpoint does not know";
  saved.data_digest = now.data_digest;
  EXPECT_THAT(identity_changes(saved, now), IsEmpty());
  saved.data_digest = "89abcdef01234567";
  now.validation_digest = "fedcba9876543210";
  EXPECT_THAT(identity_changes(saved, now),
              ElementsAre("the digest of --data is 0123456789abcdef, was 89abcdef01234567",
                          "the digest of --validation-data is fedcba9876543210, was none"));
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
