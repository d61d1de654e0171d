// The registry of language models.
#include "tranche/models/model_registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "models/config_json.h"
#include "tranche/core/error.h"
#include "tranche/models/gpt.h"
#include "tranche/models/llama.h"

namespace tranche::models {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

template <typename Problem = ConfigurationError, typename Call>
std::string refused(const Call& call) {
  try {
    call();
  } catch (const Problem& error) {
    return error.message();
  }
  return "not refused";
}

const GptConfig& gpt_of(const std::shared_ptr<const LanguageModel>& model) {
  return dynamic_cast<const Gpt&>(*model).config();
}

TEST(NotesOnKeys, NameMisspeltKeysAndNoOthers) {
  const auto notes = [](const std::string& text) {
    return notes_on_keys(text, "f", ModelRegistry::with_builtin().from_json(text, "f")->to_json());
  };
  EXPECT_THAT(
      notes(R"({"model_type": "llama", "tie_word_embedding": true, "rope_thetta": 500000,
                        "rms_norm_epsilon": 0.1, "num_key_value_head": 8, "eos_token_ids": 2, "rope_parameter": null})"),
      testing::ElementsAre("f: the key 'tie_word_embedding' is not read; did you mean 'tie_word_embeddings'?",
                           "f: the key 'rope_thetta' is not read; did you mean 'rope_theta'?",
                           "f: the key 'rms_norm_epsilon' is not read; did you mean 'rms_norm_eps'?",
                           "f: the key 'num_key_value_head' is not read; did you mean 'num_key_value_heads'?",
                           "f: the key 'rope_parameter' is not read; did you mean 'rope_parameters'?"));
  EXPECT_THAT(notes(R"({"model_type": "gpt2", "n_layers": 2, "layer_norm_eps": 0.1, "hidden_sizes": 8})"),
              testing::ElementsAre("f: the key 'n_layers' is not read; did you mean 'n_layer'?",
                                   "f: the key 'hidden_sizes' is not read; did you mean 'hidden_size'?"));
  EXPECT_THAT(notes(R"({"model_type": "gpt2", "n_layers": 2, "n_layer": 2})"), testing::IsEmpty())
      << "the file has the right one";
  // These are keys of published files.
  for (
      const char* text :
      {R"({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_ctx": 1024, "n_special": 0, "predict_special_tokens": true,
            "summary_activation": null, "summary_first_dropout": 0.1, "summary_proj_to_labels": true, "summary_type": "cls_index",
            "summary_use_proj": true, "task_specific_params": {}, "use_cache": true, "transformers_version": "5.0.0", "dtype": "float32",
            "_num_labels": 1, "id2label": {}, "label2id": {}, "output_past": true, "bos_token_id": 50256, "eos_token_id": 50256})",
       R"({"model_type": "llama", "_name_or_path": "x", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "sep_token_id": 3,
            "max_sequence_length": 2048, "torch_dtype": "float16", "use_cache": true, "pretraining_tp": 1, "unsloth_version": "1",
            "tokenizer_class": "x", "output_attentions": false, "output_hidden_states": false, "return_dict": true, "chunk_size_feed_forward": 0,
            "tie_encoder_decoder": false, "cross_attention_hidden_size": null, "is_decoder": false, "min_length": 0, "top_k": 50,
            "attention_bias": false, "auto_map": {}, "use_flash_attention": true, "rope_theta": 10000, "fixed_parameter": 0})",
       R"({"model_type": "mistral", "sliding_window": null, "rope_scaling": null, "head_dim": null, "use_cache": true})",
       R"({"model_type": "qwen2", "use_mrope": false, "max_window_layers": 28, "use_sliding_window": false, "sliding_window": 32768,
            "layer_types": null, "attention_dropout": 0.0})"})
    EXPECT_THAT(notes(text), testing::IsEmpty()) << text;
}

TEST(ModelRegistry, ResolvesPresetsAndFiles) {
  const ModelRegistry models = ModelRegistry::with_builtin();
  EXPECT_EQ(gpt_of(models.resolve("gpt-mini")), GptConfig::preset("gpt-mini"));
  EXPECT_THAT(refused([&] { (void)models.resolve("gpt2-mediun"); }),
              AllOf(HasSubstr("did you mean \"gpt2-medium\"?"), HasSubstr("gpt2, gpt2-medium, gpt2-large"),
                    HasSubstr("or give the path of a config.json")));
  const std::filesystem::path here = std::filesystem::temp_directory_path();
  EXPECT_EQ(refused([&] { (void)models.resolve((here / "").string()); }),
            "\"" + (here / "").string() + "\" is a folder; a model is named by its config.json, \"" +
                (here / "config.json").string() + "\"");
  EXPECT_THAT(refused([&] { (void)models.resolve("no/such.json"); }),
              AllOf(HasSubstr("no/such.json"), HasSubstr("cannot be read")));
  EXPECT_EQ(
      refused([&] { (void)models.resolve("some-org/some-model"); }),
      "\"some-org/some-model\" is no file; if it is a name on a hub of models: nothing is downloaded here: "
      "fetch the folder, and name its config.json");
  EXPECT_EQ(refused([&] { (void)models.resolve("a/model.safetensors"); }),
            "\"a/model.safetensors\" holds weights; a model is named by the config.json beside them");
  const auto path = std::filesystem::path(::testing::TempDir()) /
                    ("tranche_model_registry_" + std::to_string(::getpid()) + ".json");
  std::ofstream(path) << GptConfig::preset("gpt-nano").to_json();
  EXPECT_EQ(gpt_of(models.resolve(path.string())), GptConfig::preset("gpt-nano"));
  std::filesystem::remove(path);
}

TEST(ModelRegistry, AnInitializerRangeOfZeroMeansZeros) {
  GptConfig gpt = GptConfig::preset("gpt-mini");
  LlamaConfig llama = LlamaConfig::preset("llama-mini");
  gpt.initializer_range = llama.initializer_range = 0;
  const Gpt one(gpt);
  const Llama other(llama);
  for (const LanguageModel* model :
       {static_cast<const LanguageModel*>(&one), static_cast<const LanguageModel*>(&other)}) {
    const ModelSpec spec = model->spec(32);
    for (const UnitSpec& unit : spec.units()) {
      for (const TensorSpec& tensor : unit.tensors) {
        EXPECT_EQ(tensor.initializer.kind, Initializer::Kind::constant) << tensor.name;
      }
    }
  }
}

TEST(ModelRegistry, GoesByArchitectureThenByModelType) {
  const ModelRegistry models = ModelRegistry::with_builtin();
  const auto read = [&](const char* text) { return models.from_json(text, "some/config.json"); };
  EXPECT_EQ(read(R"({"model_type": "gpt2"})")->architecture(), "GPT2LMHeadModel");
  EXPECT_EQ(read(R"({"architectures": ["GPT2Model"], "model_type": "gpt2"})")->architecture(),
            "GPT2LMHeadModel");
  EXPECT_THAT(refused([&] { (void)read(R"({"architectures": ["GPT2LMHeadMdoel"]})"); }),
              AllOf(HasSubstr("some/config.json: architectures is \"GPT2LMHeadMdoel\""),
                    HasSubstr("can be trained here: GPT2"), Not(HasSubstr("did you mean"))));
  // A similar name still is another architecture.
  for (const char* other : {"OlmoForCausalLM", "Phi3ForCausalLM"}) {
    const std::string text =
        std::string(R"({"architectures": [")") + other + R"("], "model_type": "llamas"})";
    EXPECT_THAT(refused([&] { (void)read(text.c_str()); }), Not(HasSubstr("did you mean")));
  }
  EXPECT_THAT(refused([&] { (void)read(R"({"model_type": "gpt1"})"); }), Not(HasSubstr("did you mean")));
  EXPECT_THAT(refused([&] { (void)read(R"({"model_type": "bert"})"); }),
              AllOf(HasSubstr("some/config.json: model_type is \"bert\""), HasSubstr("trained here: gpt2")));
  EXPECT_THAT(refused([&] { (void)read(R"({"n_layer": 2})"); }),
              HasSubstr("some/config.json: model_type is missing; known are gpt2"));
  EXPECT_THAT(refused([&] { (void)read("{"); }), HasSubstr("some/config.json is not JSON"));
}

TEST(ModelRegistry, HoldsTheLlamaFamily) {
  const ModelRegistry models = ModelRegistry::with_builtin();
  EXPECT_EQ(models.architecture_names(),
            (std::vector<std::string>{"GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM",
                                      "Qwen2ForCausalLM", "Qwen3ForCausalLM"}));
  for (const std::string& name : models.preset_names()) {
    const auto model = models.preset(name);
    const auto again = models.from_json(model->to_json(), name);
    EXPECT_EQ(again->to_json(), model->to_json()) << name;
    EXPECT_EQ(again->architecture(), model->architecture()) << name;
  }
  EXPECT_EQ(models.preset("llama-3.1-8b")->spec(8192).parameters(), 8'030'261'248);
  EXPECT_EQ(models.preset("qwen3-0.6b")->architecture(), "Qwen3ForCausalLM");
}

TEST(ModelRegistry, HoldsEachNameOnce) {
  ModelRegistry models = ModelRegistry::with_builtin();
  const auto again = [&](const Architecture& architecture) {
    return refused<InvalidArgument>([&] { models.add(architecture); });
  };
  EXPECT_THAT(again({"GPT2LMHeadModel", "other", {}}),
              HasSubstr("holds the architecture \"GPT2LMHeadModel\""));
  EXPECT_THAT(again({"Other", "gpt2", {}}), HasSubstr("holds the model_type \"gpt2\""));
  EXPECT_THAT(again({"Other", "other", {}, {{"gpt2-xl", nullptr}}}),
              HasSubstr("holds the preset \"gpt2-xl\""));
  const auto made = [](std::string_view, std::string_view) {
    return std::make_shared<const Gpt>(GptConfig::preset("gpt-nano"));
  };
  models.add({"MineForCausalLM", "mine", made, {{"mine-1", made("", "")}}});
  EXPECT_EQ(models.from_json(R"({"architectures": ["MineForCausalLM"]})", "f")->shape().width, 32);
  EXPECT_EQ(models.resolve("mine-1")->shape().layers, 2);
  EXPECT_THAT(models.architecture_names(), testing::Contains("MineForCausalLM"));
}

}  // namespace
}  // namespace tranche::models
