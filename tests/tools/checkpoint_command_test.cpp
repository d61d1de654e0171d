// tranche checkpoint list, verify, show and diff, for people and for scripts.

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "checkpoint/folder.h"
#include "offload/file_system.h"
#include "tests/tools/gpt_checkpoint.h"
#include "tests/tools/program_fixture.h"

namespace tranche::tools {
namespace {

using nlohmann::json;
using test::checkpoint_command;
using test::ProgramResult;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

json parsed(const ProgramResult& result) {
  return json::parse(result.out, nullptr, false);
}

class CheckpointCommand : public testing::Test {
 protected:
  std::string save(const test::SampleOptions& options = {}) const {
    return test::save_gpt(run_, test::tiny_gpt(), options);
  }
  test::TemporaryFolder folder_;
  std::string run_ = folder_.path("run");
};

// --- list ----------------------------------------------------------------------------------------------

TEST_F(CheckpointCommand, ListsNewestFirst) {
  save({.world = 3, .step = 12, .stage = 3});
  save({.step = 8});
  const ProgramResult result = checkpoint_command({"list", run_});
  EXPECT_EQ(result.status, 0) << result.errors;
  const std::size_t eight = result.out.find("\n8 "), twelve = result.out.find("\n12 ");
  ASSERT_NE(twelve, std::string::npos) << result.out;
  EXPECT_LT(eight, twelve) << "step 8 was saved last, after going back\n" << result.out;
  EXPECT_THAT(result.out.substr(eight, twelve - eight), HasSubstr("complete, the newest, 'latest'"));
  EXPECT_THAT(result.out.substr(twelve), AllOf(HasSubstr("    3     3"), HasSubstr("  complete\n")));
  EXPECT_THAT(result.out, Not(HasSubstr("note:")));
}

TEST_F(CheckpointCommand, ListsWhatIsNotComplete) {
  const std::string older = save({.step = 1}), newer = save({.step = 2});
  std::filesystem::remove(newer + "/manifest.json");
  std::filesystem::create_directory(run_ + "/step-00000003.00000000deadbeef.tmp");
  const ProgramResult result = checkpoint_command({"list", run_ + "/"});
  EXPECT_EQ(result.status, 0);
  EXPECT_THAT(result.out, AllOf(HasSubstr("complete, the newest\n"), HasSubstr("not complete: "),
                                HasSubstr("manifest.json is missing"),
                                HasSubstr("step-00000003.00000000deadbeef.tmp: a save under way")));
  const json list = parsed(checkpoint_command({"list", run_, "--json"}));
  ASSERT_EQ(list["checkpoints"].size(), 2u) << list.dump(2);
  EXPECT_EQ(list["newest"], "step-00000001");
  EXPECT_EQ(list["latest"], "step-00000002");
  EXPECT_EQ(list["unfinished"][0], "step-00000003.00000000deadbeef.tmp");
  EXPECT_EQ(list["checkpoints"][0]["complete"], true);
  EXPECT_EQ(list["checkpoints"][0]["path"], older);
  EXPECT_EQ(list["checkpoints"][0]["world"], 1);
  EXPECT_EQ(list["checkpoints"][0]["stage"], 2);
  EXPECT_EQ(list["checkpoints"][1]["complete"], false);
  EXPECT_THAT(list["checkpoints"][1]["problem"].get<std::string>(), HasSubstr("is missing"));
}

TEST_F(CheckpointCommand, ListSaysWhatIsWrongWithLatest) {
  save();
  test::flip(run_ + "/latest", 3);
  EXPECT_THAT(checkpoint_command({"list", run_}).out, HasSubstr("latest is damaged"));
  std::filesystem::remove(run_ + "/latest");
  EXPECT_THAT(checkpoint_command({"list", run_}).out, HasSubstr("latest is missing"));
  folder_.write("run/latest", checkpoint::latest_text("step-00000099"));
  EXPECT_THAT(checkpoint_command({"list", run_}).out, HasSubstr("names step-00000099, which is not there"));
}

TEST_F(CheckpointCommand, ListOfNothing) {
  std::filesystem::create_directory(run_);
  ProgramResult result = checkpoint_command({"list", run_});
  EXPECT_EQ(result.status, 0);
  EXPECT_EQ(result.out, "there are no checkpoints in " + run_ + "\n");
  result = checkpoint_command({"list", folder_.path("none")});
  EXPECT_EQ(result.status, 4);
  EXPECT_THAT(result.errors,
              AllOf(HasSubstr("cannot list checkpoints in"), HasSubstr("there is no such folder")));
  const std::string path = save();
  result = checkpoint_command({"list", path});
  EXPECT_EQ(result.status, 4);
  EXPECT_THAT(result.errors, HasSubstr("it is a checkpoint itself"));
}

TEST_F(CheckpointCommand, JsonOfPathsThatAreNoText) {
  const std::string run = folder_.path("run\xff");
  test::save_gpt(run, test::tiny_gpt());
  EXPECT_EQ(parsed(checkpoint_command({"list", run, "--json"}))["newest"], "step-00000007");
  EXPECT_EQ(parsed(checkpoint_command({"diff", run, run, "--json"}))["equal"], true);
}

// --- verify --------------------------------------------------------------------------------------------

TEST_F(CheckpointCommand, VerifiesOneAndAll) {
  const std::string path = save({.world = 2, .step = 1});
  save({.step = 2});
  ProgramResult result = checkpoint_command({"verify", path});
  EXPECT_EQ(result.status, 0) << result.errors;
  EXPECT_THAT(result.out,
              AllOf(HasSubstr(path + ": 1 checkpoint, every byte as it was written"), HasSubstr("/s)")));
  result = checkpoint_command({"verify", run_});
  EXPECT_EQ(result.status, 0);
  EXPECT_THAT(result.out, HasSubstr("2 checkpoints, every byte"));
  const json verified = parsed(checkpoint_command({"verify", run_, "--json"}));
  EXPECT_EQ(verified["verified"], true);
  EXPECT_EQ(verified["checkpoints"], 2);
  EXPECT_TRUE(verified["damage"].empty());
  std::int64_t bytes = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(run_)) {
    if (entry.path().extension() == ".h5") bytes += static_cast<std::int64_t>(entry.file_size());
  }
  EXPECT_GE(verified["bytes"].get<std::int64_t>(), bytes - 2 * 4096);
  EXPECT_LE(verified["bytes"].get<std::int64_t>(), bytes);
}

TEST_F(CheckpointCommand, VerifyNamesFileTensorAndElements) {
  const std::string path = save({.world = 2});
  const auto manifest = checkpoint::open_manifest(detail::posix_file_system(), path);
  const auto section = static_cast<std::size_t>(manifest.layout.find_section("exp_avg", false));
  const std::int64_t byte = manifest.shards[1].offsets[section] + 4 * 100;
  test::flip(path + "/shard-00001-of-00002.h5", byte);
  // Element 100 of rank 1's first unit, whose first tensor is the token embedding.
  const std::int64_t element = manifest.layout.units[0].buffers[0].instances[0].ranges[1].begin + 100;
  ASSERT_LT(element, 256 * 15);
  ProgramResult result = checkpoint_command({"verify", path});
  EXPECT_EQ(result.status, 4);
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("damaged: shard-00001-of-00002.h5, bytes "),
                    HasSubstr("of exp_avg of tensor transformer.wte.weight"), Not(HasSubstr("every byte"))));
  EXPECT_EQ(result.errors, "tranche: " + path + " is damaged in 1 place\n");
  result = checkpoint_command({"verify", run_, "--json"});
  EXPECT_EQ(result.status, 4);
  const json verified = parsed(result);
  ASSERT_EQ(verified["damage"].size(), 1u) << result.out;
  const json& damage = verified["damage"][0];
  EXPECT_EQ(damage["file"], "step-00000007/shard-00001-of-00002.h5");
  EXPECT_LE(damage["begin"].get<std::int64_t>(), byte);
  EXPECT_GT(damage["end"].get<std::int64_t>(), byte);
}

TEST_F(CheckpointCommand, VerifyNamesEveryKindOfFile) {
  const auto damaged = [&](const std::string& file, std::int64_t byte) {
    const std::string path = save();
    test::flip(path + "/" + file, byte);
    const ProgramResult result = checkpoint_command({"verify", path});
    EXPECT_EQ(result.status, 4) << file;
    return result.out;
  };
  EXPECT_THAT(damaged("manifest.json", 500), AllOf(HasSubstr("manifest.json"), HasSubstr("it is damaged")));
  EXPECT_THAT(damaged("model.h5", 600), AllOf(HasSubstr("model.h5"), HasSubstr("views of whole tensors")));
  EXPECT_THAT(damaged("shard-00000-of-00001.h5", 8), HasSubstr("shard-00000-of-00001.h5, bytes 0 to 16383"));
  const std::string path = save();
  std::filesystem::resize_file(path + "/shard-00000-of-00001.h5", 5000);
  EXPECT_THAT(checkpoint_command({"verify", path}).out,
              AllOf(HasSubstr("has 5000 bytes"), HasSubstr("truncated")));
  test::flip(run_ + "/latest", 1);
  EXPECT_THAT(checkpoint_command({"verify", run_}).out, HasSubstr("damaged: latest"));
}

TEST_F(CheckpointCommand, VerifyOfNothing) {
  ProgramResult result = checkpoint_command({"verify", folder_.path("none")});
  EXPECT_EQ(result.status, 4);
  EXPECT_THAT(result.errors, AllOf(HasSubstr("cannot verify"), HasSubstr("there is nothing of this name")));
  result = checkpoint_command({"verify", folder_.write("file", "x")});
  EXPECT_EQ(result.status, 4);
  EXPECT_THAT(result.errors, HasSubstr("it is a file"));
  std::filesystem::create_directory(run_);
  result = checkpoint_command({"verify", run_});
  EXPECT_EQ(result.status, 4);
  EXPECT_THAT(result.out, HasSubstr("there is no checkpoint here"));
}

// --- show ----------------------------------------------------------------------------------------------

TEST_F(CheckpointCommand, ShowsRunAndTensors) {
  const std::string path = save({.world = 3, .step = 12});
  const ProgramResult result = checkpoint_command({"show", run_});
  EXPECT_EQ(result.status, 0) << result.errors;
  EXPECT_THAT(result.out, AllOf(HasSubstr(path + "\n"), HasSubstr("12 (12 updates applied)"),
                                HasSubstr("48 samples, 768 tokens"), HasSubstr("3 ranks at stage 2"),
                                HasSubstr("GPT-2 of 2 layers, 3 heads, width 15"),
                                HasSubstr("sequences of 16 bytes of some/text.txt"), HasSubstr("\"AdamW\"")));
  EXPECT_THAT(result.out,
              testing::ContainsRegex("transformer.wte.weight +\\[256, 15\\] +3840  0-[12] +fp32 +exp_avg "
                                     "fp32, exp_avg_sq fp32; also lm_head.weight"));
  EXPECT_THAT(result.out,
              HasSubstr("28 tensors, " + std::to_string(test::tiny_gpt().parameters()) + " elements"));
  // "x/latest" means the same as "x".
  EXPECT_EQ(checkpoint_command({"show", run_ + "/latest"}).out, result.out);
}

TEST_F(CheckpointCommand, ShowAsJson) {
  save({.world = 3});
  const json shown = parsed(checkpoint_command({"show", run_, "--json"}));
  EXPECT_EQ(shown["step"], 7);
  EXPECT_EQ(shown["world"], 3);
  EXPECT_EQ(shown["user"]["program"], "tranche");
  EXPECT_EQ(shown["optimizer"]["type"], "AdamW");
  ASSERT_EQ(shown["tensors"].size(), 28u);
  std::int64_t elements = 0;
  for (const json& tensor : shown["tensors"]) {
    std::int64_t at = 0, size = 1;
    for (const json& extent : tensor["shape"]) size *= extent.get<std::int64_t>();
    for (const json& shard : tensor["shards"]) {
      EXPECT_EQ(shard["begin"], at) << tensor;
      at = shard["end"];
    }
    EXPECT_EQ(at, size) << tensor;
    elements += size;
  }
  EXPECT_EQ(elements, test::tiny_gpt().parameters());
}

TEST_F(CheckpointCommand, ShowsTheStagesOfAPipeline) {
  save();
  EXPECT_THAT(checkpoint_command({"show", run_}).out, Not(HasSubstr("\n  pipeline ")));
  EXPECT_FALSE(parsed(checkpoint_command({"show", run_, "--json"})).contains("pipeline_stages"));
  // The axis pipeline is the fastest: neighbours are stages of one data rank.
  save({.world = 4, .mesh = "shard=2, pipeline=2", .step = 8});
  const ProgramResult result = checkpoint_command({"show", run_});
  EXPECT_EQ(result.status, 0) << result.errors;
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("by             4 ranks (shard=2, pipeline=2) at stage 2"),
                    HasSubstr("  pipeline       stage 0, ranks 0, 2: a part of embedding, h.0 to h.1\n"
                              "                 stage 1, ranks 1, 3: a part of embedding\n")));
  save({.world = 4, .mesh = "pipeline=2, shard=2", .step = 9});
  EXPECT_THAT(checkpoint_command({"show", run_}).out, AllOf(HasSubstr("stage 0, ranks 0, 1: a part of"),
                                                            HasSubstr("stage 1, ranks 2, 3: a part of")));
  save({.world = 4, .mesh = "shard=2, pipeline=2", .step = 10});
  const json stages = parsed(checkpoint_command({"show", run_, "--json"}))["pipeline_stages"];
  EXPECT_EQ(
      stages,
      (json::array({{{"ranks", {0, 2}}, {"units", {"h.0", "h.1"}}, {"parts_of_units", {"embedding"}}},
                    {{"ranks", {1, 3}}, {"units", json::array()}, {"parts_of_units", {"embedding"}}}})));
}

TEST_F(CheckpointCommand, ShowsArraysOfTheProgramsOwn) {
  EXPECT_THAT((save(), checkpoint_command({"show", run_})).out, Not(HasSubstr("\narray")));
  const std::string path = save({.world = 2,
                                 .step = 9,
                                 .arrays = {{"average",
                                             DataType::float32,
                                             false,
                                             {Shape{300, 100}},
                                             checkpoint::ranges_between({0, 1000, 30000})},
                                            {"generator", DataType::int64, true, {Shape{3}, Shape{4}}, {}}}});
  const ProgramResult result = checkpoint_command({"show", run_});
  EXPECT_THAT(result.out, HasSubstr("\narray      dtype   of         shape\n"
                                    "average    fp32    all ranks  [300, 100]\n"
                                    "generator  int64   each rank  [3] [4]\n"));
  const json shown = parsed(checkpoint_command({"show", run_, "--json"}));
  EXPECT_EQ(shown["arrays"].dump(),
            R"([{"dtype":"fp32","name":"average","of":"all ranks","shapes":[[300,100]],)"
            R"("shards":[{"begin":0,"end":1000,"rank":0},{"begin":1000,"end":30000,"rank":1}]},)"
            R"({"dtype":"int64","name":"generator","of":"each rank","shapes":[[3],[4]],)"
            R"("shards":[{"begin":0,"end":3,"rank":0},{"begin":0,"end":4,"rank":1}]}])");
  const checkpoint::Manifest manifest = checkpoint::open_manifest(detail::posix_file_system(), path);
  test::flip(path + "/shard-00001-of-00002.h5", manifest.shards[1].array_offsets[0] + 50000);
  const ProgramResult damaged = checkpoint_command({"verify", path});
  EXPECT_EQ(damaged.status, 4);
  EXPECT_THAT(damaged.out + damaged.errors,
              testing::ContainsRegex(": elements [0-9]+ to [0-9]+ of array average\n"));
}

TEST_F(CheckpointCommand, ShowsOneTensor) {
  save({.world = 2});
  const ProgramResult result = checkpoint_command({"show", run_, "--tensor", "lm_head.weight"});
  EXPECT_EQ(result.status, 0) << result.errors;
  const float first = test::sample_value("weight", "transformer.wte.weight", 0);
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("transformer.wte.weight [256, 15] of unit embedding, also lm_head.weight"),
                    HasSubstr("rank 0     elements 0 to "), HasSubstr("in shard-00001-of-00002.h5"),
                    HasSubstr("weight (fp32): " + json(first).dump().substr(0, 6)),
                    HasSubstr("exp_avg_sq (fp32)"), HasSubstr("mean")));
  const ProgramResult wrong = checkpoint_command({"show", run_, "--tensor", "transformer.wte.wait"});
  EXPECT_EQ(wrong.status, 4);
  EXPECT_THAT(wrong.errors,
              AllOf(HasSubstr("no tensor 'transformer.wte.wait'"), HasSubstr("transformer.wte.weight")));
}

TEST_F(CheckpointCommand, ShowsWhatOtherProgramsSaved) {
  save({.user = R"({"mine": [1, 2]})"});
  const ProgramResult result = checkpoint_command({"show", run_});
  EXPECT_EQ(result.status, 0) << result.errors;
  EXPECT_THAT(result.out, HasSubstr("{\"mine\":[1,2]}"));
}

TEST_F(CheckpointCommand, PathsThatAreNoCheckpoints) {
  for (const std::string action : {"show", "export"}) {
    const std::vector<std::string> to = action == "export"
                                            ? std::vector<std::string>{"--to", folder_.path("to")}
                                            : std::vector<std::string>{};
    const auto refused = [&](const std::string& path) {
      std::vector<std::string> arguments{action, path};
      arguments.insert(arguments.end(), to.begin(), to.end());
      const ProgramResult result = checkpoint_command(arguments);
      EXPECT_EQ(result.status, 4) << result.errors;
      return result.errors;
    };
    EXPECT_THAT(refused(folder_.path("none")), HasSubstr("none: there is nothing of this name"));
    EXPECT_THAT(refused(folder_.write("file", "x")), HasSubstr("it is a file, not a folder"));
    EXPECT_THAT(refused(folder_.path("")), HasSubstr("there is no complete checkpoint"));
  }
  // The newest is skipped with a note if it is incomplete.
  save({.step = 1});
  std::filesystem::remove(save({.step = 2}) + "/shard-00000-of-00001.h5");
  const ProgramResult result = checkpoint_command({"show", run_});
  EXPECT_EQ(result.status, 0);
  EXPECT_THAT(result.errors,
              AllOf(HasSubstr("note: passed over"), HasSubstr("shard-00000-of-00001.h5 is missing")));
  EXPECT_THAT(result.out, HasSubstr("1 (1 updates applied)"));
}

// --- diff ----------------------------------------------------------------------------------------------

TEST_F(CheckpointCommand, DiffOfAnyNumbersOfRanks) {
  const std::string one = save({.world = 1, .step = 1}), three = save({.world = 3, .step = 2});
  const std::string other = save({.world = 2, .step = 3, .variant = 1});
  ProgramResult result = checkpoint_command({"diff", one, three});
  EXPECT_EQ(result.status, 0) << result.out << result.errors;
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("(step 1, 1 rank, stage 2)"), HasSubstr("(step 2, 3 ranks, stage 2)"),
                    HasSubstr("84 compared"), HasSubstr("equal to the bit")));
  result = checkpoint_command({"diff", one, run_});  // the newest one there: step 3
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.out, AllOf(HasSubstr("weight of transformer.wte.weight: "), HasSubstr("84 differ")));
  result = checkpoint_command({"diff", one, other, "--json"});
  EXPECT_EQ(result.status, 1);
  const json difference = parsed(result);
  EXPECT_EQ(difference["equal"], false);
  EXPECT_EQ(difference["compared"], 84);
  ASSERT_EQ(difference["differences"].size(), 84u);
  EXPECT_EQ(difference["differences"][0]["tensor"], "transformer.wte.weight");
  EXPECT_EQ(difference["differences"][0]["what"], "values");
  EXPECT_GT(difference["differences"][0]["differing"].get<int>(), 3000);
}

TEST_F(CheckpointCommand, DiffOfOtherModels) {
  const std::string one = save();
  models::GptConfig deeper = test::tiny_gpt();
  deeper.layers = 3;
  deeper.positions = 25;
  const std::string other = test::save_gpt(folder_.path("other"), deeper, {});
  const ProgramResult result = checkpoint_command({"diff", one, other});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.out, AllOf(HasSubstr("weight of transformer.wpe.weight: its shapes differ"),
                                HasSubstr("exp_avg of transformer.h.2.ln_1.weight: only in the second")));
}

TEST_F(CheckpointCommand, DamageIsAnErrorOfDiffNotADifference) {
  const std::string one = save({.step = 1}), two = save({.step = 2});
  const auto manifest = checkpoint::open_manifest(detail::posix_file_system(), two);
  test::flip(two + "/shard-00000-of-00001.h5", manifest.shards[0].offsets[0]);
  const ProgramResult result = checkpoint_command({"diff", one, two});
  EXPECT_EQ(result.status, 4);
  EXPECT_THAT(result.errors,
              AllOf(HasSubstr("shard-00000-of-00001.h5 is damaged"), HasSubstr("transformer.wte.weight")));
}

}  // namespace
}  // namespace tranche::tools
