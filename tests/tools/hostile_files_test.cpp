// Malicious files: each command must end soon, with the status of its kind of error and a text.

#include <gmock/gmock.h>
#include <sys/stat.h>

#include <chrono>
#include <thread>

#include "checkpoint/digest.h"
#include "tests/tools/gpt_checkpoint.h"
#include "tests/tools/program_fixture.h"

namespace tranche::tools {
namespace {

using test::checkpoint_command;
using test::ProgramResult;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* deeper = "blocks are nested deeper than 64";

/// A value inside 200,000 nested lists, which takes 400 KB.
std::string deep() {
  return std::string(200'000, '[') + std::string(200'000, ']');
}

std::string with_layers(const std::string& text, const std::string& layers) {
  std::string edited = text;
  const std::string key = "\"n_layer\":";
  std::size_t at = edited.find(key);
  if (at == std::string::npos) throw std::runtime_error("there is no " + key);
  at += key.size();
  return edited.replace(at, edited.find(',', at) - at, layers);
}

class HostileFiles : public ::testing::Test {
 protected:
  /// Expects the status and the texts, without a text of the JSON library, within a minute even in
  /// instrumented builds that run beside other tests.
  static void refused(const ProgramResult& result, int status, const std::vector<std::string>& texts,
                      std::chrono::steady_clock::time_point begin) {
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
    EXPECT_EQ(result.status, status) << result.errors.substr(0, 2000);
    EXPECT_THAT(result.errors, Not(HasSubstr("json.exception"))) << result.errors.substr(0, 2000);
    for (const std::string& text : texts) EXPECT_THAT(result.errors, HasSubstr(text));
  }
  static void refused(const std::vector<std::string>& arguments, int status,
                      const std::vector<std::string>& texts) {
    const auto begin = std::chrono::steady_clock::now();
    refused(test::run(arguments), status, texts, begin);
  }
  void plan_refused(const std::string& model, const std::vector<std::string>& texts) const {
    refused({"plan", "--model", folder_.write("model.json", model)}, 2, texts);
  }
  void config_refused(const std::string& config, const std::vector<std::string>& texts) const {
    refused({"plan", "--model", "gpt-nano", "--config", folder_.write("c.json", config)}, 2, texts);
  }

  /// A checkpoint whose manifest has `from` replaced by `to` and a correct digest.
  std::string crafted(const std::string& from, const std::string& to) const {
    std::filesystem::remove_all(run_);
    const std::string path = test::save_gpt(run_, test::tiny_gpt());
    std::string text = test::read_file(path + "/manifest.json");
    const std::size_t body = text.find('\n') + 1, at = text.find(from, body);
    if (at == std::string::npos) throw std::runtime_error("there is no " + from);
    text.replace(at, from.size(), to);
    const std::string digest = checkpoint::to_hex(checkpoint::digest_of(std::string_view(text).substr(body)));
    folder_.write("run/step-00000007/manifest.json", text.replace(text.find(": \"") + 3, 16, digest));
    return path;
  }
  /// Runs every command that opens a checkpoint; `list` skips checkpoints that it cannot read.
  void checkpoint_refused(const std::string& path, const std::vector<std::string>& texts) const {
    refused({"checkpoint", "show", path}, 4, texts);
    refused({"checkpoint", "export", path, "--to", folder_.path("to")}, 4, texts);
    refused(test::tiny_train(folder_, {"--checkpoint-dir", run_, "--resume", "latest"}), 4, texts);
    for (const char* command : {"list", "verify"}) {
      const auto begin = std::chrono::steady_clock::now();
      const ProgramResult result = checkpoint_command({command, run_});
      EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60)) << command;
      EXPECT_EQ(result.status, command == std::string("list") ? 0 : 4) << command << result.errors;
      for (const std::string& text : texts)
        EXPECT_THAT(result.out + result.errors, HasSubstr(text)) << command;
    }
  }

  test::TemporaryFolder folder_;
  std::string run_ = folder_.path("run");
};

TEST_F(HostileFiles, DeepJsonIsRefusedByEveryReader) {
  config_refused("{\"gradient_clipping\":" + deep() + "}", {"c.json' is not JSON", deeper});
  refused({"plan", "--model", "gpt-nano", "--set", "gradient_clipping=" + std::string(60'000, '[')}, 2,
          {"gradient_clipping: expected a number"});
  std::string path = "a";
  for (int level = 0; level < 30'000; ++level) path += ".a";
  refused({"plan", "--model", "gpt-nano", "--set", path + "=1"}, 2, {"is not a path of blocks and a key"});
  for (const char* key : {"n_layer", "model_type"}) {
    plan_refused("{\"" + std::string(key) + "\":" + deep() + "}", {"model.json is not JSON", deeper});
  }
  plan_refused("{\"units\":" + deep() + "}", {deeper});
  plan_refused("{\"units\":[{\"name\":\"a\",\"tensors\":{\"w\":" + deep() + "}}]}", {deeper});
  refused({"plan", "--model", "gpt-nano", "--machine", folder_.write("m.json", deep())}, 2,
          {"m.json", deeper});
  checkpoint_refused(crafted("\"config\":{", "\"config\":{\"deep\":" + deep() + ","),
                     {"manifest.json", deeper});
}

TEST_F(HostileFiles, CountsOfAModelAreBounded) {
  const std::string gpt = R"({"model_type":"gpt2","n_layer":2,"n_head":2,"n_embd":32,)";
  plan_refused(with_layers(gpt + R"("vocab_size":256})", "3000000"),
               {"model.json: \"n_layer\" is 3000000, but models of at most 65536 are read"});
  plan_refused(gpt + R"("vocab_size":36028797018963968})", {"\"vocab_size\" is 36028797018963968"});
  plan_refused(gpt + R"("n_positions":36028797018963968})", {"\"n_positions\" is 36028797018963968"});
  plan_refused(gpt + R"("n_inner":4611686018427387904})", {"\"n_inner\" is 4611686018427387904"});
  plan_refused(gpt + R"("vocab_size":18446744073709551615})",
               {"vocab_size is not an integer of 64 bits: 18446744073709551615"});
  plan_refused(gpt + R"("initializer_range":1e300})",
               {"initializer_range is 1e+300, which cannot be: from -3.40282e+38"});
  plan_refused(R"({"model_type":"gpt2","n_embd":1152921504606846976,"n_head":1})",
               {"\"n_embd\" is 1152921504606846976"});
  plan_refused(R"({"model_type":"gpt2","n_layer":65536,"n_embd":1048576,"n_head":1})",
               {"parameters, but models of at most 17592186044416 are read"});
  plan_refused(R"({"units":[{"name":"a","tensors":{"w":[8]},"uses_per_pass":1000,"repeat":4096}]})",
               {"units[0] is too much: units that are used more than 65536 times a micro-batch"});
  const std::string large = R"("tensors":{"v":[1099511627776,524288],"w":[1099511627776,524288]}})";
  plan_refused(R"({"units":[{"name":"a",)" + large + "]}",
               {"units[0] has too many parameters: models of more than 17592186044416 are not planned"});
  plan_refused(R"({"units":[{"name":"a","repeat":4096,"tensors":{"v":[1099511627776]}}]})",
               {"units[0] has too many parameters: models of more than 17592186044416 are not planned"});
}

TEST_F(HostileFiles, AFolderToImportThatHasFewerTensorsThanItsModelHasLayers) {
  const std::string header = "{}";
  const std::uint64_t length = header.size();
  std::filesystem::create_directory(folder_.path("hf"));
  folder_.write("hf/model.safetensors", std::string(reinterpret_cast<const char*>(&length), 8) + header);
  const auto import = [&](const std::string& layers, int status, const std::string& text) {
    folder_.write("hf/config.json", with_layers(R"({"model_type":"gpt2","n_layer":1,"n_head":12})", layers));
    refused({"checkpoint", "import", folder_.path("hf"), "--to", folder_.path("to")}, status, {text});
  };
  import("65536", 4, "it has 0 tensors, the model 65536 layers");
  import("3000000", 2, "\"n_layer\" is 3000000");
  import("1099511627776", 2, "\"n_layer\" is 1099511627776");
  import(deep(), 2, deeper);
}

TEST_F(HostileFiles, CountsOfAManifestAreBounded) {
  const std::string path = crafted("\"n_layer\":2", "\"n_layer\":1099511627776");
  refused({"checkpoint", "show", path}, 4, {"\"n_layer\" is 1099511627776"});
  refused({"checkpoint", "export", path, "--to", folder_.path("to")}, 4, {"\"n_layer\" is 1099511627776"});
  std::string sections;
  for (int i = 0; i < 3'000; ++i) {
    const std::string name = std::to_string(i);
    sections += R"({"dataset":"s/)" + name + R"(","kind":"k)" + name + R"(","dtype":"fp32","frozen":false},)";
  }
  checkpoint_refused(crafted("\"sections\": [", "\"sections\": [" + sections), {"at most 64 are read"});
}

TEST_F(HostileFiles, NumbersThatOverflowAreRefused) {
  const std::string largest = "9223372036854775807";
  checkpoint_refused(crafted("\"ranges\":[[0,0,", "\"ranges\":[[0,0," + largest + "]],\"x\":[[0,0,"),
                     {"its units hold more than"});
  checkpoint_refused(crafted("\"sequence\": 1", "\"sequence\": " + largest), {"sequence is " + largest});
  checkpoint_refused(crafted("\"created\": ", "\"created\": 4611686018427387904,\"c\": "),
                     {"created is 4611686018427387904, which cannot be"});
  checkpoint_refused(crafted(R"("kind":"exp_avg_sq")", R"("kind":"exp_avg")"), {"is there twice"});
}

TEST_F(HostileFiles, PipesAndSparseFilesInACheckpointAreToldAtOnce) {
  const std::string path = test::save_gpt(run_, test::tiny_gpt()), manifest = path + "/manifest.json";
  std::filesystem::resize_file(manifest, std::uintmax_t{6} << 30);
  checkpoint_refused(
      path, {"manifest.json' failed: it has 6442450944 B, and such a file has 1073741824 B at most"});
  std::filesystem::remove(manifest);
  ASSERT_EQ(::mkfifo(manifest.c_str(), 0600), 0);
  checkpoint_refused(path, {"manifest.json' failed: it is a pipe, a socket or a device"});
}

TEST_F(HostileFiles, AModelOrATokenizerThatIsAPipe) {
  const std::string pipe = folder_.path("config.json");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  refused({"plan", "--model", pipe}, 2, {"'" + pipe + "' cannot be read: it is no regular file"});
  ASSERT_EQ(::mkfifo(folder_.path("vocab.json").c_str(), 0600), 0);
  folder_.write("merges.txt", "");
  refused({"generate", "--from", test::save_gpt(run_, test::tiny_gpt()), "--tokenizer", folder_.path(""),
           "--prompt", "a"},
          2, {"vocab.json' cannot be read: it is no regular file"});
}

TEST_F(HostileFiles, AConfigurationMayBeAPipe) {
  const std::string pipe = folder_.path("pipe");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  {
    std::jthread writer([&] { std::ofstream(pipe) << "{\"zero_optimization\": {\"stage\": 7}}"; });
    refused({"plan", "--model", "gpt-nano", "--config", pipe, "--dtype", "bf16"}, 2,
            {"configuration file '" + pipe + "': zero_optimization.stage: stage is 0 to 3, not 7"});
  }
  {
    std::jthread writer([&] { std::ofstream(pipe) << "{\"zero_optimization\": {\"stage\": 1}}"; });
    const ProgramResult plan = test::run({"plan", "--model", "gpt-nano", "--config", pipe, "--fit", "1GiB",
                                          "--write", folder_.path("fitting.json")});
    EXPECT_EQ(plan.status, 0) << plan.errors;
    EXPECT_THAT(test::read_file(folder_.path("fitting.json")), testing::HasSubstr("\"stage\""))
        << "the pipe is read once";
  }
  refused({"scale", "--ranks", "1", "--out", folder_.path("study"), "--config", pipe}, 2,
          {"--config '" + pipe + "' is no regular file, and every run of a study reads it; give a file"});
  refused({"plan", "--model", "gpt-nano", "--config", "/dev/zero"}, 2, {"it has more than 67108864 bytes"});
}

TEST_F(HostileFiles, WhatJsonCannotHoldIsAConfigurationError) {
  config_refused("{\"gradient_clipping\":1e999}", {"is not JSON: line 1", "number overflow parsing '1e999'"});
  config_refused("", {"c.json' is not JSON: line 1, column 1: it is empty"});
  refused({"plan", "--model", "gpt-nano", "--offload-optimizer", "nvme", "--nvme-path", "/x/\xff"}, 2,
          {"--nvme-path '/x/\xff' is not UTF-8"});
  for (const char* set : {"tranche.frozen=\xff", "tranche.frozen=[\"\xff\"]", "\xff=1", "optimizer.\xff=1"}) {
    refused({"plan", "--model", "gpt-nano", "--set", set}, 2, {"is not UTF-8, as a configuration is"});
  }
}

}  // namespace
}  // namespace tranche::tools
