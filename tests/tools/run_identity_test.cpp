#include "tools/train/run_identity.h"

#include <gmock/gmock.h>

#include "tests/tools/temporary.h"
#include "tranche/core/error.h"
#include "tranche/models/gpt.h"

namespace tranche::tools {
namespace {

using test::message_of;
using testing::HasSubstr;

RunIdentity sample() {
  RunIdentity identity;
  models::GptConfig model = models::GptConfig::preset("gpt-nano");
  model.inner = 61;
  model.embedding_dropout = 0.1f;
  identity.model = std::make_shared<models::Gpt>(model);
  identity.sequence = 48;
  identity.data = "texts/a \"quoted\" name.txt";
  return identity;
}

RunIdentity read(std::string_view text, std::string_view origin) {
  return RunIdentity::from_json(text, origin, models::ModelRegistry::with_builtin());
}

TEST(RunIdentity, ReadsBackWhatItWrote) {
  RunIdentity identity = sample();
  EXPECT_EQ(read(identity.to_json(), "here"), identity);
  identity.tokenizer = {Tokenizer::Kind::tokens, 50257};
  identity.data = "";
  EXPECT_EQ(read(identity.to_json(), "here"), identity);
  EXPECT_NE(read(sample().to_json(), "here"), identity);
  identity.data_digest = "0123456789abcdef";
  EXPECT_EQ(read(identity.to_json(), "here"), identity);
  EXPECT_THAT(identity.to_json(), HasSubstr(R"("digests":{"data":"0123456789abcdef"}})"));
  identity.validation_digest = "fedcba9876543210";
  EXPECT_EQ(read(identity.to_json(), "here"), identity);
}

TEST(RunIdentity, IsTheTextThatDocsPromise) {
  const std::string text = sample().to_json();
  EXPECT_EQ(text.find(R"({"program":"tranche","model":{)"), 0u) << text;
  EXPECT_THAT(
      text, HasSubstr(R"("sequence":48,"tokenizer":{"kind":"bytes"},"data":"texts/a \"quoted\" name.txt"})"));
}

TEST(RunIdentity, PathsMayHoldAnyBytes) {
  RunIdentity identity = sample();
  identity.data = "\xff.txt";
  EXPECT_EQ(read(identity.to_json(), "here").data, "\xef\xbf\xbd.txt");
}

TEST(RunIdentity, KnowsItsOwnTexts) {
  EXPECT_TRUE(RunIdentity::wrote(sample().to_json()));
  for (const char* text : {"{}", "[]", "no JSON", R"({"program": "another"})", R"({"program": 1})"}) {
    EXPECT_FALSE(RunIdentity::wrote(text)) << text;
    EXPECT_NE(message_of<CheckpointError>([&] { read(text, "step-1"); }), "") << text;
  }
  EXPECT_THAT(message_of<CheckpointError>([] { read("{}", "step-1"); }),
              HasSubstr("step-1: its 'user' does not say which model it is of"));
}

TEST(RunIdentity, ComplaintsNameCheckpointAndKey) {
  const auto refused = [](const std::string& from, const std::string& to) {
    std::string text = sample().to_json();
    const std::size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    text.replace(at, from.size(), to);
    return message_of<CheckpointError>([&] { read(text, "step-1"); });
  };
  EXPECT_EQ(refused("\"sequence\":48,", ""), "step-1: user.sequence is missing");
  EXPECT_THAT(refused("\"sequence\":48", "\"sequence\":65"),
              HasSubstr("step-1: user.sequence is 65, which cannot be: from 1 to 64 is wanted"));
  EXPECT_EQ(refused("\"sequence\":48", "\"sequence\":\"48\""),
            "step-1: user.sequence is not an integer: \"48\"");
  EXPECT_EQ(refused("{\"kind\":\"bytes\"}", "{\"kind\":\"words\"}"),
            "step-1: user.tokenizer.kind is 'words'; known are bytes and tokens");
  EXPECT_EQ(refused("{\"kind\":\"bytes\"}", "{\"kind\":\"tokens\"}"),
            "step-1: user.tokenizer.vocabulary is missing");
  EXPECT_EQ(
      refused("\"n_head\":2", "\"n_head\":5"),
      "step-1: user.model: \"n_head\" 5 does not divide \"n_embd\" 32; every head needs the same width");
  EXPECT_THAT(refused("\"model_type\":\"gpt2\"", "\"model_type\":\"llama\""),
              HasSubstr("user.model: model_type is \"llama\""));
}

}  // namespace
}  // namespace tranche::tools
