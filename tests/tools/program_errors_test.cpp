// Every user mistake has an exit status and a text with a remedy.

#include <gmock/gmock.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "device/cuda_probe.h"
#include "tests/tools/program_fixture.h"
#include "tools/plan/plan.h"

namespace tranche::tools {
namespace {

using test::ProgramResult;
using test::TemporaryFolder;
using test::tiny_train;
using testing::AllOf;
using testing::HasSubstr;

class ProgramErrors : public testing::Test {
 protected:
  /// Expects status 2 and the texts, with nothing written to standard output.
  void refused(const std::vector<std::string>& more, const std::vector<std::string>& texts) const {
    const ProgramResult result = test::run(tiny_train(folder_, more));
    EXPECT_EQ(result.status, 2) << result.errors;
    EXPECT_EQ(result.out, "");
    for (const std::string& text : texts) EXPECT_THAT(result.errors, HasSubstr(text));
  }
  TemporaryFolder folder_;
};

TEST_F(ProgramErrors, UnknownConfigurationKeys) {
  const std::string file = folder_.write("ds.json", R"({"zero_optimisation": {"stage": 2}})");
  refused({"--config", file}, {file, "zero_optimisation", "zero_optimization"});
  refused({"--set", "tranche.sead=1"}, {"tranche.sead", "tranche.seed"});
  const std::string other = folder_.write("other.json", "{epochs: 3, bf16: {enabled: true}}  # ours");
  const ProgramResult done = test::run(tiny_train(folder_, {"--config", other, "--steps", "1"}));
  EXPECT_EQ(done.status, 0) << done.errors;
  EXPECT_THAT(done.out,
              HasSubstr("  note                   1 key of the configuration has no effect here; unknown: "
                        "'epochs' (--verbose lists it)\n"));
  const ProgramResult all = test::run(tiny_train(folder_, {"--config", other, "--steps", "1", "--verbose"}));
  EXPECT_THAT(all.out, HasSubstr("  note                   unknown key 'epochs': ignored\n"));
  refused({"--config", other, "--strict"}, {other, "unknown key 'epochs'"});
  for (const char* command : {"plan", "evaluate"}) {
    const ProgramResult strict = test::run({command, "--model", "gpt-nano", "--config", other, "--strict"});
    EXPECT_EQ(strict.status, 2);
    EXPECT_THAT(strict.errors, HasSubstr("unknown key 'epochs'")) << command;
  }
  refused({"--config", folder_.path("none.json")}, {"none.json", "cannot be read"});
}

TEST_F(ProgramErrors, EveryFileOfTheTableIsPlannedOrRefusedWithItsText) {
  const std::string folder = TRANCHE_CONFIGS "/";
  const auto outcomes = nlohmann::json::parse(test::read_file(folder + "outcomes.json"));
  for (const auto& [name, expected] : outcomes.items()) {
    const ProgramResult result =
        test::run({"plan", "--model", "gpt-nano", "--verbose", "--config", folder + name});
    EXPECT_EQ(result.status, expected.contains("refused") ? 2 : 0) << name << result.errors;
    if (expected.contains("refused")) {
      EXPECT_THAT(result.errors, HasSubstr(folder + name + "'" + expected["refused"].get<std::string>()));
      continue;
    }
    for (const std::string note : expected["notes"]) EXPECT_THAT(result.out, HasSubstr(note)) << name;
  }
}

TEST_F(ProgramErrors, StageFour) {
  refused({"--stage", "4"}, {"stage is 0 to 3, not 4"});
}

TEST_F(ProgramErrors, BatchArithmetic) {
  refused({"--micro-batch", "2", "--accumulate", "3", "--set", "train_batch_size=7"},
          {"train_batch_size 7", "train_micro_batch_size_per_gpu 2", "gradient_accumulation_steps 3", "6"});
}

TEST_F(ProgramErrors, DataFiles) {
  refused({"--data", folder_.path("none.txt")}, {"none.txt", "cannot be opened"});
  refused({"--data", folder_.write("empty.txt", "")}, {"empty.txt", "is empty"});
  refused({"--data", folder_.write("short.txt", "abc")}, {"short.txt", "3 tokens for training", "needs 17"});
  refused({"--data", folder_.write("s.txt", test::some_text(100))}, {"5 tokens for validation"});
  EXPECT_THAT(test::run({"train"}).errors, HasSubstr("no data: give --data"));
}

TEST_F(ProgramErrors, ATokenBeyondTheVocabulary) {
  std::vector<std::uint16_t> tokens(3000, 5);
  tokens[2222] = 256;
  const std::string nanogpt = folder_.write("n.bin", test::nanogpt_tokens(tokens));
  refused({"--data", nanogpt}, {"n.bin", "token 256 at position 2222", "vocabulary is 256"});
  const std::string llmc = folder_.write("l.bin", test::llmc_tokens(tokens));
  refused({"--data", llmc}, {"l.bin", "token 256 at position 2222"});
}

TEST_F(ProgramErrors, SequencesLongerThanTheModelAllows) {
  refused({"--sequence", "65"}, {"sequence length 65", "the model has 64 positions"});
}

TEST_F(ProgramErrors, HeadsThatDoNotDivideTheWidth) {
  const std::string model = folder_.write(
      "config.json", R"({"model_type": "gpt2", "n_layer": 1, "n_head": 3, "n_embd": 32, "vocab_size": 256})");
  refused({"--model", model}, {model, "\"n_head\" 3 does not divide \"n_embd\" 32"});
  refused({"--model", "gpt-mino"}, {"gpt-mino", "gpt-mini"});
}

TEST_F(ProgramErrors, TheDeviceThatIsNotThere) {
  if (!detail::probe_cuda().devices.empty()) GTEST_SKIP() << "this machine has the device";
  const ProgramResult result = test::run(tiny_train(folder_, {"--device", "cuda"}));
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.errors, HasSubstr("device cuda"));
}

TEST_F(ProgramErrors, FlagsAndCommands) {
  refused({"--acumulate", "2"}, {"unknown flag --acumulate", "--accumulate"});
  refused({"--offload-optimizer", "disk"}, {"--offload-optimizer 'disk' is not one of none, cpu, nvme"});
  refused({"--offload-optimizer", "nvme"}, {"nvme needs zero_optimization.offload_optimizer.nvme_path"});
  refused({"--offload-optimizer", "nvme", "--nvme-path", folder_.path("none")},
          {"the folder of the nvme tier, '" + folder_.path("none") + "', is not there", "--nvme-path"});
  EXPECT_FALSE(std::filesystem::exists(folder_.path("none")));
  refused({"--debug-fail", "3:1"}, {"no rank 3"});
  refused({"--debug-out-of-memory", "0:1"},
          {"--debug-out-of-memory takes away what --device-memory leaves; give that too"});
  const std::string units =
      folder_.write("units.json", R"({"units": [{"name": "u", "tensors": {"w": [4, 4]}}]})");
  const ProgramResult plan = test::run({"plan", "--model", units, "--ranks", "2", "--machine", "dgx-h100"});
  EXPECT_EQ(plan.status, 2);
  EXPECT_THAT(plan.errors,
              HasSubstr(" is a list of units, of whose kernels nothing is known; the step time of a language "
                        "model can be projected"));
  const auto tokenize = [&](const char* flag, const char* value) {
    const ProgramResult result = test::run({"tokenize", "--data", folder_.write("text.txt", "abc"), "--out",
                                            folder_.path("tokens.safetensors"), flag, value});
    EXPECT_EQ(result.status, 2);
    return result.errors;
  };
  EXPECT_THAT(tokenize("--threads", "0"), HasSubstr("--threads is 0, but must be between 1 and "));
  EXPECT_THAT(tokenize("--threads", "100000"), HasSubstr("--threads is 100000, but must be between 1 and "));
  EXPECT_THAT(tokenize("--data", folder_.path("none.txt").c_str()),
              HasSubstr("data file '" + folder_.path("none.txt") + "' cannot be opened: No such file"));
  EXPECT_THAT(tokenize("--chat-template", "own"),
              HasSubstr("--chat-template own is that of the tokenizer's folder: give --tokenizer"));
  refused({"--device-memory", "much"}, {"'much' is not a size"});
  refused({"--host-memory", "more"}, {"'more' is not a size"});
  EXPECT_EQ(test::run({"trian"}).status, 2);
}

TEST_F(ProgramErrors, SettingsThatDoNotGoTogether) {
  for (const char* tier : {"cpu", "nvme"}) {
    for (const char* stage : {"0", "1", "2"}) {
      refused({"--offload-param", tier, "--nvme-path", folder_.path(""), "--stage", stage},
              {std::string("--offload-param ") + tier +
                   " needs zero_optimization.stage 3, where weights are sharded and come when they are used",
               std::string("the stage is ") + stage});
    }
  }
  refused({"--set", "optimizer.type=SGD", "--set", "tranche.moments=bf16"},
          {"tranche.moments: SGD: it keeps no moments with these parameters, in bf16 or any dtype"});
}

TEST_F(ProgramErrors, ReportsWithoutAPlaceAreToldBeforeTraining) {
  refused({"--report", folder_.path("none/r.json")}, {"--report", "none/r.json", "No such file"});
  refused({"--trace", folder_.path("none/t.json")}, {"--trace"});
}

TEST_F(ProgramErrors, TextOnlyOptionsRefuseTokens) {
  const std::string tokens =
      folder_.write("n.bin", test::nanogpt_tokens(std::vector<std::uint16_t>(3000, 5)));
  refused({"--data", tokens, "--ngrams"}, {"--ngrams", "read as nanogpt"});
}

TEST_F(ProgramErrors, OutOfMemoryHasAStatusOfItsOwn) {
  const ProgramResult result = test::run(tiny_train(folder_, {"--device-memory", "4MiB"}));
  EXPECT_EQ(result.status, 3) << result.errors;
  EXPECT_THAT(result.errors, HasSubstr("4.00 MiB"));
  EXPECT_THAT(result.errors,
              HasSubstr("no stage, micro-batch, checkpointing or offload fits in 4.00 MiB on 1 rank"));
}

TEST_F(ProgramErrors, AWorkspaceThatDoesNotFitNamesItsKey) {
  const ProgramResult result =
      test::run(tiny_train(folder_, {"--device-memory", "20MiB", "--set", "tranche.workspace=30MiB"}));
  EXPECT_EQ(result.status, 3) << result.errors;
  EXPECT_THAT(result.errors, AllOf(HasSubstr("'workspace' (workspace) asks for 30.00 MiB"),
                                   HasSubstr("are left; use a smaller tranche.workspace")));
}

TEST_F(ProgramErrors, OutOfMemorySaysWhatWouldHaveFitted) {
  const auto budget = std::vector<std::string>{"--device-memory", "10MiB"};
  std::vector<std::string> too_much{"--micro-batch", "64"};
  too_much.insert(too_much.end(), budget.begin(), budget.end());
  const ProgramResult result = test::run(tiny_train(folder_, too_much));
  EXPECT_EQ(result.status, 3) << result.errors;
  EXPECT_THAT(
      result.errors,
      AllOf(
          HasSubstr("within 10.00 MiB this would have fitted: stage 0"), HasSubstr("x "),
          HasSubstr("(tranche plan, with this run's other flags, --ranks 1 --fit 10485760 has all of it)")));
}

TEST_F(ProgramErrors, OutOfMemoryOfAPipelineNamesASearchThatKeepsIt) {
  std::vector<std::string> plan{"plan", "--model", "gpt-nano", "--ranks", "2", "--mesh"};
  std::vector<std::string> staged = plan, search = plan;
  staged.insert(staged.end(), {"pipeline=2", "--device-memory", "10MiB"});
  EXPECT_EQ(
      what_would_have_fitted(plan_request(parse_arguments(staged)), 1),
      "\ntranche plan, with this run's other flags, --ranks 2 --mesh 'search, pipeline=2' --fit 10485760 "
      "finds what would have fitted");
  search.insert(search.end(), {"search, pipeline=2", "--fit", "10485760"});
  EXPECT_NE(test::run(search).status, 2) << "the command of the advice is refused";
}

TEST_F(ProgramErrors, AFailureInTrainingIsTold) {
  const ProgramResult result = test::run(tiny_train(folder_, {"--debug-fail", "0:2"}));
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.errors,
              AllOf(HasSubstr("told to fail in step 2, micro-batch 0"), HasSubstr("train.cpp:")));
}

}  // namespace
}  // namespace tranche::tools
