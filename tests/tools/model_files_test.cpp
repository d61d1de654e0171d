// Files beside the weights: which are kept, and that an export has the imported ones.

#include "tools/checkpoint/model_files.h"

#include <gmock/gmock.h>
#include <sys/stat.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "tests/tools/gpt_checkpoint.h"
#include "tests/tools/program_fixture.h"
#include "tranche/core/error.h"
#include "tranche/models/gpt.h"

namespace tranche::tools {
namespace {

using nlohmann::ordered_json;
using test::checkpoint_command;
using test::message_of;
using test::ProgramResult;
using test::read_file;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

constexpr const char* generation_config = "{\n  \"eos_token_id\": [7, 300],\n  \"top_k\": 3\n}\n";

class ModelFiles : public testing::Test {
 protected:
  static std::string ok(const ProgramResult& result) {
    EXPECT_EQ(result.status, 0) << result.errors << result.out;
    return result.out;
  }
  /// Makes a model's folder in the form in which models are published.
  std::string publish(const std::string& name) const {
    const std::string run = test::save_gpt(folder_.path(name + "-run"), test::tiny_gpt(), {});
    ok(checkpoint_command({"export", run, "--to", folder_.path(name)}));
    ordered_json config = ordered_json::parse(read_file(folder_.path(name + "/config.json")));
    config.erase("torch_dtype");
    config["eos_token_id"] = 9;
    config["dtype"] = "bfloat16";
    config["a_key_of_somebody"] = {{"deep", {1, 2.5, nullptr}}};
    folder_.write(name + "/config.json", config.dump(1));
    folder_.write(name + "/generation_config.json", generation_config);
    folder_.write(name + "/vocab.json", "{}");
    folder_.write(name + "/merges.txt", "#version\n");
    folder_.write(name + "/chat_template.jinja", "{{ messages }}\xff");
    folder_.write(name + "/tokenizer_config.json", "{\"eos_token\": \"</s>\"}");
    folder_.write(name + "/README.md", "#");
    return folder_.path(name);
  }
  /// Expects the same files, and the same config.json except for the dtype.
  void expect_same_files(const std::string& published, const std::string& exported) const {
    for (const char* name : {"generation_config.json", "vocab.json", "merges.txt", "chat_template.jinja",
                             "tokenizer_config.json"}) {
      EXPECT_EQ(read_file(exported + "/" + name), read_file(published + "/" + name)) << name;
    }
    ordered_json before = ordered_json::parse(read_file(published + "/config.json")),
                 after = ordered_json::parse(read_file(exported + "/config.json"));
    EXPECT_EQ(after["dtype"], "float32");
    before["dtype"] = "float32";
    EXPECT_EQ(after.dump(), before.dump()) << "in the same order too";
    EXPECT_FALSE(std::filesystem::exists(exported + "/README.md"));
    EXPECT_FALSE(std::filesystem::exists(exported + "/origin.json"));
  }
  checkpoint::Companions read(const std::string& name) {
    notes_.clear();
    return read_model_files(detail::posix_file_system(), folder_.path(name), notes_);
  }
  std::vector<std::string> names_in(const std::string& name) {
    std::vector<std::string> names;
    for (const checkpoint::Companion& companion : read(name)) names.push_back(companion.name);
    return names;
  }
  test::TemporaryFolder folder_;
  std::vector<std::string> notes_;
};

TEST_F(ModelFiles, AnExportHasWhatWasImported) {
  const std::string published = publish("hf");
  EXPECT_THAT(ok(checkpoint_command({"import", published, "--to", folder_.path("base")})),
              HasSubstr("note: left behind in " + published + ": README.md (weights, "));
  const std::string out =
      ok(checkpoint_command({"export", folder_.path("base"), "--to", folder_.path("out")}));
  EXPECT_THAT(out, Not(HasSubstr("note")));
  expect_same_files(published, folder_.path("out"));
  EXPECT_THAT(ok(checkpoint_command({"show", folder_.path("base")})),
              HasSubstr("carries        chat_template.jinja, config.json, generation_config.json"));
  EXPECT_THAT(ok(checkpoint_command({"verify", folder_.path("base")})), Not(HasSubstr("damage")));
}

TEST_F(ModelFiles, TravelThroughTrainingResumingAndRetention) {
  const std::string published = publish("hf"), run = folder_.path("run");
  ok(checkpoint_command({"import", published, "--to", folder_.path("base")}));
  const std::string text = folder_.write("t.txt", test::some_text(3000));
  const auto train = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"train",
                               "--model",
                               published + "/config.json",
                               "--data",
                               text,
                               "--sequence",
                               "8",
                               "--data-format",
                               "text",
                               "--micro-batch",
                               "1",
                               "--eval-batches",
                               "1",
                               "--threads",
                               "1",
                               "--debug-peak-seconds",
                               "0.01",
                               "--checkpoint-dir",
                               run,
                               "--save-every",
                               "1",
                               "--keep-last",
                               "1"});
    return ok(test::run(more));
  };
  EXPECT_THAT(train({"--steps", "2", "--resume-weights-only", folder_.path("base")}),
              HasSubstr("carries                chat_template.jinja, config.json"));
  std::filesystem::remove_all(folder_.path("base"));
  train({"--steps", "3", "--resume", "latest"});
  ok(checkpoint_command({"export", run, "--to", folder_.path("out")}));
  expect_same_files(published, folder_.path("out"));
}

TEST_F(ModelFiles, AdaptersCarryTheirBasesFilesAndName) {
  const std::string published = publish("hf"), run = folder_.path("run");
  ok(checkpoint_command({"import", published, "--to", folder_.path("base")}));
  ok(test::run({"train",
                "--model",
                published + "/config.json",
                "--data",
                folder_.write("t.txt", test::some_text(3000)),
                "--data-format",
                "text",
                "--sequence",
                "8",
                "--micro-batch",
                "1",
                "--eval-batches",
                "1",
                "--steps",
                "1",
                "--threads",
                "1",
                "--debug-peak-seconds",
                "0.01",
                "--checkpoint-dir",
                run,
                "--resume-weights-only",
                folder_.path("base"),
                "--set",
                "tranche.lora.rank=2"}));
  ok(checkpoint_command({"export", run, "--to", folder_.path("merged")}));
  expect_same_files(published, folder_.path("merged"));
  EXPECT_THAT(ok(checkpoint_command({"export", run, "--to", folder_.path("peft"), "--peft"})),
              Not(HasSubstr("note")));
  EXPECT_EQ(read_file(folder_.path("peft/vocab.json")), "{}");
  EXPECT_FALSE(std::filesystem::exists(folder_.path("peft/config.json")));
  EXPECT_FALSE(std::filesystem::exists(folder_.path("peft/generation_config.json")));
  ordered_json config = ordered_json::parse(read_file(folder_.path("peft/adapter_config.json")));
  EXPECT_EQ(config["base_model_name_or_path"], published);
  // PEFT's own name of the base stays, and so do keys that are not used here.
  config["base_model_name_or_path"] = "somebody/model";
  config["revision"] = "main";
  folder_.write("peft/adapter_config.json", config.dump());
  ok(checkpoint_command(
      {"import", folder_.path("peft"), "--base", folder_.path("base"), "--to", folder_.path("back")}));
  ok(checkpoint_command({"export", folder_.path("back"), "--to", folder_.path("again"), "--peft"}));
  EXPECT_EQ(ordered_json::parse(read_file(folder_.path("again/adapter_config.json"))), config);
}

TEST_F(ModelFiles, AnExportSaysWhatItHasNot) {
  const std::string run = test::save_gpt(folder_.path("run"), test::tiny_gpt(), {});
  EXPECT_THAT(ok(checkpoint_command({"export", run, "--to", folder_.path("out")})),
              HasSubstr("note: " + run + " carries no tokenizer and no generation settings: "));
  // With --model the folder's own configuration does not belong to the model.
  const std::string published = publish("hf"),
                    config = folder_.write("other.json", test::tiny_gpt().to_json());
  EXPECT_THAT(
      ok(checkpoint_command({"import", published, "--to", folder_.path("base"), "--model", config})),
      HasSubstr("note: config.json of " + published + " does not travel: the model is --model " + config));
  ok(checkpoint_command({"export", folder_.path("base"), "--to", folder_.path("out2")}));
  EXPECT_FALSE(
      ordered_json::parse(read_file(folder_.path("out2/config.json"))).contains("a_key_of_somebody"));
}

TEST_F(ModelFiles, AnExportReplacesNothing) {
  const std::string published = publish("hf");
  ok(checkpoint_command({"import", published, "--to", folder_.path("base")}));
  std::filesystem::create_directory(folder_.path("out"));
  folder_.write("out/vocab.json", "{}");  // equal to the file that is written
  folder_.write("out/merges.txt", "mine");
  const ProgramResult result =
      checkpoint_command({"export", folder_.path("base"), "--to", folder_.path("out")});
  EXPECT_EQ(result.status, 4);
  EXPECT_THAT(result.errors,
              HasSubstr("it holds merges.txt already, with other contents: name an empty folder"));
  EXPECT_EQ(read_file(folder_.path("out/merges.txt")), "mine");
  EXPECT_FALSE(std::filesystem::exists(folder_.path("out/model.safetensors")));
}

TEST_F(ModelFiles, OnlyPlainFilesOfTheFolderTravel) {
  std::filesystem::create_directory(folder_.path("hf"));
  folder_.write("secret", "s");
  folder_.write("hf/vocab.json", "{}");
  std::filesystem::create_symlink("vocab.json", folder_.path("hf/added_tokens.json"));
  std::filesystem::create_symlink("../secret", folder_.path("hf/merges.txt"));
  std::filesystem::create_symlink("/nowhere/at/all", folder_.path("hf/tokenizer.model"));
  std::filesystem::create_directory(folder_.path("hf/chat_template.jinja"));
  ASSERT_EQ(::mkfifo(folder_.path("hf/tokenizer_config.json").c_str(), 0600), 0);
  folder_.write("hf/tokenizer.json", "");
  std::filesystem::resize_file(folder_.path("hf/tokenizer.json"), (64u << 20) + 1);
  EXPECT_THAT(names_in("hf"), ElementsAre("added_tokens.json", "vocab.json", "origin.json"));
  const std::string all = testing::PrintToString(notes_), hf = folder_.path("hf");
  EXPECT_EQ(notes_.size(), 5u) << all;
  EXPECT_THAT(all, AllOf(HasSubstr(hf + "/merges.txt is a link that leads out of the folder, to " +
                                   folder_.path("secret")),
                         HasSubstr(hf + "/tokenizer.model cannot be read"),
                         HasSubstr(hf + "/chat_template.jinja cannot be read"),
                         HasSubstr(hf + "/tokenizer_config.json cannot be read"),
                         HasSubstr(hf + "/tokenizer.json cannot be read"),
                         HasSubstr("it does not travel with the checkpoint; put a copy in its place")));
}

TEST_F(ModelFiles, ASnapshotOfADownloadLinksToItsBlobs) {
  const std::string cache = folder_.path("models--a--b");
  std::filesystem::create_directories(cache + "/snapshots/1234");
  std::filesystem::create_directories(cache + "/blobs");
  folder_.write("models--a--b/blobs/77", "{}");
  std::filesystem::create_symlink("../../blobs/77", cache + "/snapshots/1234/vocab.json");
  EXPECT_THAT(names_in("models--a--b/snapshots/1234"), ElementsAre("vocab.json", "origin.json"));
  EXPECT_THAT(notes_, IsEmpty());
}

TEST_F(ModelFiles, PointersOfGitLfsAreRefused) {
  const std::string pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n";
  std::filesystem::create_directory(folder_.path("hf"));
  folder_.write("hf/tokenizer.json", pointer);
  EXPECT_THAT(
      message_of<CheckpointError>([&] { read("hf"); }),
      HasSubstr("tokenizer.json is a Git LFS pointer, not the file itself: fetch it with 'git lfs pull'"));
  folder_.write("hf/model.safetensors", pointer);
  folder_.write("hf/config.json", test::tiny_gpt().to_json());
  const ProgramResult result =
      checkpoint_command({"import", folder_.path("hf"), "--to", folder_.path("base")});
  EXPECT_EQ(result.status, 4);
  EXPECT_THAT(result.errors, HasSubstr("model.safetensors is a Git LFS pointer"));
}

TEST_F(ModelFiles, AFolderToImportIsNamedAsOne) {
  const std::string hf = publish("hf");
  const auto train = [&](const std::vector<std::string>& more) {
    return test::run(test::tiny_train(folder_, more));
  };
  const std::string advice =
      "it holds model.safetensors, a model of Hugging Face's transformers: import it first, "
      "with 'tranche checkpoint import " +
      hf + " --to RUN'";
  for (const ProgramResult& result : {train({"--resume-weights-only", hf}), train({"--resume", hf}),
                                      checkpoint_command({"export", hf, "--to", folder_.path("x")})}) {
    EXPECT_EQ(result.status, 4) << result.errors;
    EXPECT_THAT(result.errors, HasSubstr(advice));
  }
  const std::string rewrite =
      ": write its weights as safetensors beside a config.json, as save_pretrained() of transformers does, "
      "and "
      "import that folder with tranche checkpoint import";
  const std::pair<std::string, std::string> others[] = {
      {"pytorch_model.bin", "a model in PyTorch's format" + rewrite},
      {".metadata", "a checkpoint of torch.distributed" + rewrite},
      {"latest_checkpointed_iteration.txt", "a Megatron checkpoint" + rewrite},
      {"zero_pp_rank_0_mp_rank_00_model_states.pt", "a DeepSpeed checkpoint" + rewrite},
      {"mp_rank_00_model_states.pt", "a DeepSpeed checkpoint" + rewrite},
      {"zero_to_fp32.py", "a DeepSpeed checkpoint" + rewrite},
      {"adapter_config.json", "PEFT adapters: import them first, with 'tranche checkpoint import "}};
  std::filesystem::create_directory(folder_.path("other"));
  for (const auto& [name, what] : others) {  // each is told before those above it
    folder_.write("other/" + name, "{}");
    EXPECT_THAT(train({"--resume", folder_.path("other")}).errors,
                HasSubstr("; it holds " + name + ", " + what));
  }
}

TEST_F(ModelFiles, ACheckpointThatCannotBeReachedIsACheckpointsError) {
  std::filesystem::create_symlink("loop", folder_.path("loop"));
  const ProgramResult result =
      test::run(test::tiny_train(folder_, {"--resume", folder_.path("loop/step-00000006")}));
  EXPECT_EQ(result.status, 4);
  EXPECT_THAT(result.errors, AllOf(HasSubstr("cannot open checkpoint " + folder_.path("loop/step-00000006")),
                                   HasSubstr("Too many levels of symbolic links")));
}

TEST(EndTokens, AreThoseOfGenerationElseOfTheModel) {
  EXPECT_THAT(end_tokens(R"({"eos_token_id": [7, 3, 7]})", R"({"eos_token_id": 2})", "f"), ElementsAre(3, 7));
  EXPECT_THAT(end_tokens(R"({"eos_token_id": null})", R"({"eos_token_id": 2})", "f"), ElementsAre(2));
  EXPECT_THAT(end_tokens("", R"({"eos_token_id": [2]})", "f"), ElementsAre(2));
  EXPECT_THAT(end_tokens(R"({"eos_token_id": -1})", "{}", "f"), IsEmpty());
  EXPECT_THAT(end_tokens("", "", "f"), IsEmpty());
  EXPECT_THAT(message_of<ConfigurationError>([] { end_tokens(R"({"eos_token_id": "</s>"})", "", "f"); }),
              HasSubstr("f/generation_config.json: eos_token_id is not an integer"));
  EXPECT_THAT(message_of<ConfigurationError>([] { end_tokens("", R"({"eos_token_id": [1, 1.5]})", "f"); }),
              HasSubstr("f/config.json: eos_token_id[1] is not an integer"));
  EXPECT_THAT(message_of<ConfigurationError>([] { end_tokens("{", "", "f"); }),
              HasSubstr("f/generation_config.json is not JSON"));
}

TEST(ConfigToExport, IsTheImportedOneWhereItIsOfThisModel) {
  const auto models = models::ModelRegistry::with_builtin();
  const models::Gpt model(test::tiny_gpt());
  std::vector<std::string> notes;
  ordered_json own = ordered_json::parse(model.to_json());
  own["x"] = 1;
  const auto exported = [&](const std::string& config, DataType dtype, bool unties) {
    return ordered_json::parse(
        config_to_export(model, models, {{"config.json", config}}, dtype, unties, notes));
  };
  EXPECT_EQ(exported(own.dump(), DataType::bfloat16, true)["x"], 1);
  EXPECT_EQ(exported(own.dump(), DataType::bfloat16, true)["torch_dtype"], "bfloat16");
  EXPECT_EQ(exported(own.dump(), DataType::bfloat16, true)["tie_word_embeddings"], false);
  own["attn_pdrop"] = 0.25;
  own["layer_norm_epsilon"] = 0.5;
  const ordered_json adjusted = exported(own.dump(), DataType::float32, false);
  EXPECT_EQ(adjusted["x"], 1);
  for (const char* key : {"attn_pdrop", "layer_norm_epsilon"}) {
    EXPECT_EQ(adjusted[key], ordered_json::parse(model.to_json())[key]) << "the run's";
  }
  own["eos_token_id"] = own["pad_token_id"] = 5;
  EXPECT_EQ(exported(own.dump(), DataType::float32, false)["eos_token_id"], 5) << "the run has none";
  models::GptConfig ended = test::tiny_gpt();
  ended.token_ids = {{"eos_token_id", "6"}};
  const auto json = ordered_json::parse(config_to_export(
      models::Gpt(ended), models, {{"config.json", own.dump()}}, DataType::float32, false, notes));
  EXPECT_EQ(json["eos_token_id"], 5) << "the folder's, which fit its tokenizer";
  EXPECT_EQ(json["pad_token_id"], 5);
  EXPECT_THAT(notes, IsEmpty());
  own["n_layer"] = 1;
  for (const std::string& other : {own.dump(), std::string("{"), std::string("[]"), std::string("{}")}) {
    notes.clear();
    const ordered_json config = exported(other, DataType::float32, false);
    EXPECT_FALSE(config.contains("x"));
    EXPECT_EQ(config["n_layer"], ordered_json::parse(model.to_json())["n_layer"]);
    ASSERT_EQ(notes.size(), 1u);
    EXPECT_THAT(notes[0], HasSubstr("config.json of the imported folder describes another model"));
  }
}

}  // namespace
}  // namespace tranche::tools
