// Presets, config.json in both directions, and the text of every refusal.
#include "tranche/models/gpt_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>

#include "tranche/core/error.h"
#include "tranche/models/gpt.h"

namespace tranche::models {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string refusal(const std::function<void()>& action) {
  try {
    action();
  } catch (const ConfigurationError& error) {
    EXPECT_EQ(error.exit_status(), ExitStatus::configuration);
    return error.message();
  }
  return "nothing was refused";
}

std::string refusal_of(const std::string& json) {
  return refusal([&] { (void)GptConfig::from_json(json, "some/config.json"); });
}

TEST(GptConfig, PresetsHaveTheKnownNumbersOfParameters) {
  EXPECT_EQ(GptConfig::preset("gpt2").parameters(), 124'439'808);
  EXPECT_EQ(GptConfig::preset("gpt2-medium").parameters(), 354'823'168);
  EXPECT_EQ(GptConfig::preset("gpt2-large").parameters(), 774'030'080);
  EXPECT_EQ(GptConfig::preset("gpt2-xl").parameters(), 1'557'611'200);
}

TEST(GptConfig, SpecHoldsTheParametersThatTheFormulaCounts) {
  auto uneven = GptConfig::preset("gpt-nano");
  uneven.inner = 37;
  for (const auto& name : GptConfig::preset_names()) {
    const auto config = GptConfig::preset(name);
    EXPECT_EQ(Gpt::spec(config, 64).parameters(), config.parameters()) << name;
  }
  EXPECT_EQ(Gpt::spec(uneven, 64).parameters(), uneven.parameters());
}

TEST(GptConfig, SpecHasTheNamesAndShapesOfHuggingFace) {
  const auto spec = Gpt::spec(GptConfig::preset("gpt2"), 1024);
  ASSERT_EQ(spec.units().size(), 13u);
  EXPECT_EQ(spec.unit({0}).name, "embedding");
  EXPECT_EQ(spec.unit({0}).uses_per_micro_batch, 2);
  EXPECT_EQ(spec.unit({12}).name, "h.11");
  EXPECT_EQ(spec.tokens_per_sample, 1024);
  std::string listed;
  for (const auto& tensor : spec.unit({0}).tensors) listed += tensor.name + tensor.shape.to_string() + "\n";
  for (const auto& tensor : spec.unit({12}).tensors) listed += tensor.name + tensor.shape.to_string() + "\n";
  EXPECT_EQ(listed,
            "transformer.wte.weight[50257, 768]\n"
            "transformer.wpe.weight[1024, 768]\n"
            "transformer.ln_f.weight[768]\n"
            "transformer.ln_f.bias[768]\n"
            "transformer.h.11.ln_1.weight[768]\n"
            "transformer.h.11.ln_1.bias[768]\n"
            "transformer.h.11.attn.c_attn.weight[768, 2304]\n"
            "transformer.h.11.attn.c_attn.bias[2304]\n"
            "transformer.h.11.attn.c_proj.weight[768, 768]\n"
            "transformer.h.11.attn.c_proj.bias[768]\n"
            "transformer.h.11.ln_2.weight[768]\n"
            "transformer.h.11.ln_2.bias[768]\n"
            "transformer.h.11.mlp.c_fc.weight[768, 3072]\n"
            "transformer.h.11.mlp.c_fc.bias[3072]\n"
            "transformer.h.11.mlp.c_proj.weight[3072, 768]\n"
            "transformer.h.11.mlp.c_proj.bias[768]\n");
}

TEST(GptConfig, InitialisesAsGpt2Does) {
  const auto spec = Gpt::spec(GptConfig::preset("gpt2"), 1024);
  for (const auto& unit : spec.units()) {
    for (const auto& tensor : unit.tensors) {
      const auto& born = tensor.initializer;
      if (tensor.name.ends_with("bias")) {
        EXPECT_TRUE(born.kind == Initializer::Kind::constant && born.a == 0) << tensor.name;
      } else if (tensor.name.find("ln_") != std::string::npos) {
        EXPECT_TRUE(born.kind == Initializer::Kind::constant && born.a == 1) << tensor.name;
      } else {
        EXPECT_EQ(born.kind, Initializer::Kind::normal) << tensor.name;
        EXPECT_EQ(born.a, 0) << tensor.name;
        const bool residual = tensor.name.ends_with("c_proj.weight");
        EXPECT_FLOAT_EQ(born.b, residual ? 0.02f / std::sqrt(24.0f) : 0.02f) << tensor.name;
      }
    }
  }
}

TEST(GptConfig, OperationsFollowTheStatedFormula) {
  const auto config = GptConfig::preset("gpt2");
  // 12 blocks of 12 * 768^2 matrix weights and the head's 50257 * 768, with six operations each, and causal
  // attention.
  const double weights = 12.0 * 12 * 768 * 768 + 50257.0 * 768;
  EXPECT_DOUBLE_EQ(config.flops_per_token(1024), 6 * weights + 6.0 * 12 * 768 * 1025);
  EXPECT_DOUBLE_EQ(Gpt::spec(config, 1024).flops_per_token, config.flops_per_token(1024));
  EXPECT_TRUE(Gpt::spec(config, 1024).recomputes_activations);
}

TEST(GptConfig, ReadsWhatHuggingFaceWrites) {
  const auto config = GptConfig::from_json(R"({
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
    "bos_token_id": 50256, "embd_pdrop": 0.2, "eos_token_id": 50256, "initializer_range": 0.03,
    "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 512, "n_embd": 64, "n_head": 4, "n_inner": null,
    "n_layer": 3, "n_positions": 512, "reorder_and_upcast_attn": false, "resid_pdrop": 0.3,
    "scale_attn_by_inverse_layer_idx": false, "scale_attn_weights": true, "summary_type": "cls_index",
    "task_specific_params": {"text-generation": {"do_sample": true}}, "use_cache": true, "vocab_size": 1000})",
                                           "config.json");
  GptConfig wanted;
  wanted.layers = 3;
  wanted.heads = 4;
  wanted.width = 64;
  wanted.vocabulary = 1000;
  wanted.positions = 512;
  wanted.embedding_dropout = 0.2f;
  wanted.residual_dropout = 0.3f;
  wanted.initializer_range = 0.03f;
  wanted.token_ids = {{"bos_token_id", "50256"}, {"eos_token_id", "50256"}};
  EXPECT_EQ(config, wanted);
}

TEST(GptConfig, TakesHuggingFacesDefaultsAndTheOlderNameOfPositions) {
  EXPECT_EQ(GptConfig::from_json(R"({"model_type": "gpt2"})", "f"), GptConfig::preset("gpt2"));
  EXPECT_EQ(GptConfig::from_json(R"({"model_type": "gpt2", "n_ctx": 77})", "f").positions, 77);
  EXPECT_EQ(GptConfig::from_json(R"({"model_type": "gpt2", "n_inner": 100})", "f").inner_width(), 100);
  EXPECT_EQ(GptConfig::from_json(R"({"model_type": "gpt2", "n_inner": 3072})", "f"),
            GptConfig::preset("gpt2"));
}

TEST(GptConfig, TakesTheOtherNamesOfSizesUnlessTheyContradict) {
  const auto config = GptConfig::from_json(
      R"({"model_type": "gpt2", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
          "max_position_embeddings": 77, "n_ctx": 512, "n_layer": 3})",
      "f");
  EXPECT_EQ(config.width, 64);
  EXPECT_EQ(config.layers, 3);
  EXPECT_EQ(config.heads, 4);
  EXPECT_EQ(config.positions, 77);
  const auto with = [](const std::string& rest) {
    return refusal_of(R"({"model_type": "gpt2", )" + rest + "}");
  };
  EXPECT_EQ(with(R"("n_embd": 768, "hidden_size": 64)"),
            "some/config.json: hidden_size is 64, but n_embd, another name of it, 768; keep one");
  EXPECT_THAT(with(R"("n_layer": 12, "num_hidden_layers": 2)"),
              HasSubstr("num_hidden_layers is 2, but n_layer"));
  EXPECT_THAT(with(R"("n_head": 12, "num_attention_heads": 2)"),
              HasSubstr("num_attention_heads is 2, but n_head"));
  EXPECT_THAT(with(R"("n_positions": 8, "max_position_embeddings": 9)"),
              HasSubstr("max_position_embeddings is 9, but n_positions"));
}

TEST(GptConfig, WritesWhatItReads) {
  for (const auto& name : GptConfig::preset_names()) {
    const auto config = GptConfig::preset(name);
    EXPECT_EQ(GptConfig::from_json(config.to_json(), "f"), config) << config.to_json();
  }
  auto odd = GptConfig::preset("gpt-nano");
  odd.inner = 41;
  odd.attention_dropout = 0.3f;
  EXPECT_EQ(GptConfig::from_json(odd.to_json(), "f"), odd);
  EXPECT_THAT(odd.to_json(), HasSubstr("\"attn_pdrop\": 0.3,"));
}

TEST(GptConfig, KeepsTheTokenIdsThatItRead) {
  const auto written = [](const std::string& rest) {
    return nlohmann::json::parse(
        GptConfig::from_json(R"({"model_type": "gpt2")" + rest + "}", "f").to_json());
  };
  EXPECT_EQ(written("")["eos_token_id"], 50256) << "transformers' default";
  EXPECT_TRUE(written(R"(, "vocab_size": 300)")["eos_token_id"].is_null());
  EXPECT_TRUE(written(R"(, "eos_token_id": null)")["eos_token_id"].is_null());
  EXPECT_FALSE(written("").contains("pad_token_id"));
  const auto config =
      written(R"(, "vocab_size": 300, "eos_token_id": [7, 9], "bos_token_id": 260, "pad_token_id": -1)");
  EXPECT_EQ(config["eos_token_id"], (nlohmann::json{7, 9}));
  EXPECT_EQ(config["bos_token_id"], 260);
  EXPECT_EQ(config["pad_token_id"], -1);
  const auto texts = written(R"(, "eos_token_id": "</s>", "pad_token_id": false, "sep_token_id": ["a"])");
  EXPECT_EQ(texts["eos_token_id"], 50256) << "what is no number is left alone";
  EXPECT_FALSE(texts.contains("pad_token_id") || texts.contains("sep_token_id"));
}

TEST(GptConfig, RefusesWhatIsNotGpt2NamingKeyAndFile) {
  const auto with = [](const std::string& rest) {
    return refusal_of(R"({"model_type": "gpt2", )" + rest + "}");
  };
  EXPECT_THAT(
      refusal_of(R"({"model_type": "llama"})"),
      AllOf(HasSubstr("some/config.json"), HasSubstr("model_type is \"llama\": another architecture")));
  EXPECT_THAT(refusal_of(R"({"n_layer": 2})"),
              HasSubstr("some/config.json: model_type is missing; in that of a GPT2LMHeadModel"));
  EXPECT_THAT(refusal_of("{"), HasSubstr("some/config.json is not JSON: line 1, column 2: syntax error"));
  EXPECT_THAT(refusal_of("[]"), HasSubstr("some/config.json is not an object: a list of 0"));
  EXPECT_THAT(
      with(R"("activation_function": "relu")"),
      AllOf(HasSubstr("some/config.json"),
            HasSubstr("activation_function is \"relu\": another activation; only"), HasSubstr("gelu_new")));
  EXPECT_THAT(with(R"("scale_attn_by_inverse_layer_idx": true)"),
              HasSubstr("scale_attn_by_inverse_layer_idx"));
  EXPECT_THAT(with(R"("reorder_and_upcast_attn": true)"), HasSubstr("reorder_and_upcast_attn"));
  EXPECT_THAT(with(R"("scale_attn_weights": false)"), HasSubstr("scale_attn_weights"));
  EXPECT_THAT(with(R"("add_cross_attention": true)"), HasSubstr("add_cross_attention"));
  EXPECT_THAT(with(R"("tie_word_embeddings": false)"), HasSubstr("tie_word_embeddings"));
  EXPECT_THAT(with(R"("quantization_config": {"bits": 4})"),
              HasSubstr("quantization_config is there: quantized weights cannot be trained here"));
}

TEST(GptConfig, RefusesImpossibleValuesNamingKeyAndFile) {
  const auto with = [](const std::string& rest) {
    return refusal_of(R"({"model_type": "gpt2", )" + rest + "}");
  };
  EXPECT_THAT(with(R"("n_head": 7)"),
              AllOf(HasSubstr("some/config.json"), HasSubstr("\"n_head\" 7 does not divide \"n_embd\" 768")));
  EXPECT_THAT(with(R"("n_layer": "two")"), HasSubstr("n_layer is not an integer: \"two\""));
  EXPECT_THAT(with(R"("n_layer": 0)"), HasSubstr("\"n_layer\" is 0"));
  EXPECT_THAT(with(R"("n_embd": -3)"), HasSubstr("\"n_embd\" is -3"));
  EXPECT_THAT(with(R"("n_inner": 0)"), HasSubstr("n_inner is 0, which cannot be: from 1"));
  EXPECT_THAT(with(R"("attn_pdrop": 1.0)"), HasSubstr("\"attn_pdrop\" is 1"));
  EXPECT_THAT(with(R"("embd_pdrop": "a")"), HasSubstr("embd_pdrop is not a number: \"a\""));
  EXPECT_THAT(with(R"("layer_norm_epsilon": 0)"), HasSubstr("\"layer_norm_epsilon\" is 0"));
  EXPECT_THAT(with(R"("initializer_range": -1)"), HasSubstr("\"initializer_range\" is -1"));
}

TEST(GptConfig, RefusesSequencesThatTheModelDoesNotAllow) {
  const auto config = GptConfig::preset("gpt-nano");
  EXPECT_NO_THROW((void)Gpt::spec(config, 64));
  EXPECT_THAT(refusal([&] { (void)Gpt::spec(config, 65); }),
              AllOf(HasSubstr("sequence length 65"), HasSubstr("the model has 64 positions")));
  EXPECT_THAT(refusal([&] { (void)Gpt::spec(config, 0); }), HasSubstr("sequence length 0"));
}

}  // namespace
}  // namespace tranche::models
