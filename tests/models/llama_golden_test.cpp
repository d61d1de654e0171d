// Compares one small model of each architecture with transformers' own numbers (golden/README.md).
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <utility>

#include "core/text_file.h"
#include "golden.h"
#include "models/config_json.h"
#include "tranche/models/llama_config.h"

namespace tranche::models {
namespace {

class LlamaGolden : public ::testing::TestWithParam<const char*> {};

TEST_P(LlamaGolden, AgreesWithTransformers) {
  const auto found = compare_with_golden(std::string(TRANCHE_GOLDEN) + "/" + GetParam());
  std::printf(
      "measured: %s against transformers: logits %.1e (cached %.1e), loss %.1e, gradients %.1e (%s), "
      "training "
      "%.1e\n",
      GetParam(), found.logits, found.cached, found.loss, found.gradients, found.worst_gradient.c_str(),
      found.training);
  // Two fp32 sums, each with an error of a few 2^-24.
  EXPECT_LE(found.logits, 1e-5);
  EXPECT_LE(found.cached, 1e-5);
  EXPECT_LE(found.loss, 1e-5);
  EXPECT_LE(found.gradients, 1e-5) << found.worst_gradient;
  EXPECT_LE(found.training, 1e-5);
  EXPECT_EQ(found.generated, 0) << "tokens of greedy generation";
}

TEST_P(LlamaGolden, KeysThatTransformersWritesGetNoNote) {
  const std::string file = std::string(TRANCHE_GOLDEN) + "/" + GetParam() + "/config.json";
  const std::string text = tranche::detail::read_text_file(file, "a config.json");
  EXPECT_TRUE(notes_on_keys(text, file, LlamaConfig::from_json(text, file).to_json()).empty());
}

// The gradient of qwen3's token table, which is also its head, is the sum of the gradients of both stages.
TEST_P(LlamaGolden, AgreesWithTransformersOnTwoStages) {
  const auto found = compare_with_golden(std::string(TRANCHE_GOLDEN) + "/" + GetParam(), "pipeline=2", 2);
  std::printf("measured: %s on two stages: loss %.1e, gradients %.1e (%s; token table %.1e), training %.1e\n",
              GetParam(), found.loss, found.gradients, found.worst_gradient.c_str(), found.table,
              found.training);
  EXPECT_LE(found.loss, 1e-5);
  EXPECT_GT(found.table, 0) << "the token table was compared";
  EXPECT_LE(found.table, 1e-6);
  EXPECT_GT(found.gradients, 0) << "gradients were compared";
  EXPECT_LE(found.gradients, 1e-5) << found.worst_gradient;
  EXPECT_LE(found.training, 1e-5);
}

// Four heads on four ranks. Four ranks cannot evenly share the heads of keys and values (one or two), the
// inner width of 10 and the vocabulary of 17.
TEST_P(LlamaGolden, AgreesWithTransformersOnMeshesThatCutLayers) {
  for (const auto& [mesh, ranks] : {std::pair("tensor=4", 4), std::pair("tensor=2", 2)}) {
    const auto found = compare_with_golden(std::string(TRANCHE_GOLDEN) + "/" + GetParam(), mesh, ranks);
    std::printf(
        "measured: %s on %s: logits %.1e (cached %.1e), loss %.1e, gradients %.1e (%s), training %.1e\n",
        GetParam(), mesh, found.logits, found.cached, found.loss, found.gradients,
        found.worst_gradient.c_str(), found.training);
    EXPECT_GT(found.logits, 0) << "logits were compared";
    EXPECT_LE(found.logits, 1e-5) << mesh;
    EXPECT_LE(found.cached, 1e-5) << mesh;
    EXPECT_LE(found.loss, 1e-5) << mesh;
    EXPECT_GT(found.gradients, 0) << "gradients were compared";
    EXPECT_LE(found.gradients, 1e-5) << found.worst_gradient << " on " << mesh;
    EXPECT_LE(found.training, 1e-5) << mesh;
    EXPECT_EQ(found.generated, 0) << "tokens of greedy generation on " << mesh;
  }
}

TEST_P(LlamaGolden, AgreesWithTransformersOnRanksThatShareTheTokens) {
  for (const auto& [mesh, ranks] : {std::pair("context=2", 2), std::pair("context=2,tensor=2", 4)}) {
    const auto found = compare_with_golden(std::string(TRANCHE_GOLDEN) + "/" + GetParam(), mesh, ranks);
    std::printf("measured: %s on %s: loss %.1e, gradients %.1e (%s), training %.1e\n", GetParam(), mesh,
                found.loss, found.gradients, found.worst_gradient.c_str(), found.training);
    EXPECT_LE(found.loss, 1e-5) << mesh;
    EXPECT_GT(found.gradients, 0) << "gradients were compared";
    EXPECT_LE(found.gradients, 1e-5) << found.worst_gradient << " on " << mesh;
    EXPECT_LE(found.training, 1e-5) << mesh;
    EXPECT_EQ(found.generated, 0) << "tokens of greedy generation on " << mesh;
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, LlamaGolden, ::testing::Values("llama", "mistral", "qwen2", "qwen3"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace tranche::models
