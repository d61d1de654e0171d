// The registry of language models.
#include "tranche/models/model_registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

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
