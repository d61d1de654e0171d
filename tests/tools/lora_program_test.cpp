// Adapters through the program: checkpoints without the base, resuming, evaluating, generating, exports
// merged and in PEFT's format, and refusals.

#include <gmock/gmock.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>

#include "checkpoint/folder.h"
#include "checkpoint/reader.h"
#include "checkpoint/safetensors.h"
#include "tests/tools/program_fixture.h"
#include "tools/checkpoint/peft.h"
#include "tools/checkpoint/peft_layers.h"
#include "tranche/core/error.h"

namespace tranche::tools {
namespace {

using nlohmann::json;
using test::checkpoint_command;
using test::ProgramResult;
using test::read_file;
using test::tiny_train;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

class LoraProgram : public testing::Test {
 protected:
  void SetUp() override {
    ok(train({"--steps", "2", "--dtype", "fp32", "--checkpoint-dir", folder("base")}));
  }
  std::string folder(const std::string& name) const { return files_.path(name); }
  static std::string ok(const ProgramResult& result) {
    EXPECT_EQ(result.status, 0) << result.errors << result.out;
    return result.out;
  }
  static void refused(const ProgramResult& result, int status, const std::string& text) {
    EXPECT_EQ(result.status, status) << result.errors;
    EXPECT_THAT(result.errors, HasSubstr(text));
  }
  ProgramResult train(std::vector<std::string> more) const { return test::run(tiny_train(files_, more)); }
  /// A run with adapters; the base is a separate checkpoint.
  ProgramResult train_adapters(const std::string& to, std::vector<std::string> more = {}) const {
    const std::vector<std::string> own{"--dtype",
                                       "fp32",
                                       "--lr",
                                       "0.05",
                                       "--checkpoint-dir",
                                       folder(to),
                                       "--resume-weights-only",
                                       folder("base"),
                                       "--set",
                                       "tranche.lora.rank=3",
                                       "--set",
                                       "tranche.lora.alpha=5",
                                       "--set",
                                       R"(tranche.lora.targets=["c_attn", "c_fc", "lm_head"])"};
    more.insert(more.begin(), own.begin(), own.end());
    return train(more);
  }
  json evaluate(const std::string& from, const std::vector<std::string>& more = {}) const {
    std::vector<std::string> arguments = tiny_train(files_, more);
    arguments[0] = "evaluate";
    const auto steps = std::find(arguments.begin(), arguments.end(), "--steps");
    arguments.erase(steps, steps + 2);
    arguments.insert(arguments.end(),
                     {"--from", folder(from), "--dtype", "fp32", "--report", files_.path("evaluation.json")});
    ok(test::run(arguments));
    return json::parse(read_file(files_.path("evaluation.json")));
  }
  std::string generate(const std::string& from, const std::vector<std::string>& more = {}) const {
    std::vector<std::string> arguments{"generate", "--from", folder(from), "--prompt",  "the cat ",
                                       "--tokens", "12",     "--greedy",   "--threads", "1"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return ok(test::run(arguments));
  }
  static std::uintmax_t bytes_of(const std::string& path) {
    std::uintmax_t bytes = 0;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
      if (entry.is_regular_file()) bytes += entry.file_size();
    }
    return bytes;
  }
  /// A PEFT folder whose adapter_config.json is changed by `change`.
  std::string peft_folder(const std::string& name, const std::function<void(json&)>& change) const {
    if (!std::filesystem::exists(folder("peft"))) {
      ok(train_adapters("for-peft"));
      ok(checkpoint_command({"export", folder("for-peft"), "--to", folder("peft"), "--peft"}));
    }
    std::filesystem::copy(folder("peft"), folder(name), std::filesystem::copy_options::recursive);
    json config = json::parse(read_file(folder(name) + "/adapter_config.json"));
    change(config);
    files_.write(name + "/adapter_config.json", config.dump());
    return folder(name);
  }
  /// Adds a tensor to the adapters of a PEFT folder.
  void add_tensor(const std::string& name, const std::string& tensor, const char* dtype,
                  const std::string& bytes, const json& shape) const {
    const std::string file = name + "/adapter_model.safetensors", whole = read_file(folder(file));
    std::uint64_t length = 0;
    std::memcpy(&length, whole.data(), sizeof length);
    json header = json::parse(whole.substr(sizeof length, length));
    const std::size_t begin = whole.size() - sizeof length - length;
    header[tensor] = {{"dtype", dtype}, {"shape", shape}, {"data_offsets", {begin, begin + bytes.size()}}};
    const std::string text = header.dump();
    length = text.size();
    files_.write(file, std::string(reinterpret_cast<const char*>(&length), sizeof length) + text +
                           whole.substr(whole.size() - begin) + bytes);
  }
  test::TemporaryFolder files_;
};

TEST_F(LoraProgram, SaysWhatIsTrainedAndSavesAdaptersAlone) {
  const std::string out = ok(train_adapters("run"));
  EXPECT_THAT(out, HasSubstr("rank 3, alpha 5 on c_attn, c_fc, lm_head (5 layers): "));
  EXPECT_THAT(out, HasSubstr("weights from"));
  const checkpoint::LocalStorage local;
  const checkpoint::Reader reader(local, folder("run") + "/step-00000003");
  for (const checkpoint::StoredTensor& tensor : reader.tensors())
    EXPECT_THAT(tensor.name, HasSubstr(".lora_")) << "nothing of the base";
  ASSERT_TRUE(reader.manifest().base);
  EXPECT_EQ(reader.manifest().base->folder, folder("base") + "/step-00000002");
  EXPECT_EQ(reader.manifest().base->dtype, "fp32");
  EXPECT_EQ(reader.manifest().base->digest.size(), 32u);
  ok(train_adapters("whole", {"--set", "tranche.lora.save_base=true"}));
  EXPECT_LT(bytes_of(folder("run")), bytes_of(folder("whole")));
  EXPECT_EQ(evaluate("whole")["validation_loss"], evaluate("run")["validation_loss"]);
  EXPECT_THAT(ok(checkpoint_command({"show", folder("run")})), HasSubstr("base"));
  EXPECT_EQ(checkpoint_command({"verify", folder("run")}).status, 0);
}

TEST_F(LoraProgram, AResumedRunHasTheBitsOfOneThatNeverStopped) {
  ok(train_adapters(
      "whole", {"--steps", "5", "--report", files_.path("whole.json"), "--set", "tranche.lora.dropout=0.2"}));
  ok(train_adapters("run", {"--steps", "3", "--set", "tranche.lora.dropout=0.2"}));
  // Without tranche.lora the checkpoint's setting applies.
  const std::string out =
      ok(train({"--dtype", "fp32", "--lr", "0.05", "--steps", "5", "--checkpoint-dir", folder("run"),
                "--resume", "latest", "--report", files_.path("rest.json")}));
  EXPECT_THAT(
      out, AllOf(HasSubstr("rank 3, alpha 5, dropout 0.2"), HasSubstr("resumed"), Not(HasSubstr("changed"))));
  const json whole = json::parse(read_file(files_.path("whole.json"))),
             rest = json::parse(read_file(files_.path("rest.json")));
  EXPECT_EQ(rest["weights_digest"], whole["weights_digest"]);
  EXPECT_EQ(rest["state_digest"], whole["state_digest"]);
}

TEST_F(LoraProgram, MergedAndUnmergedSayTheSame) {
  ok(train_adapters("run", {"--steps", "8"}));
  const double with = evaluate("run")["validation_loss"], without = evaluate("base")["validation_loss"];
  EXPECT_GT(std::abs(with - without), 1e-3) << "the adapters have an effect";
  ok(checkpoint_command({"export", folder("run"), "--to", folder("merged")}));
  const json config = json::parse(read_file(folder("merged") + "/config.json"));
  EXPECT_EQ(config["tie_word_embeddings"], false) << "the head has an adapter, the embedding has none";
  // Without an adapter of the head the export can be imported here again and evaluated.
  ok(train({"--dtype", "fp32", "--lr", "0.05", "--steps", "8", "--checkpoint-dir", folder("blocks"),
            "--resume-weights-only", folder("base"), "--set", "tranche.lora.rank=4"}));
  ok(checkpoint_command({"export", folder("blocks"), "--to", folder("merged-blocks")}));
  ok(checkpoint_command({"import", folder("merged-blocks"), "--to", folder("merged-run")}));
  const double merged = evaluate("merged-run")["validation_loss"],
               apart = evaluate("blocks")["validation_loss"];
  EXPECT_NEAR(merged, apart, 1e-5);
  EXPECT_EQ(generate("merged-run"), generate("blocks"));
  EXPECT_GT(std::abs(apart - evaluate("base")["validation_loss"].get<double>()), 1e-3);
}

TEST_F(LoraProgram, PeftsFormatGoesOutAndComesBack) {
  ok(train_adapters("run"));
  const std::string out = ok(checkpoint_command({"export", folder("run"), "--to", folder("peft"), "--peft"}));
  EXPECT_THAT(out, HasSubstr("adapters in PEFT's format"));
  const json config = json::parse(read_file(folder("peft") + "/adapter_config.json"));
  EXPECT_EQ(config["peft_type"], "LORA");
  EXPECT_EQ(config["r"], 3);
  EXPECT_EQ(config["lora_alpha"], 5);
  EXPECT_EQ(config["fan_in_fan_out"], true) << "GPT-2's layers";
  EXPECT_EQ(config["target_modules"], (json{"c_attn", "c_fc", "lm_head"}));
  const checkpoint::SafetensorsFolder file(detail::posix_file_system(),
                                           folder("peft") + "/adapter_model.safetensors");
  const checkpoint::SafeTensor* tensor =
      file.find("base_model.model.transformer.h.0.attn.c_attn.lora_A.weight");
  ASSERT_NE(tensor, nullptr);
  EXPECT_EQ(tensor->shape.at(0), 3);
  const std::string imported =
      ok(checkpoint_command({"import", folder("peft"), "--base", folder("base"), "--to", folder("back")}));
  EXPECT_THAT(imported, HasSubstr("adapters of rank 3, alpha 5 on c_attn, c_fc, lm_head"));
  EXPECT_EQ(evaluate("back")["validation_loss"], evaluate("run")["validation_loss"]);
  EXPECT_EQ(generate("back"), generate("run"));
  // Training continues from them.
  EXPECT_THAT(ok(train({"--dtype", "fp32", "--resume-weights-only", folder("back")})),
              HasSubstr("rank 3, alpha 5"));
}

TEST_F(LoraProgram, AnotherBaseIsRefusedAndAMovedOneIsFound) {
  ok(train_adapters("run"));
  ok(train({"--steps", "1", "--dtype", "fp32", "--seed", "7", "--checkpoint-dir", folder("other")}));
  std::filesystem::rename(folder("base"), folder("moved"));
  const auto resume = [&](std::vector<std::string> more) {
    more.insert(more.end(), {"--dtype", "fp32", "--lr", "0.05", "--steps", "4", "--checkpoint-dir",
                             folder("run"), "--resume", "latest"});
    return train(more);
  };
  refused(resume({}), 4, "the base of the adapters in");
  refused(resume({}), 4, "where it lies elsewhere now, give --base");
  refused(resume({"--base", folder("other")}), 4, "holds adapters that were trained beside another base");
  refused(test::run({"generate", "--from", folder("run"), "--prompt", "a", "--base", folder("other")}), 4,
          "trained beside another base");
  refused(checkpoint_command({"export", folder("run"), "--to", folder("x")}), 4,
          "where it lies elsewhere now, give --base");
  EXPECT_FALSE(generate("run", {"--base", folder("moved")}).empty());
  ok(checkpoint_command({"export", folder("run"), "--to", folder("y"), "--base", folder("moved")}));
  ok(resume({"--base", folder("moved")}));
}

TEST_F(LoraProgram, OtherAdaptersAreRefused) {
  ok(train_adapters("run"));
  refused(train({"--dtype", "fp32", "--checkpoint-dir", folder("run"), "--resume", "latest", "--set",
                 "tranche.lora.rank=4"}),
          2, "holds adapters of rank 3, alpha 5 on c_attn, c_fc, lm_head, tranche.lora asks for rank 4");
  refused(train({"--dtype", "fp32", "--checkpoint-dir", folder("base"), "--resume", "latest", "--set",
                 "tranche.lora.rank=4"}),
          4, "holds no adapters: take its weights as their base (--resume-weights-only)");
  refused(train({"--set", "tranche.lora.rank=4", "--set", "tranche.lora.load_in_4bit=true"}), 2,
          "QLoRA (a base in 4 bits) is not part of this version");
  refused(train({"--set", "tranche.lora.rank=4", "--set", "tranche.lora.targets=[\"q_proj\"]"}), 2,
          "tranche.lora.targets: 'q_proj' matches no linear layer");
  refused(checkpoint_command({"export", folder("base"), "--to", folder("x"), "--peft"}), 2,
          "--peft is for checkpoints with adapters, and");
}

TEST_F(LoraProgram, ADrawnBaseIsNotSavedUnlessAsked) {
  const std::vector<std::string> lora{"--dtype", "fp32", "--set", "tranche.lora.rank=2"};
  const auto drawn = [&](std::vector<std::string> more) {
    more.insert(more.end(), lora.begin(), lora.end());
    return train(more);
  };
  ok(drawn({"--checkpoint-dir", folder("drawn")}));
  ok(drawn({"--checkpoint-dir", folder("drawn"), "--resume", "latest", "--steps", "4"}));  // the same seed
  // With another seed the base is still that of the checkpoint, also in later checkpoints.
  for (const char* steps : {"5", "6"}) {
    ok(drawn({"--checkpoint-dir", folder("drawn"), "--resume", "latest", "--steps", steps, "--seed", "9"}));
  }
  ok(drawn({"--checkpoint-dir", folder("whole"), "--seed", "5", "--set", "tranche.lora.save_base=true"}));
  ok(drawn({"--checkpoint-dir", folder("alone"), "--seed", "5"}));
  EXPECT_EQ(generate("alone"), generate("whole"));
  EXPECT_EQ(evaluate("alone")["validation_loss"], evaluate("whole")["validation_loss"]);
  ok(checkpoint_command({"export", folder("alone"), "--to", folder("x1")}));
  ok(checkpoint_command({"export", folder("whole"), "--to", folder("x2")}));
  EXPECT_EQ(read_file(folder("x1") + "/model.safetensors"), read_file(folder("x2") + "/model.safetensors"));
  // Drawn and rounded to bf16, but read in fp32.
  ok(train({"--dtype", "bf16", "--set", "tranche.lora.rank=2", "--checkpoint-dir", folder("bf16"), "--seed",
            "5"}));
  EXPECT_FALSE(generate("bf16").empty());
  ok(checkpoint_command({"export", folder("bf16"), "--to", folder("x3")}));
  // A checkpoint of the base is not the same as the drawn base.
  refused(test::run({"generate", "--from", folder("bf16"), "--prompt", "a", "--base", folder("base")}), 4,
          "trained beside another base");
}

TEST_F(LoraProgram, ADrawnBaseWithoutItsSeedIsRefused) {
  ok(train({"--dtype", "bf16", "--set", "tranche.lora.rank=2", "--checkpoint-dir", folder("bf16")}));
  const std::string path = folder("bf16") + "/step-00000003";
  checkpoint::Manifest manifest = checkpoint::open_manifest(detail::posix_file_system(), path);
  manifest.base->seed.reset();
  manifest.run.random = "{}";
  files_.write("bf16/step-00000003/manifest.json", checkpoint::to_text(manifest));
  refused(test::run({"generate", "--from", folder("bf16"), "--prompt", "a"}), 4,
          path + ": its adapters belong to a base that was drawn, and it does not say from which seed");
}

TEST_F(LoraProgram, EveryReaderComparesTheBaseInTheDtypeThatItWasHeldIn) {
  for (const std::string dtype : {"bf16", "fp16"}) {
    const std::string run = folder(dtype);
    ok(train({"--dtype", dtype, "--checkpoint-dir", run, "--resume-weights-only", folder("base"), "--set",
              "tranche.lora.rank=2"}));
    if (dtype == "bf16")
      ok(train({"--steps", "2", "--dtype", "fp32", "--seed", "7", "--checkpoint-dir", folder("other")}));
    const std::string another = "adapters that were trained beside another base: its digest";
    const auto base = [&](const std::string& name) {
      return std::vector<std::string>{"--base", folder(name)};
    };
    const auto with = [](std::vector<std::string> arguments, const std::vector<std::string>& more) {
      arguments.insert(arguments.end(), more.begin(), more.end());
      return test::run(arguments);
    };
    const std::vector<std::vector<std::string>> readers{
        {"checkpoint", "export", run, "--to", run + "-x"},
        {"checkpoint", "export", run, "--to", run + "-p", "--peft"},
        {"generate", "--from", run, "--prompt", "a", "--tokens", "2", "--threads", "1"},
        {"generate", "--from", run, "--prompt", "a", "--tokens", "2", "--threads", "1", "--dtype", "bf16"},
    };
    for (const std::vector<std::string>& reader : readers) {
      const ProgramResult refusal = with(reader, base("other"));
      EXPECT_EQ(refusal.status, 4) << reader[0] << refusal.errors;
      EXPECT_THAT(refusal.errors, HasSubstr(another));
      const ProgramResult taken = with(reader, base("base"));
      EXPECT_EQ(taken.status, 0) << taken.errors;
      EXPECT_THAT(taken.out + taken.errors, Not(HasSubstr("compared")));
    }
    // In fp32, which was not the dtype of the base.
    refused(train({"--dtype", "fp32", "--resume-weights-only", run, "--base", folder("other")}), 4, another);
    ok(train({"--dtype", "fp32", "--resume-weights-only", run, "--base", folder("base")}));
  }
  // PEFT adapters record their base as well.
  const auto same = [](json&) {};
  ok(checkpoint_command(
      {"import", peft_folder("p", same), "--base", folder("base"), "--to", folder("back")}));
  refused(checkpoint_command({"export", folder("back"), "--to", folder("x"), "--base", folder("other")}), 4,
          "trained beside another base");
  std::filesystem::rename(folder("base"), folder("gone"));
  EXPECT_THAT(ok(checkpoint_command({"export", folder("back"), "--to", folder("y"), "--peft"})),
              HasSubstr("note: the base of the adapters is not in " + folder("base")));
}

TEST_F(LoraProgram, AnAdapterFolderHasTheLayersThatItNames) {
  const auto import = [&](const std::string& name, const std::function<void(json&)>& change) {
    return checkpoint_command(
        {"import", peft_folder(name, change), "--base", folder("base"), "--to", folder(name + "-run")});
  };
  const auto set = [](std::vector<std::pair<std::string, json>> pairs) {
    return [pairs](json& config) {
      for (const auto& [key, value] : pairs) config[key] = value;
    };
  };
  const json all{"c_attn", "c_fc", "lm_head"}, more{"c_attn", "c_fc", "lm_head", "attn.c_proj"};
  refused(import("a", set({{"target_modules", more}})), 4,
          "lacks adapters of layers that its adapter_config.json names: transformer.h.0.attn.c_proj, "
          "transformer.h.1.attn.c_proj");
  refused(import("b", set({{"target_modules", json{"c_attn", "c_fc", "lm_head", "wte"}}})), 4,
          "lacks adapters of layers that its adapter_config.json names: transformer.wte");
  refused(import("c", set({{"target_modules", json{"c_attn", "lm_head"}}})), 4,
          "holds adapters of layers that its adapter_config.json does not name: transformer.h.0.mlp.c_fc");
  refused(import("d", set({{"target_modules", ".*(c_attn|c_fc|c_proj|lm_head)"}})), 4,
          "lacks adapters of layers");
  refused(import("e", set({{"target_modules", all}, {"exclude_modules", json{"lm_head"}}})), 4,
          "does not name: lm_head");
  refused(import("f", set({{"target_modules", all}, {"layers_to_transform", 0}})), 4,
          "does not name: lm_head, transformer.h.1.attn.c_attn");
  refused(import("g", set({{"target_modules", "all-linear"}})), 4, "lacks adapters of layers");
  ok(import("h", set({{"target_modules", more}, {"exclude_modules", ".*attn\\.c_proj"}})));
  ok(import("i", set({{"target_modules", nullptr}})));
  ok(import("l", set({{"target_modules", "^(transformer\\.h\\.\\d+\\.(attn\\.c_attn|mlp\\.c_fc)|lm_head)$"},
                      {"exclude_modules", "^.*c_proj"}})));
  EXPECT_THAT(ok(import("j", set({{"target_modules", "\\w+"}}))),
              HasSubstr("were not compared with the adapters"));
  // The tensors of a layer are missing.
  const std::string lacking = peft_folder("k", [](json&) {}), file = lacking + "/adapter_model.safetensors";
  std::string text = read_file(file);
  const std::string name = "transformer.h.0.attn.c_attn.lora_A.weight";
  for (std::size_t at = text.find(name); at != std::string::npos; at = text.find(name, at + 1))
    text.replace(at, name.size(), "transformer.h.0.attn.c_xttn.lora_A.weight");
  files_.write("k/adapter_model.safetensors", text);
  EXPECT_EQ(checkpoint_command({"import", lacking, "--base", folder("base"), "--to", folder("k-run")}).status,
            4);
}

TEST_F(LoraProgram, APeftFolderMayHoldWeightsOfTheBaseThatWereNotTrained) {
  const std::string embedding = "transformer.wte.weight";
  const checkpoint::LocalStorage local;
  checkpoint::Reader base(local, folder("base") + "/step-00000002");
  const std::int64_t elements = base.find(embedding)->shape.elements(),
                     width = base.find(embedding)->shape[1];
  std::vector<float> values(static_cast<std::size_t>(elements));
  base.read_tensor(embedding, "weight", {0, elements}, DataType::float32, values.data());
  const auto bytes = [&] {
    return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
  };
  const auto import = [&](const std::string& name, const std::string& tensor, const char* dtype = "F32",
                          std::int64_t left_out = 0) {
    (void)peft_folder(name, [](json&) {});
    const json shape{elements / width - left_out, width};
    add_tensor(name, tensor, dtype,
               bytes().substr(static_cast<std::size_t>(left_out * width) * sizeof(float)), shape);
    return checkpoint_command(
        {"import", folder(name), "--base", folder("base"), "--to", folder(name + "-run")});
  };
  const std::string prefix = "base_model.model.", saved = prefix + "transformer.wte.base_layer.weight";
  ok(import("a", prefix + embedding));
  ok(import("b", saved));
  refused(import("c", embedding), 4,
          "tensor " + embedding + " is not a PEFT tensor: its name does not begin with " + prefix);
  refused(import("d", prefix + "transformer.other.weight"), 4,
          "tensor " + prefix +
              "transformer.other.weight is no adapter of a linear layer, and no weight of the base");
  refused(
      import("e", prefix + "transformer.h.0.attn.c_proj.lora_A.weight", "I32"), 4,
      "tensor " + prefix + "transformer.h.0.attn.c_proj.lora_A.weight is I32; F32, BF16 and F16 are read");
  const std::string trained = saved + " is not equal to " + embedding + " of the base " + folder("base");
  refused(import("f", saved, "F32", 1), 4, trained);
  values.back() += 1;
  refused(import("g", saved), 4, trained);
}

TEST_F(LoraProgram, AnotherBaseThanTheAdaptersNameIsSaid) {
  // Two models of equal shapes, each imported from a folder of its own.
  for (const std::string name : {"a", "b"}) {
    const std::string seed = name == "a" ? "3" : "4";
    ok(train({"--steps", "1", "--dtype", "fp32", "--seed", seed, "--checkpoint-dir", folder(name + "-run")}));
    ok(checkpoint_command({"export", folder(name + "-run"), "--to", folder(name)}));
    ok(checkpoint_command({"import", folder(name), "--to", folder(name + "-base")}));
  }
  const auto named = [&](const std::string& to, const json& base) {
    return peft_folder(to, [&](json& config) { config["base_model_name_or_path"] = base; });
  };
  const auto import = [&](const std::string& from, const std::string& base) {
    std::filesystem::remove_all(folder("x"));
    return ok(checkpoint_command({"import", from, "--base", folder(base), "--to", folder("x")}));
  };
  std::string said;
  const auto exported = [&] {
    std::filesystem::remove_all(folder("y"));
    said = ok(checkpoint_command({"export", folder("x"), "--to", folder("y"), "--peft"}));
    return json::parse(read_file(folder("y") + "/adapter_config.json"))["base_model_name_or_path"];
  };
  const std::string of_a = named("of-a", folder("a"));
  EXPECT_THAT(import(of_a, "b-base"),
              HasSubstr("note: adapter_config.json of " + of_a + " names " + folder("a") +
                        " as the base, but --base was imported from " + folder("b") + "\n"));
  EXPECT_EQ(exported(), folder("b"));
  EXPECT_THAT(said, HasSubstr("note: the imported adapters named " + folder("a") +
                              " as the base, but the base was "
                              "imported from " +
                              folder("b") + ": adapter_config.json names \"" + folder("b") + "\"\n"));
  // The same base, under its path, a longer spelling of it, or a name of a hub.
  for (const std::string& name : {folder("a"), folder("a") + "/../a/", std::string("some-org/a")}) {
    EXPECT_THAT(import(named("of-a" + std::to_string(name.size()), name), "a-base"),
                Not(HasSubstr("as the base, but")));
    EXPECT_EQ(exported(), name);
    EXPECT_THAT(said, Not(HasSubstr("as the base, but")));
  }
  const std::string hub = "models--some-org--m/snapshots/12";
  std::filesystem::create_directories(folder("models--some-org--m/snapshots"));
  std::filesystem::copy(folder("a"), folder(hub));
  ok(checkpoint_command({"import", folder(hub), "--to", folder("hub-base")}));
  EXPECT_THAT(import(named("of-m", "some-org/m"), "hub-base"), Not(HasSubstr("as the base, but")));
  const std::string of_n = named("of-n", "some-org/n");
  EXPECT_THAT(import(of_n, "hub-base"),
              HasSubstr("names some-org/n as the base, but --base was imported from"));
  EXPECT_EQ(exported(), "some-org/n") << "it may be the same model";
  EXPECT_THAT(
      said,
      HasSubstr("note: the imported adapters named some-org/n as the base, but the base was imported from " +
                folder(hub) + ": adapter_config.json names \"some-org/n\"\n"));
  // A base of unknown origin, and no name.
  EXPECT_THAT(import(of_n, "base"), Not(HasSubstr("as the base, but")));
  EXPECT_THAT(import(named("of-none", nullptr), "b-base"), Not(HasSubstr("as the base, but")));
  EXPECT_EQ(exported(), folder("b"));
  // Other shapes: the error asks for the base, and names both where it knows them.
  const auto wrong = [&](const std::string& from, const std::string& base) {
    json config = json::parse(read_file(from + "/adapter_config.json"));
    config["r"] = 4;
    files_.write("wrong/adapter_config.json", config.dump());
    std::filesystem::copy_file(from + "/adapter_model.safetensors", folder("wrong/adapter_model.safetensors"),
                               std::filesystem::copy_options::overwrite_existing);
    const ProgramResult result =
        checkpoint_command({"import", folder("wrong"), "--base", folder(base), "--to", folder("z")});
    EXPECT_EQ(result.status, 4);
    return result.errors;
  };
  std::filesystem::create_directory(folder("wrong"));
  EXPECT_THAT(wrong(of_a, "a-base"), AllOf(HasSubstr("other shapes in it than in the model"),
                                           HasSubstr("; give --base the model that they were trained beside"),
                                           Not(HasSubstr("as the base, but"))));
  EXPECT_THAT(wrong(of_a, "b-base"),
              HasSubstr("names " + folder("a") + " as the base, but --base was imported"));
}

TEST(PeftPatterns, MatchWholeNamesAsPythonDoes) {
  const auto matches = [](const std::string& pattern, const std::string& module) {
    const json config{{"target_modules", pattern}};
    return NamedLayers(detail::JsonNode::read<ConfigurationError>(config.dump(), "c")).has(module, true);
  };
  const std::string q = "model.layers.3.self_attn.q_proj", head = "lm_head";
  for (const char* pattern :
       {"^model\\.layers\\.\\d+\\.self_attn\\.(q_proj|v_proj)$", "^(?!.*lm_head).*(q_proj|v_proj)",
        "(^lm_head|^model.*q_proj)", "model.*|q_proj", ".*", "^.*$", "(?!lm_head).*", "^x|^m.*"}) {
    EXPECT_TRUE(matches(pattern, q)) << pattern;
  }
  for (const char* pattern :
       {"q_proj", "^q_proj$", "odel.*", "^model", "model|layers", "(?!model).*", "^lm_head|q_proj"})
    EXPECT_FALSE(matches(pattern, q)) << pattern;
  EXPECT_TRUE(matches("^.*|x", head));
  EXPECT_TRUE(matches("[hj]", "h"));
  EXPECT_FALSE(matches("[xy]", "h"));
}

TEST_F(LoraProgram, ACheckpointOfAdaptersHasTheLayersThatItNames) {
  ok(train_adapters("run"));
  const std::string path = folder("run") + "/step-00000003";
  checkpoint::Manifest manifest = checkpoint::open_manifest(detail::posix_file_system(), path);
  json config = json::parse(manifest.run.config);
  config["tranche"]["lora"]["targets"] = {"c_attn", "c_fc", "lm_head", "c_proj"};
  manifest.run.config = config.dump();
  files_.write("run/step-00000003/manifest.json", checkpoint::to_text(manifest));
  const std::string lacks = "transformer.h.0.attn.c_proj.lora_A.weight";
  refused(checkpoint_command({"export", folder("run"), "--to", folder("x")}), 4, lacks);
  refused(checkpoint_command({"export", folder("run"), "--to", folder("y"), "--peft"}), 4, lacks);
  refused(test::run({"generate", "--from", folder("run"), "--prompt", "a", "--threads", "1"}), 4, lacks);
  refused(train({"--dtype", "fp32", "--resume-weights-only", folder("run")}), 4, lacks);
}

TEST_F(LoraProgram, KeysOfPeftHaveTheirTypes) {
  const auto import = [&](const std::string& name, const char* key, const json& value) {
    return checkpoint_command({"import", peft_folder(name, [&](json& config) { config[key] = value; }),
                               "--base", folder("base"), "--to", folder(name + "-run")});
  };
  ok(import("a", "use_rslora", nullptr));
  refused(import("b", "use_rslora", "yes"), 2,
          "b/adapter_config.json: use_rslora is neither true nor false: \"yes\"");
  refused(import("c", "target_modules", 5), 2, "target_modules is neither a text nor a list of texts");
  refused(import("d", "target_modules", json{5, nullptr}), 2, "target_modules[0] is not a string: 5");
  refused(import("e", "fan_in_fan_out", "x"), 2, "fan_in_fan_out is neither true nor false: \"x\"");
  refused(import("f", "layers_to_transform", "x"), 2, "layers_to_transform is not an integer");
  ok(import("g", "fan_in_fan_out", nullptr));
}

TEST_F(LoraProgram, PeftKeysThatChangeNumbersAreRefusedByName) {
  const auto import = [&](const std::string& name, const std::function<void(json&)>& change) {
    return checkpoint_command(
        {"import", peft_folder(name, change), "--base", folder("base"), "--to", folder(name + "-run")});
  };
  const auto set = [](const char* key, const json& value) {
    return [key, value](json& config) { config[key] = value; };
  };
  refused(import("a", set("use_dora", true)), 2, "use_dora is true: DoRA (weight-decomposed adapters)");
  refused(import("b", set("peft_type", "LOHA")), 2, "peft_type is \"LOHA\"; only LORA is read");
  refused(import("c", set("rank_pattern", json{{"c_attn", 8}})), 2, "all adapters have one rank");
  refused(import("d", set("bias", "all")), 2, "bias is \"all\": only adapters are trained");
  refused(import("e", set("modules_to_save", json{"lm_head"})), 2,
          "only adapters are trained beside the base");
  refused(import("f", set("init_lora_weights", "pissa")), 2, "it changes the base's weights");
  refused(import("g", set("loftq_config", json{{"loftq_bits", 4}})), 2, "LoftQ belongs to QLoRA");
  refused(import("h", set("new_trick", 3)), 2, "the key is not known, and may change numbers");
  refused(import("i", set("r", 4)), 4, "other shapes in it than in the model");
  ok(import("j", set("target_modules", ".*(c_attn|c_fc|lm_head)")));
  ok(import("k", set("new_trick", false)));
}

TEST_F(LoraProgram, BasesAndFlagsThatDoNotFitPeftAdaptersAreRefused) {
  ok(checkpoint_command(
      {"import", peft_folder("p", [](json&) {}), "--base", folder("base"), "--to", folder("p-run")}));
  refused(checkpoint_command({"import", folder("peft"), "--to", folder("x")}), 2,
          "peft holds PEFT adapters: give the checkpoint of the model that they belong to with --base");
  const auto import_more = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"import", folder("peft"), "--to", folder("x")});
    return checkpoint_command(more);
  };
  const std::string of_a_model =
      "--partial and --rename are for the weights of a model, and " + folder("peft") + " holds PEFT adapters";
  refused(import_more({"--base", folder("base"), "--partial"}), 2, of_a_model);
  refused(import_more({"--base", folder("base"), "--rename", "a=b"}), 2, of_a_model);
  refused(checkpoint_command({"export", folder("for-peft"), "--to", folder("x"), "--base", folder("p-run")}),
          4, folder("p-run") + "/step-00000000 holds adapters alone; export it merged");
  refused(import_more({"--base", folder("for-peft")}), 4,
          folder("for-peft") + "/step-00000003 holds adapters alone; give --base a whole model");
  ok(checkpoint_command({"export", folder("base"), "--to", folder("whole")}));
  refused(
      checkpoint_command({"import", folder("whole"), "--base", folder("base"), "--to", folder("x")}), 2,
      "--base is for PEFT adapters, and " + folder("whole") + " holds none: it has no adapter_config.json");
}

}  // namespace
}  // namespace tranche::tools
