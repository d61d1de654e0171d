// tranche checkpoint export and import.

#include <gmock/gmock.h>

#include <cstring>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "checkpoint/reader.h"
#include "checkpoint/safetensors.h"
#include "tests/models/training_fixture.h"
#include "tests/tools/gpt_checkpoint.h"
#include "tests/tools/program_fixture.h"
#include "tools/checkpoint/hugging_face.h"
#include "tranche/core/error.h"
#include "tranche/models/llama.h"

namespace tranche::tools {
namespace {

using nlohmann::ordered_json;
using test::checkpoint_command;
using test::ProgramResult;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

/// A safetensors file in memory, written by hand rather than by the tested code: header and data.
struct HandMade {
  std::vector<std::pair<std::string, std::vector<std::int64_t>>> tensors;
  std::string dtype = "F32";
  std::string first_dtype;  ///< dtype of the first tensor, if it differs

  /// The values of test::sample_value for the name with the prefix "transformer.".
  std::string file(int variant = 0) const {
    ordered_json header = ordered_json::object();
    std::string data;
    for (const auto& [name, shape] : tensors) {
      std::int64_t elements = 1;
      for (const std::int64_t extent : shape) elements *= extent;
      const std::size_t begin = data.size();
      const std::string kind = !first_dtype.empty() && begin == 0 ? first_dtype : dtype;
      std::string ours = name.starts_with("transformer.") ? name : "transformer." + name;
      if (name == "lm_head.weight") ours = "transformer.wte.weight";
      for (std::int64_t e = 0; e < elements; ++e) {
        const float value = test::sample_value("weight", ours, e, variant);
        std::uint32_t bits = 0;
        std::memcpy(&bits, &value, 4);
        if (kind == "BF16") {
          data.append(reinterpret_cast<const char*>(&bits) + 2, 2);  // rounded toward zero, because any bf16
                                                                     // value will do
        } else {
          data.append(reinterpret_cast<const char*>(&bits), 4);
        }
      }
      header[name] = {{"dtype", kind}, {"shape", shape}, {"data_offsets", {begin, data.size()}}};
    }
    const std::string text = header.dump();
    const std::uint64_t length = text.size();
    return std::string(reinterpret_cast<const char*>(&length), 8) + text + data;
  }
};

/// The names and shapes of test::tiny_gpt() according to GPT-2's documentation, without using our code.
HandMade tiny_tensors(const std::string& prefix) {
  HandMade made;
  const auto add = [&](const std::string& name, std::vector<std::int64_t> shape) {
    made.tensors.emplace_back(prefix + name, std::move(shape));
  };
  add("wte.weight", {256, 15});
  add("wpe.weight", {24, 15});
  for (const std::string block : {"h.0.", "h.1."}) {
    for (const std::string norm : {"ln_1.", "ln_2."}) {
      add(block + norm + "weight", {15});
      add(block + norm + "bias", {15});
    }
    add(block + "attn.c_attn.weight", {15, 45});
    add(block + "attn.c_attn.bias", {45});
    add(block + "attn.c_proj.weight", {15, 15});
    add(block + "attn.c_proj.bias", {15});
    add(block + "mlp.c_fc.weight", {15, 31});
    add(block + "mlp.c_fc.bias", {31});
    add(block + "mlp.c_proj.weight", {31, 15});
    add(block + "mlp.c_proj.bias", {15});
  }
  add("ln_f.weight", {15});
  add("ln_f.bias", {15});
  return made;
}

class HuggingFace : public testing::Test {
 protected:
  /// Writes a folder with the file and the tiny model's config.json.
  std::string write(const std::string& name, const std::string& file) const {
    std::filesystem::create_directory(folder_.path(name));
    folder_.write(name + "/model.safetensors", file);
    folder_.write(name + "/config.json", test::tiny_gpt().to_json());
    return folder_.path(name);
  }
  /// Expects all weights of a checkpoint to be `value`(name, element).
  void expect_weights(const std::string& path,
                      const std::function<float(const std::string&, std::int64_t)>& value) const {
    const checkpoint::LocalStorage local;
    checkpoint::Reader reader(local, path);
    for (const checkpoint::StoredTensor& tensor : reader.tensors()) {
      std::vector<float> read(static_cast<std::size_t>(tensor.shape.elements()));
      reader.read_tensor(tensor.name, "weight", {0, tensor.shape.elements()}, DataType::float32, read.data());
      for (std::size_t e = 0; e < read.size(); ++e) {
        ASSERT_EQ(read[e], value(tensor.name, static_cast<std::int64_t>(e))) << tensor.name << " " << e;
      }
    }
  }
  test::TemporaryFolder folder_;
};

float sample_weight(const std::string& name, std::int64_t element) {
  return test::sample_value("weight", name, element);
}

TEST_F(HuggingFace, ExportsWholeTensorsFromAnyNumberOfRanks) {
  for (const int world : {1, 3}) {
    const std::string name = "of" + std::to_string(world);
    const std::string path = test::save_gpt(folder_.path(name + "-run"), test::tiny_gpt(), {.world = world});
    const ProgramResult result = checkpoint_command({"export", path, "--to", folder_.path(name)});
    ASSERT_EQ(result.status, 0) << result.errors;
    EXPECT_THAT(result.out, HasSubstr("28 tensors of step 7 in fp32"));
    const checkpoint::SafetensorsFolder written(detail::posix_file_system(), folder_.path(name));
    EXPECT_EQ(written.tensors().size(), 28u) << "the tied head is written once, as transformers does";
    const HandMade expected = tiny_tensors("transformer.");
    for (const auto& [tensor, shape] : expected.tensors) {
      const checkpoint::SafeTensor* found = written.find(tensor);
      ASSERT_NE(found, nullptr) << tensor;
      EXPECT_EQ(found->shape, shape) << tensor;
      EXPECT_EQ(found->dtype, "F32");
      std::vector<float> values(static_cast<std::size_t>(found->elements));
      written.read(*found, {0, found->elements}, DataType::float32, values.data());
      for (std::size_t e = 0; e < values.size(); ++e) {
        ASSERT_EQ(values[e], sample_weight(tensor, static_cast<std::int64_t>(e))) << tensor;
      }
    }
    const auto config = ordered_json::parse(written.config());
    EXPECT_EQ(config["torch_dtype"], "float32");
    EXPECT_TRUE(config["eos_token_id"].is_null()) << "GPT-2's end of text is beyond 256 bytes";
    EXPECT_EQ(models::GptConfig::from_json(written.config(), "config.json"), test::tiny_gpt());
  }
}

TEST_F(HuggingFace, ExportsRoundToNearestEven) {
  const std::string path = test::save_gpt(folder_.path("run"), test::tiny_gpt(), {.world = 2});
  ASSERT_EQ(checkpoint_command({"export", path, "--to", folder_.path("out"), "--dtype", "bf16"}).status, 0);
  const checkpoint::SafetensorsFolder written(detail::posix_file_system(), folder_.path("out"));
  EXPECT_EQ(ordered_json::parse(written.config())["torch_dtype"], "bfloat16");
  int up = 0, down = 0;
  for (const checkpoint::SafeTensor& tensor : written.tensors()) {
    EXPECT_EQ(tensor.dtype, "BF16");
    std::vector<float> values(static_cast<std::size_t>(tensor.elements));
    written.read(tensor, {0, tensor.elements}, DataType::float32, values.data());
    for (std::size_t e = 0; e < values.size(); ++e) {
      const float exact = sample_weight(tensor.name, static_cast<std::int64_t>(e));
      std::uint32_t bits = 0;
      std::memcpy(&bits, &exact, 4);
      bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
      float rounded = 0;
      std::memcpy(&rounded, &bits, 4);
      ASSERT_EQ(values[e], rounded) << tensor.name << " " << e;
      ++(std::abs(rounded) > std::abs(exact) ? up : down);
    }
  }
  EXPECT_GT(up, 1000);
  EXPECT_GT(down, 1000);
}

TEST_F(HuggingFace, ImportsWithAndWithoutPrefixAndHead) {
  HandMade prefixed = tiny_tensors("transformer."), plain = tiny_tensors(""), with_head = prefixed;
  with_head.tensors.emplace_back("lm_head.weight", std::vector<std::int64_t>{256, 15});
  // Masks, as older versions saved them; their values are not used.
  with_head.tensors.emplace_back("transformer.h.0.attn.bias", std::vector<std::int64_t>{1, 1, 24, 24});
  with_head.tensors.emplace_back("transformer.h.1.attn.masked_bias", std::vector<std::int64_t>{});
  int number = 0;
  for (const HandMade& made : {prefixed, plain, with_head}) {
    const std::string name = std::to_string(number++);
    const std::string source = write("hf" + name, made.file());
    const ProgramResult result = checkpoint_command({"import", source, "--to", folder_.path("run" + name)});
    ASSERT_EQ(result.status, 0) << result.errors;
    EXPECT_THAT(result.out, HasSubstr("--resume-weights-only " + folder_.path("run" + name)));
    const std::string path = folder_.path("run" + name + "/step-00000000");
    expect_weights(path, sample_weight);
    EXPECT_EQ(checkpoint_command({"verify", folder_.path("run" + name)}).status, 0);
    const checkpoint::LocalStorage local;
    const checkpoint::Reader reader(local, path);
    const RunIdentity identity =
        RunIdentity::from_json(reader.manifest().run.user, "here", models::ModelRegistry::with_builtin());
    EXPECT_EQ(identity.model->to_json(), test::tiny_gpt().to_json());
    EXPECT_EQ(identity.sequence, 24);
    EXPECT_EQ(identity.tokenizer.kind, Tokenizer::Kind::bytes);
    EXPECT_NE(reader.find("lm_head.weight"), nullptr);
    EXPECT_EQ(reader.kinds(reader.tensor("lm_head.weight")), std::vector<std::string>{"weight"});
  }
}

TEST_F(HuggingFace, ExportAndImportAreEachOthersInverse) {
  const std::string path = test::save_gpt(folder_.path("run"), test::tiny_gpt(), {.world = 3});
  for (const std::string dtype : {"fp32", "bf16"}) {
    const std::string out = folder_.path(dtype), back = folder_.path(dtype + "-back");
    ASSERT_EQ(checkpoint_command({"export", path, "--to", out, "--dtype", dtype}).status, 0);
    ASSERT_EQ(checkpoint_command({"import", out, "--to", back}).status, 0);
    const std::string again = folder_.path(dtype + "-again");
    ASSERT_EQ(checkpoint_command({"export", back, "--to", again, "--dtype", dtype}).status, 0);
    EXPECT_EQ(test::read_file(out + "/model.safetensors"), test::read_file(again + "/model.safetensors"));
    EXPECT_EQ(test::read_file(out + "/config.json"), test::read_file(again + "/config.json"));
  }
  expect_weights(folder_.path("fp32-back/step-00000000"), sample_weight);
}

/// Divides a folder's only file into several, each with some tensors, and an index, like transformers.
void shard(const std::string& folder, int shards) {
  const std::string file = test::read_file(folder + "/model.safetensors");
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), 8);
  const ordered_json header = ordered_json::parse(file.substr(8, length));
  std::vector<ordered_json> headers(static_cast<std::size_t>(shards), ordered_json::object());
  std::vector<std::string> data(headers.size());
  ordered_json index{{"metadata", {{"total_size", file.size()}}}, {"weight_map", ordered_json::object()}};
  std::size_t number = 0;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    const std::size_t at = number++ % headers.size();
    const auto begin = entry["data_offsets"][0].get<std::size_t>(),
               end = entry["data_offsets"][1].get<std::size_t>();
    headers[at][name] = entry;
    headers[at][name]["data_offsets"] = {data[at].size(), data[at].size() + end - begin};
    data[at] += file.substr(8 + length + begin, end - begin);
    index["weight_map"][name] = "model-" + std::to_string(at) + ".safetensors";
  }
  for (std::size_t at = 0; at < headers.size(); ++at) {
    const std::string text = headers[at].dump();
    const std::uint64_t bytes = text.size();
    std::ofstream(folder + "/model-" + std::to_string(at) + ".safetensors", std::ios::binary)
        << std::string(reinterpret_cast<const char*>(&bytes), 8) << text << data[at];
  }
  std::ofstream(folder + "/model.safetensors.index.json") << index.dump();
  std::filesystem::remove(folder + "/model.safetensors");
}

TEST_F(HuggingFace, EveryArchitectureTrainsOnTextFromItsConfigAndComesBackFromShardsBitForBit) {
  const std::string sizes =
      R"("hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 32, "vocab_size": 256, "rms_norm_eps": 1e-6)";
  int number = 0;
  for (const std::string kind : {"gpt2", "llama", "mistral", "qwen2", "qwen3"}) {
    for (const bool tied : {true, false}) {
      const std::string name = kind + (tied ? "-tied" : "-untied");
      const std::string config =
          kind == "gpt2"
              ? R"({"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 256,
                              "n_positions": 32})"
              : "{\"model_type\": \"" + kind +
                    "\", \"tie_word_embeddings\": " + (tied ? "true, " : "false, ") +
                    (kind == "qwen3" ? "\"head_dim\": 8, " : "") + sizes + "}";
      if (kind == "gpt2" && !tied) continue;  // GPT-2 is always tied
      const std::string file = folder_.write(name + ".json", config);
      const ProgramResult trained = test::run(test::tiny_train(
          folder_, {"--model", file, "--steps", "2", "--checkpoint-dir", folder_.path(name + "-run")}));
      ASSERT_EQ(trained.status, 0) << name << trained.errors;
      for (const std::string dtype : {"fp32", "bf16"}) {
        const std::string out = folder_.path(name + dtype), back = folder_.path(name + dtype + "-back"),
                          again = folder_.path(name + dtype + "-again");
        ASSERT_EQ(
            checkpoint_command({"export", folder_.path(name + "-run"), "--to", out, "--dtype", dtype}).status,
            0);
        const std::string whole = test::read_file(out + "/model.safetensors");
        EXPECT_EQ(whole.find("lm_head.weight") != std::string::npos, !tied) << name;
        shard(out, 3);
        std::filesystem::copy_file(out + "/model-0.safetensors", out + "/model-old.safetensors");
        const ProgramResult imported = checkpoint_command({"import", out, "--to", back});
        ASSERT_EQ(imported.status, 0) << name << imported.errors;
        EXPECT_THAT(imported.out, HasSubstr("weights that were not read in " + out +
                                            ": model-old.safetensors (model.safetensors.index.json has"));
        ASSERT_EQ(checkpoint_command({"export", back, "--to", again, "--dtype", dtype}).status, 0);
        EXPECT_EQ(test::read_file(again + "/model.safetensors"), whole) << name << " " << dtype;
        EXPECT_EQ(test::read_file(again + "/config.json"), test::read_file(out + "/config.json"));
        // A folder without a tokenizer whose vocabulary has 256 tokens counts as one of bytes.
        const ProgramResult text = test::run({"generate", "--from", out, "--prompt", "the cat", "--tokens",
                                              "3", "--greedy", "--threads", "1"});
        EXPECT_EQ(text.status, 0) << name << text.errors;
        EXPECT_EQ(text.out, test::run({"generate", "--from", back, "--prompt", "the cat", "--tokens", "3",
                                       "--greedy", "--threads", "1"})
                                .out);
        ++number;
      }
    }
  }
  EXPECT_EQ(number, 18);
}

// A folder that transformers wrote is imported, trained on four ranks that have a part of each layer, and
// exported.
TEST_F(HuggingFace, ComesBackFromAMeshThatCutsLayersAsTheFileThatItWas) {
  for (const std::string kind : {"llama", "mistral", "qwen2", "qwen3"}) {
    const std::string golden = std::string(TRANCHE_GOLDEN) + "/" + kind, run = folder_.path(kind + "-run"),
                      cut = folder_.path(kind + "-cut"), out = folder_.path(kind + "-out"),
                      given = folder_.path(kind);
    std::filesystem::create_directory(given);  // without the golden vectors, which are not weights
    for (const char* file : {"config.json", "model.safetensors"}) {
      std::filesystem::copy_file(golden + "/" + file, given + "/" + file);
    }
    const ProgramResult imported = checkpoint_command({"import", given, "--to", run});
    ASSERT_EQ(imported.status, 0) << imported.errors;
    const models::Llama model(
        models::LlamaConfig::from_json(test::read_file(given + "/config.json"), kind + "/config.json"));
    Config config = models::plain_config(1);
    config.mesh = "tensor=4";
    config.stage = 1;
    models::on_ranks(4, model.spec(8), config, [&](Engine& engine) {
      const LoadResult loaded = engine.load(run, {.weights_only = true});
      (void)engine.save(cut, {.user = loaded.user, .wait = true});
    });
    const ProgramResult exported = checkpoint_command({"export", cut, "--to", out});
    ASSERT_EQ(exported.status, 0) << exported.errors;
    EXPECT_TRUE(test::read_file(out + "/model.safetensors") == test::read_file(given + "/model.safetensors"))
        << kind;
  }
}

TEST_F(HuggingFace, ImportNamesBothSidesOfWhatDoesNotFit) {
  const auto refused = [&](const HandMade& made) {
    const std::string source = write("hf", made.file());
    const ProgramResult result = checkpoint_command({"import", source, "--to", folder_.path("run")});
    EXPECT_EQ(result.status, 4) << result.errors;
    EXPECT_FALSE(std::filesystem::exists(folder_.path("run"))) << "nothing was made";
    EXPECT_THAT(result.errors, HasSubstr(source));
    return result.errors;
  };
  HandMade made = tiny_tensors("transformer.");
  made.tensors.erase(made.tensors.begin() + 3, made.tensors.begin() + 12);
  EXPECT_THAT(refused(made), AllOf(HasSubstr("does not hold the model of " + folder_.path("hf/config.json")),
                                   HasSubstr("the model has, but it does not: transformer.h.0."),
                                   HasSubstr("and 4 more"), Not(HasSubstr("the model does not:"))));
  made = tiny_tensors("");
  made.tensors.emplace_back("h.2.ln_1.weight", std::vector<std::int64_t>{15});
  EXPECT_THAT(refused(made), HasSubstr("it has, but the model does not: transformer.h.2.ln_1.weight"));
  made = tiny_tensors("");
  made.tensors[1].second = {25, 15};
  EXPECT_THAT(
      refused(made),
      HasSubstr("other shapes in it than in the model: transformer.wpe.weight is [25, 15] and not [24, 15]"));
  made = tiny_tensors("");
  made.first_dtype = "I32";
  EXPECT_THAT(refused(made), HasSubstr("tensor wte.weight is I32; F32, BF16 and F16 are read"));
  made = tiny_tensors("");
  made.tensors.emplace_back("transformer.wpe.weight", std::vector<std::int64_t>{24, 15});
  EXPECT_THAT(refused(made),
              HasSubstr("wpe.weight and transformer.wpe.weight are the same tensor of the model"));
  made = tiny_tensors("");
  made.tensors.emplace_back("lm_head.weight", std::vector<std::int64_t>{255, 15});
  EXPECT_THAT(refused(made),
              HasSubstr("lm_head.weight is not equal to wte.weight: they are separate tensors"));
  made = tiny_tensors("");
  made.tensors.emplace_back("wpe.bias", std::vector<std::int64_t>{2, 1, 1, 1, 1, 1, 1});
  EXPECT_THAT(refused(made), HasSubstr("tensor wpe.bias"));
}

TEST_F(HuggingFace, AnotherPrefixOfTheNamesHasARenameForAdvice) {
  const std::string config = folder_.write(
      "llama.json",
      R"({"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
          "num_attention_heads": 4, "max_position_embeddings": 32, "vocab_size": 256, "rms_norm_eps": 1e-6})");
  ASSERT_EQ(test::run(test::tiny_train(folder_, {"--model", config, "--steps", "1", "--checkpoint-dir",
                                                 folder_.path("made")}))
                .status,
            0);
  ASSERT_EQ(checkpoint_command({"export", folder_.path("made"), "--to", folder_.path("good")}).status, 0);
  const std::string whole = test::read_file(folder_.path("good/model.safetensors"));
  const auto with_names = [&](const std::function<std::string(const std::string&)>& rename) {
    std::uint64_t length = 0;
    std::memcpy(&length, whole.data(), 8);
    ordered_json header = ordered_json::object();
    const ordered_json old = ordered_json::parse(whole.substr(8, length));
    for (const auto& [name, entry] : old.items())
      header[name == "__metadata__" ? name : rename(name)] = entry;
    const std::string text = header.dump();
    const std::uint64_t bytes = text.size();
    std::filesystem::create_directories(folder_.path("hf"));
    std::filesystem::copy_file(folder_.path("good/config.json"), folder_.path("hf/config.json"),
                               std::filesystem::copy_options::overwrite_existing);
    folder_.write("hf/model.safetensors",
                  std::string(reinterpret_cast<const char*>(&bytes), 8) + text + whole.substr(8 + length));
  };
  const auto import = [&](std::vector<std::string> more) {
    std::filesystem::remove_all(folder_.path("run"));
    more.insert(more.begin(), {"import", folder_.path("hf"), "--to", folder_.path("run")});
    return checkpoint_command(more);
  };
  const std::string there = "; all tensors of the model are there under another name prefix: add";
  const auto advises = [&](const std::vector<std::string>& rules) {
    std::string advice = there;
    std::vector<std::string> flags;
    for (const std::string& rule : rules) {
      advice += " --rename '" + rule + "'";
      flags.insert(flags.end(), {"--rename", rule});
    }
    const ProgramResult refused = import({});
    EXPECT_EQ(refused.status, 4);
    EXPECT_THAT(refused.errors, AllOf(HasSubstr(advice), Not(HasSubstr("--partial"))));
    const ProgramResult taken = import(flags);
    EXPECT_EQ(taken.status, 0) << taken.errors;
    ASSERT_EQ(checkpoint_command({"export", folder_.path("run"), "--to", folder_.path("back")}).status, 0);
    EXPECT_EQ(test::read_file(folder_.path("back/model.safetensors")), whole);
    std::filesystem::remove_all(folder_.path("back"));
  };
  const auto without = [](const std::string& name) {
    return name.starts_with("model.") ? name.substr(6) : name;
  };
  with_names(without);  // LlamaModel and a head beside it
  advises({"lm_head.weight=lm_head.weight", "*=model.*"});
  EXPECT_THAT(import({"--partial"}).out,
              HasSubstr("all tensors of the model are there under another name prefix: add --rename "
                        "'lm_head.weight=lm_head.weight' --rename '*=model.*'\n"));
  with_names([](const std::string& name) { return "module." + name; });
  advises({"module.*=*"});
  EXPECT_THAT(import({"--partial"}).errors, HasSubstr(there + " --rename 'module.*=*'"));
  with_names([](const std::string& name) { return "module._orig_mod." + name; });
  advises({"module._orig_mod.*=*"});
  with_names([&](const std::string& name) { return "transformer." + without(name); });
  EXPECT_THAT(import({}).errors, HasSubstr("--partial takes the tensors that both have")) << "no one prefix";
  EXPECT_THAT(import({"--rename", "transformer.lm_head.*=lm_head.*"}).errors,
              HasSubstr(there + " --rename 'transformer.*=model.*'"));
  // Some tensors have names that the model does not know.
  with_names([](const std::string& name) {
    return name.find("layers.1.") == std::string::npos ? "module." + name : "module." + name + "*";
  });
  EXPECT_THAT(import({}).errors, HasSubstr("--partial takes the tensors that both have"));
}

TEST_F(HuggingFace, APartialImportTakesWhatBothHaveAndListsTheRest) {
  HandMade made = tiny_tensors("");
  std::erase_if(made.tensors, [](const auto& tensor) {
    return tensor.first.starts_with("h.1.") || tensor.first == "ln_f.bias";
  });
  for (auto& tensor : made.tensors) {
    if (tensor.first == "ln_f.weight") tensor.first = "final_norm.weight";
  }
  made.tensors.emplace_back("score.weight", std::vector<std::int64_t>{2, 15});
  const std::string source = write("hf", made.file());
  const std::vector<std::string> line{"import",
                                      source,
                                      "--to",
                                      folder_.path("run"),
                                      "--partial",
                                      "--rename",
                                      "final_norm.*=transformer.ln_f.*"};
  ProgramResult result = checkpoint_command(line);
  ASSERT_EQ(result.status, 0) << result.errors;
  EXPECT_THAT(
      result.out,
      AllOf(
          HasSubstr("tensor final_norm.weight of " + source + ": renamed transformer.ln_f.weight\n"),
          HasSubstr("tensor transformer.h.1.ln_1.weight is not in " + source + "\n"),
          HasSubstr("tensor transformer.ln_f.bias is not in " + source + "\n"),
          HasSubstr("tensor score.weight of " + source + ": passed over, the model has none of this name\n"),
          HasSubstr("6211 parameters of the model's 8222"),
          HasSubstr("--resume-weights-only " + folder_.path("run") + " --partial\n")));
  const std::string path = folder_.path("run/step-00000000");
  expect_weights(path, [](const std::string& name, std::int64_t element) {
    return sample_weight(name == "transformer.ln_f.weight" ? "transformer.final_norm.weight" : name, element);
  });
  const checkpoint::LocalStorage local;
  EXPECT_EQ(checkpoint::Reader(local, path).tensors().size(), 15u);
  EXPECT_EQ(checkpoint_command({"verify", path}).status, 0);
  // Missing values are not replaced: neither a text nor a folder is made of them.
  result = checkpoint_command({"export", path, "--to", folder_.path("out")});
  EXPECT_EQ(result.status, 4);
  EXPECT_THAT(result.errors, HasSubstr("the model has, but it does not: transformer.ln_f.bias"));
}

TEST_F(HuggingFace, APartialImportRefusesShapesAndWhatHoldsNothingOfTheModel) {
  const auto refused = [&](const HandMade& made, const std::vector<std::string>& more, int status = 4) {
    std::vector<std::string> line{"import", write("hf", made.file()), "--to", folder_.path("run")};
    line.insert(line.end(), more.begin(), more.end());
    const ProgramResult result = checkpoint_command(line);
    EXPECT_EQ(result.status, status) << result.errors;
    EXPECT_FALSE(std::filesystem::exists(folder_.path("run"))) << "nothing was made";
    return result.errors;
  };
  HandMade made = tiny_tensors("");
  made.tensors[1].second = {25, 15};
  EXPECT_THAT(
      refused(made, {"--partial"}),
      AllOf(
          HasSubstr("transformer.wpe.weight is [25, 15] and not [24, 15]"),
          HasSubstr(
              "to leave out a tensor of another shape, give it an unused name: --rename NAME=unused.NAME")));
  EXPECT_THAT(refused(made, {}),
              HasSubstr("tranche checkpoint import --partial takes the tensors that both have"));
  HandMade other;
  other.tensors = {{"a", {2}}, {"b", {3}}};
  EXPECT_THAT(refused(other, {"--partial"}), HasSubstr("holds no tensor of the model of"));
  EXPECT_THAT(refused(made, {"--partial", "--rename", "wpe.wieght=unused"}),
              HasSubstr("rename wpe.wieght=unused: " + folder_.path("hf") + " has no tensor of this name"));
  EXPECT_THAT(refused(made, {"--partial", "--rename", "wpe.weight=wte.weight"}),
              HasSubstr("wte.weight and wpe.weight are the same tensor of the model"));
  EXPECT_THAT(refused(made, {"--rename", "wpe.weight"}, 2),
              HasSubstr("--rename 'wpe.weight' is not OLD=NEW, the names of a tensor"));
  EXPECT_THAT(refused(made, {"--rename", "a*b*=c"}, 2),
              HasSubstr("--rename a*b*=c: a name has at most one *"));
  // Follows the advice in the text.
  EXPECT_EQ(checkpoint_command({"import", folder_.path("hf"), "--to", folder_.path("run"), "--partial",
                                "--rename", "wpe.weight=unused.wpe.weight"})
                .status,
            0);
}

TEST_F(HuggingFace, AHeadThatDiffersInOneBitIsRefused) {
  HandMade made = tiny_tensors("");
  made.tensors.emplace_back("lm_head.weight", std::vector<std::int64_t>{256, 15});
  std::string file = made.file();
  file.back() = static_cast<char>(file.back() ^ 1);
  const ProgramResult result = checkpoint_command({"import", write("hf", file), "--to", folder_.path("run")});
  EXPECT_EQ(result.status, 4);
  EXPECT_THAT(result.errors, HasSubstr("they are separate tensors, but the model ties them into one"));
}

TEST_F(HuggingFace, FoldersThatAreNone) {
  const auto refused = [&](const std::string& path, int status) {
    const ProgramResult result = checkpoint_command({"import", path, "--to", folder_.path("run")});
    EXPECT_EQ(result.status, status) << result.errors;
    return result.errors;
  };
  EXPECT_THAT(refused(folder_.path("none"), 4), HasSubstr("there is nothing of this name"));
  std::filesystem::create_directory(folder_.path("empty"));
  EXPECT_THAT(refused(folder_.path("empty"), 4), HasSubstr("neither model.safetensors nor"));
  const std::string source = write("hf", tiny_tensors("").file());
  std::filesystem::remove(source + "/config.json");
  EXPECT_THAT(refused(source, 2), HasSubstr("there is no config.json in " + source));
  folder_.write("hf/config.json", R"({"model_type": "bert"})");
  EXPECT_THAT(refused(source, 2), AllOf(HasSubstr("hf/config.json: model_type is"), HasSubstr("bert")));
  // The path of a file in the folder is refused like the folder.
  EXPECT_THAT(refused(source + "/model.safetensors", 2), HasSubstr("hf/config.json: model_type is"));
  // With --model the folder's own configuration does not matter.
  const std::string config = folder_.write("config.json", test::tiny_gpt().to_json());
  EXPECT_EQ(checkpoint_command({"import", source, "--to", folder_.path("run"), "--model", config}).status, 0);
}

TEST_F(HuggingFace, NothingIsWrittenOver) {
  const std::string path = test::save_gpt(folder_.path("run"), test::tiny_gpt(), {});
  const std::string source = write("hf", tiny_tensors("").file());
  ProgramResult result = checkpoint_command({"import", source, "--to", folder_.path("run")});
  EXPECT_EQ(result.status, 4);
  EXPECT_THAT(result.errors,
              AllOf(HasSubstr("it holds checkpoints already"), HasSubstr("name another folder")));
  result = checkpoint_command({"export", path, "--to", source});
  EXPECT_EQ(result.status, 4);
  EXPECT_THAT(result.errors, HasSubstr("it holds model.safetensors already: name an empty folder"));
  result = checkpoint_command({"export", path, "--to", folder_.write("file", "")});
  EXPECT_EQ(result.status, 4);
  EXPECT_THAT(result.errors, HasSubstr("cannot export " + path));
}

TEST_F(HuggingFace, ExportNeedsToKnowTheModel) {
  const std::string path = test::save_gpt(folder_.path("run"), test::tiny_gpt(), {.user = R"({"mine": 1})"});
  ProgramResult result = checkpoint_command({"export", path, "--to", folder_.path("out")});
  EXPECT_EQ(result.status, 4);
  EXPECT_THAT(result.errors,
              AllOf(HasSubstr("does not say which model it holds"), HasSubstr("give --model")));
  result = checkpoint_command({"export", path, "--to", folder_.path("out"), "--model", "gpt-nano"});
  EXPECT_EQ(result.status, 4);
  EXPECT_THAT(result.errors, AllOf(HasSubstr(path + " does not hold the model of --model gpt-nano"),
                                   HasSubstr("transformer.wte.weight is [256, 15] and not [256, 32]")));
  const std::string config = folder_.write("config.json", test::tiny_gpt().to_json());
  EXPECT_EQ(checkpoint_command({"export", path, "--to", folder_.path("out"), "--model", config}).status, 0);
  EXPECT_THAT(checkpoint_command({"export", path, "--to", folder_.path("o"), "--dtype", "fp16"}).errors,
              HasSubstr("--dtype fp16 is not one of fp32, bf16"));
  result = checkpoint_command(
      {"export", path, "--to", folder_.path("b"), "--model", config, "--dtype", "bfloat16"});
  EXPECT_EQ(result.status, 0) << result.errors;
  EXPECT_THAT(result.out, HasSubstr(" in bf16 ("));
}

TEST_F(HuggingFace, ADamagedCheckpointIsNotExported) {
  const std::string path = test::save_gpt(folder_.path("run"), test::tiny_gpt(), {});
  const auto manifest = checkpoint::open_manifest(detail::posix_file_system(), path);
  const int weights = manifest.layout.find_section("weight", false);
  test::flip(path + "/shard-00000-of-00001.h5",
             manifest.shards[0].offsets[static_cast<std::size_t>(weights)] + 40);
  const ProgramResult result = checkpoint_command({"export", path, "--to", folder_.path("out")});
  EXPECT_EQ(result.status, 4);
  EXPECT_THAT(result.errors, AllOf(HasSubstr("is damaged in bytes"),
                                   HasSubstr("of weight of tensor transformer.wte.weight")));
  EXPECT_FALSE(std::filesystem::exists(folder_.path("out/model.safetensors")));
}

}  // namespace
}  // namespace tranche::tools
