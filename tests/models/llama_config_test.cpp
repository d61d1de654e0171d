// Presets of the Llama family, config.json in both directions, and the text of every refusal.
#include "tranche/models/llama_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <nlohmann/json.hpp>

#include "tranche/core/error.h"

namespace tranche::models {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Scaling = kernels::RopeScaling;

std::string refused(const std::function<void()>& action) {
  try {
    action();
  } catch (const ConfigurationError& error) {
    EXPECT_EQ(error.exit_status(), ExitStatus::configuration);
    return error.message();
  }
  return "nothing was refused";
}

LlamaConfig read(const std::string& type, const std::string& rest = "") {
  return LlamaConfig::from_json(R"({"model_type": ")" + type + '"' + (rest.empty() ? "" : ", " + rest) + "}",
                                "some/config.json");
}

/// The text of the refusal of a config.json with a model_type.
std::string refusal_with(const std::string& type, const std::string& rest) {
  const std::string text = refused([&] { (void)read(type, rest); });
  EXPECT_THAT(text, HasSubstr("some/config.json: ")) << rest;
  return text;
}

TEST(LlamaConfig, PresetsHaveThePublishedNumbersOfParameters) {
  const std::map<std::string, std::int64_t> published = {
      {"llama-160m", 162'417'408},       {"llama-2-7b", 6'738'415'616},       {"llama-3.1-8b", 8'030'261'248},
      {"llama-3.1-70b", 70'553'706'496}, {"llama-3.1-405b", 405'853'388'800}, {"llama-3.2-1b", 1'235'814'400},
      {"llama-3.2-3b", 3'212'749'824},   {"mistral-7b", 7'241'732'096},       {"qwen2.5-0.5b", 494'032'768},
      {"qwen2.5-1.5b", 1'543'714'304},   {"qwen2.5-3b", 3'085'938'688},       {"qwen2.5-7b", 7'615'616'512},
      {"qwen3-0.6b", 596'049'920},       {"qwen3-8b", 8'190'735'360}};
  for (const auto& [name, parameters] : published) {
    EXPECT_EQ(LlamaConfig::preset(name).parameters(), parameters) << name;
  }
}

TEST(LlamaConfig, PresetsAreValidAndKnownByName) {
  for (const auto& name : LlamaConfig::preset_names()) {
    EXPECT_NO_THROW(LlamaConfig::preset(name).validate(name)) << name;
  }
  EXPECT_THAT(
      refused([] { (void)LlamaConfig::preset("llama-3.1-9b"); }),
      AllOf(HasSubstr("no preset of the Llama family is \"llama-3.1-9b\" (did you mean \"llama-3.1-8b\"?)"),
            HasSubstr("llama-nano, qwen3-nano, llama-mini")));
}

TEST(LlamaConfig, WritesWhatItReads) {
  for (const auto& name : LlamaConfig::preset_names()) {
    const auto config = LlamaConfig::preset(name);
    EXPECT_EQ(LlamaConfig::from_json(config.to_json(), "f"), config) << config.to_json();
  }
  auto odd = LlamaConfig::preset("qwen3-nano");
  odd.window = 5;
  odd.windowed = {true, false};
  odd.attention_bias = true;
  odd.attention_dropout = 0.3f;
  odd.rope = {.kind = Scaling::Kind::linear, .factor = 2.5};
  odd.rope_theta = 12345.678;
  EXPECT_EQ(LlamaConfig::from_json(odd.to_json(), "f"), odd) << odd.to_json();
  EXPECT_THAT(odd.to_json(), HasSubstr("\"attention_dropout\": 0.3,"));
  auto mistral = LlamaConfig::preset("mistral-7b");
  mistral.window = 0;
  EXPECT_EQ(LlamaConfig::from_json(mistral.to_json(), "f"), mistral) << mistral.to_json();
}

TEST(LlamaConfig, KeepsTheTokenIdsThatItRead) {
  for (const auto& kind : LlamaConfig::model_types()) {
    const auto config = nlohmann::json::parse(
        read(kind, R"("eos_token_id": [7, 9], "bos_token_id": 260, "pad_token_id": null)").to_json());
    EXPECT_EQ(config["eos_token_id"], (nlohmann::json{7, 9})) << kind;
    EXPECT_EQ(config["bos_token_id"], 260) << kind;
    EXPECT_TRUE(config.contains("pad_token_id") && config["pad_token_id"].is_null()) << kind;
    EXPECT_FALSE(nlohmann::json::parse(read(kind).to_json()).contains("eos_token_id")) << "none was read";
  }
  EXPECT_TRUE(nlohmann::json::parse(LlamaConfig::preset("llama-nano").to_json())["eos_token_id"].is_null())
      << "transformers' 2 would be a byte";
}

TEST(LlamaConfig, ReadsLlama31AsTransformers4WritesIt) {
  const auto config = LlamaConfig::from_json(R"({
    "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": true,
    "vocab_size": 128256})",
                                             "f");
  LlamaConfig wanted = LlamaConfig::preset("llama-3.1-8b");
  EXPECT_EQ(wanted.token_ids["eos_token_id"], "128001");
  wanted.token_ids["eos_token_id"] = "[128001,128008]";
  EXPECT_EQ(config, wanted);
}

TEST(LlamaConfig, ReadsQwen3AsTransformers5WritesIt) {
  const auto config = LlamaConfig::from_json(R"({
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 151643,
    "dtype": "bfloat16", "head_dim": 128, "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02,
    "intermediate_size": 96, "layer_types": ["full_attention", "full_attention"], "max_position_embeddings": 40960,
    "max_window_layers": 2, "model_type": "qwen3", "num_attention_heads": 4, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "pad_token_id": null, "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "sliding_window": null,
    "tie_word_embeddings": true, "use_cache": true, "use_sliding_window": false, "vocab_size": 300})",
                                             "f");
  LlamaConfig wanted = LlamaConfig::preset("qwen3-0.6b");
  wanted.layers = 2;
  wanted.heads = 4;
  wanted.key_value_heads = 2;
  wanted.width = 64;
  wanted.inner = 96;
  wanted.vocabulary = 300;
  wanted.token_ids = {{"bos_token_id", "151643"}, {"pad_token_id", "null"}};
  EXPECT_EQ(config, wanted);
}

TEST(LlamaConfig, KeysThatAreMissingHaveTheArchitecturesDefaults) {
  EXPECT_EQ(read("llama"), LlamaConfig{});
  EXPECT_EQ(read("llama", R"("num_attention_heads": 16)").key_value_heads, 16);
  EXPECT_EQ(read("llama", R"("num_attention_heads": 16)").head_dim, 256);
  const auto mistral = read("mistral");
  EXPECT_EQ(mistral.key_value_heads, 8);
  EXPECT_EQ(mistral.window, 4096);
  EXPECT_EQ(mistral.positions, 131072);
  EXPECT_EQ(read("mistral", R"("num_key_value_heads": null)").key_value_heads, 32);
  EXPECT_EQ(read("mistral", R"("sliding_window": null)").window, 0);
  EXPECT_EQ(read("qwen2").vocabulary, 151936);
  EXPECT_TRUE(read("qwen2").query_key_value_bias());
  EXPECT_FALSE(read("qwen2").output_bias());
  EXPECT_EQ(read("qwen2").window, 0);
  EXPECT_EQ(read("qwen3", R"("hidden_size": 1024)").head_dim, 128);
  EXPECT_TRUE(read("qwen3").query_key_norm());
}

TEST(LlamaConfig, ReadsBothSpellingsOfRotaryPositions) {
  const Scaling linear{.kind = Scaling::Kind::linear, .factor = 4};
  EXPECT_EQ(read("llama", R"("rope_scaling": {"type": "linear", "factor": 4.0})").rope, linear);
  EXPECT_EQ(
      read("llama", R"("rope_parameters": {"rope_type": "linear", "factor": 4, "rope_theta": 77})").rope,
      linear);
  EXPECT_EQ(read("llama", R"("rope_parameters": {"rope_type": "default", "rope_theta": 77})").rope_theta, 77);
  EXPECT_EQ(read("llama", R"("rope_theta": 77, "rope_scaling": null)").rope_theta, 77);
  EXPECT_EQ(
      read("llama", R"("rope_theta": 77, "rope_parameters": {"rope_type": "default", "rope_theta": 77})"),
      read("llama", R"("rope_theta": 77)"));
}

TEST(LlamaConfig, ReadsWindowsByLayer) {
  const std::string four = R"("num_hidden_layers": 4, "use_sliding_window": true, "sliding_window": 7)";
  const auto later = read("qwen2", four + R"(, "max_window_layers": 3)");
  EXPECT_EQ(later.window_of(2), 0);
  EXPECT_EQ(later.window_of(3), 7);
  const auto all = read("qwen2", four + R"(, "max_window_layers": 0)");
  EXPECT_TRUE(all.windowed.empty());
  EXPECT_EQ(all.window_of(0), 7);
  EXPECT_EQ(read("qwen2", four), read("qwen2", R"("num_hidden_layers": 4)"))
      << "28 layers come before windows";
  const auto listed = read("qwen3", four + R"(, "layer_types": ["full_attention", "sliding_attention",
                                               "full_attention", "full_attention"])");
  EXPECT_THAT(listed.windowed, ElementsAre(false, true, false, false));
  EXPECT_EQ(read("qwen3", R"("use_sliding_window": true, "sliding_window": null)").window, 0);
}

TEST(LlamaConfig, OperationsFollowTheStatedFormula) {
  const auto config = LlamaConfig::preset("llama-3.2-1b");
  const double block = 2048.0 * (2 * 2048 + 2 * 512) + 3.0 * 2048 * 8192;
  const double weights = 16 * block + 128256.0 * 2048;
  EXPECT_DOUBLE_EQ(config.flops_per_token(1024), 6 * weights + 12.0 * 2048 * 16 * 512.5);
  auto windowed = LlamaConfig::preset("mistral-7b");
  windowed.window = 2;
  // In a sequence of 4 the queries see 1, 2, 2 and 2 keys.
  auto open = windowed;
  open.window = 0;
  EXPECT_DOUBLE_EQ(open.flops_per_token(4) - windowed.flops_per_token(4), 12.0 * 4096 * 32 * (10 - 7) / 4);
}

TEST(LlamaConfig, RefusesOtherArchitecturesNamingKeyAndFile) {
  EXPECT_THAT(
      refusal_with("gpt2", ""),
      HasSubstr("model_type is \"gpt2\": another architecture; of the Llama family llama, mistral, qwen2, "
                "qwen3 can be trained here"));
  EXPECT_THAT(refused([] { (void)LlamaConfig::from_json("{}", "f"); }),
              HasSubstr("f: model_type is missing; in that of a LlamaForCausalLM it is \"llama\""));
  EXPECT_THAT(refused([] { (void)LlamaConfig::from_json("[]", "f"); }), HasSubstr("f is not an object"));
  EXPECT_THAT(refusal_with("llama", R"("architectures": ["LlamaForSequenceClassification"])"),
              HasSubstr("architectures is [\"LlamaForSequenceClassification\"]; of a \"llama\" only "
                        "[\"LlamaForCausalLM\"] can be trained here"));
  EXPECT_THAT(refusal_with("llama", R"("hidden_act": "gelu")"),
              HasSubstr("hidden_act is \"gelu\": another activation; only \"silu\" can be trained here"));
}

TEST(LlamaConfig, RefusesWhatChangesNumbersAndIsNotSupported) {
  EXPECT_THAT(refusal_with("llama", R"("pretraining_tp": 2)"),
              HasSubstr("pretraining_tp is 2: transformers no longer computes sums in slices"));
  EXPECT_THAT(refusal_with("llama", R"("partial_rotary_factor": 0.5)"),
              HasSubstr("partial_rotary_factor is 0.5"));
  for (const char* key : {"logits_scaling", "logit_scale", "attention_multiplier", "embedding_multiplier",
                          "residual_multiplier"}) {
    EXPECT_THAT(refusal_with("llama", std::string("\"") + key + "\": 2.0"),
                HasSubstr(key + std::string(" is 2.0: all of a head is rotated, and nothing is scaled")));
    EXPECT_NO_THROW(read("llama", std::string("\"") + key + "\": 1.0"));
  }
  for (const char* key : {"attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar",
                          "no_rope_layers", "attention_chunk_size", "num_local_experts", "num_experts"}) {
    EXPECT_THAT(refusal_with("qwen3", std::string("\"") + key + "\": 8"),
                HasSubstr(key + std::string(" is 8: no architecture of the Llama family has it")));
  }
  for (const char* key : {"add_cross_attention", "is_encoder_decoder", "use_bidirectional_attention", "alibi",
                          "rope_interleaved", "use_qk_norm", "parallel_residual"}) {
    EXPECT_THAT(refusal_with("mistral", std::string("\"") + key + "\": true"),
                HasSubstr(key + std::string(" is true: ")));
  }
  EXPECT_THAT(refusal_with("llama", R"("quantization_config": {"bits": 4})"),
              HasSubstr("quantization_config is there: quantized weights cannot be trained here"));
  EXPECT_THAT(refusal_with("mistral", R"("attention_bias": true)"),
              HasSubstr("a MistralForCausalLM has no biases"));
  EXPECT_THAT(refusal_with("qwen2", R"("mlp_bias": true)"),
              HasSubstr("mlp_bias is true: only a LlamaForCausalLM"));
}

TEST(LlamaConfig, RefusesRotaryPositionsOfOtherKinds) {
  for (const char* kind : {"yarn", "dynamic", "longrope", "mrope"}) {
    EXPECT_THAT(
        refusal_with("llama",
                     std::string(R"("rope_scaling": {"factor": 2.0, "rope_type": ")") + kind + "\"}"),
        HasSubstr(std::string("rope_scaling.rope_type is \"") + kind +
                  "\": only the rotary position types default, linear and llama3 can be trained here"));
  }
  EXPECT_THAT(refusal_with("llama", R"("rope_scaling": {"rope_type": "linear"})"),
              HasSubstr("rope_scaling.factor is missing"));
  EXPECT_THAT(refusal_with("llama", R"("rope_scaling": {"rope_type": "linear", "factor": -1})"),
              HasSubstr("rope_scaling.factor is -1, which cannot be"));
  EXPECT_THAT(refusal_with("llama", R"("rope_scaling": {"factor": 2})"),
              HasSubstr("rope_scaling.type is missing"));
  EXPECT_THAT(refusal_with("llama", R"("rope_scaling": {"rope_type": "llama3", "factor": 8})"),
              HasSubstr("rope_scaling.low_freq_factor is missing"));
  EXPECT_THAT(
      refusal_with("llama", R"("rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4,
                                        "high_freq_factor": 4, "original_max_position_embeddings": 64})"),
      HasSubstr("\"high_freq_factor\" is 4, but must be above \"low_freq_factor\" 4"));
  EXPECT_THAT(refusal_with("llama", R"("rope_scaling": {"rope_type": "default", "beta_fast": 32})"),
              HasSubstr("rope_scaling.beta_fast is an unknown key"));
  EXPECT_THAT(
      refusal_with("llama", R"("rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25})"),
      HasSubstr("rope_parameters.partial_rotary_factor is 0.25: all of a head is rotated"));
  EXPECT_THAT(refusal_with("llama", R"("rope_parameters": {"full_attention": {"rope_type": "default"}})"),
              HasSubstr("rope_parameters.full_attention is a block: rotary positions that differ by layer"));
  EXPECT_THAT(
      refusal_with("llama",
                   R"("rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "default"})"),
      HasSubstr("rope_parameters and rope_scaling are both given; keep one"));
  EXPECT_THAT(
      refusal_with("llama",
                   R"("rope_theta": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 6})"),
      HasSubstr("rope_parameters.rope_theta is 6, but rope_theta 5; keep one"));
}

TEST(LlamaConfig, RefusesWindowsThatContradictEachOther) {
  EXPECT_THAT(
      refusal_with("llama", R"("sliding_window": 4096)"),
      HasSubstr("sliding_window is 4096: a LlamaForCausalLM has no window; a MistralForCausalLM has"));
  EXPECT_THAT(refusal_with("mistral", R"("sliding_window": 0)"),
              HasSubstr("sliding_window is 0, which cannot be"));
  const std::string two = R"("num_hidden_layers": 2, )";
  EXPECT_THAT(refusal_with("llama", two + R"("layer_types": ["full_attention", "sliding_attention"])"),
              HasSubstr("layer_types has sliding_attention, but there is no window"));
  EXPECT_THAT(
      refusal_with("qwen2", two + R"("layer_types": ["full_attention", "sliding_attention"])"),
      HasSubstr(
          "layer_types has sliding_attention, but use_sliding_window or sliding_window say that there is "
          "no window"));
  EXPECT_THAT(refusal_with("mistral", two + R"("layer_types": ["full_attention", "sliding_attention"])"),
              HasSubstr("a MistralForCausalLM gives its window to every layer"));
  EXPECT_THAT(refusal_with("qwen3", two + R"("layer_types": ["full_attention"])"),
              HasSubstr("layer_types has 1 entries, but num_hidden_layers is 2"));
  EXPECT_THAT(
      refusal_with("qwen3", two + R"("layer_types": ["full_attention", "linear_attention"])"),
      HasSubstr(
          "layer_types[1] is \"linear_attention\"; full_attention and sliding_attention can be trained"));
}

TEST(LlamaConfig, RefusesImpossibleValuesNamingKeyAndFile) {
  EXPECT_THAT(
      refusal_with("llama", R"("num_attention_heads": 7)"),
      HasSubstr(
          "num_attention_heads is 7, which does not divide hidden_size 4096, and there is no head_dim"));
  EXPECT_THAT(refusal_with("llama", R"("num_key_value_heads": 5)"),
              HasSubstr("\"num_key_value_heads\" 5 does not divide \"num_attention_heads\" 32"));
  EXPECT_THAT(refusal_with("llama", R"("head_dim": 3)"), HasSubstr("\"head_dim\" is 3, but must be even"));
  EXPECT_THAT(refusal_with("llama", R"("num_hidden_layers": 0)"), HasSubstr("num_hidden_layers is 0"));
  EXPECT_THAT(refusal_with("llama", R"("num_hidden_layers": "two")"),
              HasSubstr("is not an integer: \"two\""));
  EXPECT_THAT(refusal_with("llama", R"("intermediate_size": 0)"),
              HasSubstr("\"intermediate_size\" is 0, but must be positive"));
  EXPECT_THAT(refusal_with("llama", R"("vocab_size": 100000000)"),
              HasSubstr("\"vocab_size\" is 100000000, but models of at most"));
  EXPECT_THAT(refusal_with("llama", R"("tie_word_embeddings": "no")"),
              HasSubstr("tie_word_embeddings is neither true nor false: \"no\""));
  EXPECT_THAT(refusal_with("llama", R"("attention_dropout": 1.0)"),
              HasSubstr("\"attention_dropout\" is 1, but a"));
  EXPECT_THAT(refusal_with("llama", R"("rms_norm_eps": 0)"), HasSubstr("\"rms_norm_eps\" is 0"));
  EXPECT_THAT(refusal_with("llama", R"("initializer_range": -1)"), HasSubstr("\"initializer_range\" is -1"));
  EXPECT_THAT(refusal_with("llama", R"("rope_theta": 0)"),
              HasSubstr("\"rope_theta\" is 0, but must be positive"));
  EXPECT_THAT(refusal_with("llama", R"("num_attention_heads": 1000000, "head_dim": 1000000)"),
              HasSubstr("\"num_attention_heads\" 1000000 times \"head_dim\" 1000000 is"));
  EXPECT_THAT(
      refusal_with("llama", R"("hidden_size": 1000000, "head_dim": 128, "intermediate_size": 4000000)"),
      AllOf(HasSubstr("the model has"), HasSubstr("parameters, but models of at most")));
  auto config = LlamaConfig::preset("llama-nano");
  config.windowed = {true};
  EXPECT_THAT(refused([&] { config.validate("here"); }),
              HasSubstr("here: \"layer_types\" has 1 entries for 2 layers"));
  config.windowed.clear();
  config.window = -1;
  EXPECT_THAT(refused([&] { config.validate("here"); }), HasSubstr("here: \"sliding_window\" is -1"));
}

}  // namespace
}  // namespace tranche::models
