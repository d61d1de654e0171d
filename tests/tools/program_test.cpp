// The program's output and reports in the absence of errors.

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "tests/tools/program_fixture.h"
#include "tools/arguments.h"
#include "tools/train/run.h"

namespace tranche::tools {
namespace {

using nlohmann::json;
using test::ProgramResult;
using test::TemporaryFolder;
using test::tiny_train;
using testing::AllOf;
using testing::HasSubstr;

TEST(Program, TrainsAndShowsWhatItDoes) {
  const TemporaryFolder folder;
  const ProgramResult result = test::run(
      tiny_train(folder, {"--ngrams", "--sample-bytes", "9", "--log-every", "1", "--eval-every", "2"}));
  ASSERT_EQ(result.status, 0) << result.errors;
  EXPECT_EQ(result.errors, "");
  EXPECT_THAT(result.out, AllOf(HasSubstr("parameters "), HasSubstr("ranks, stage"), HasSubstr("dtypes"),
                                HasSubstr("model state"), HasSubstr("traffic per step"),
                                HasSubstr("matmul peak"), HasSubstr("windows of 16 tokens")));
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("step 3/3"), HasSubstr("step 2: validation loss"), HasSubstr("trained 3 steps"),
                    HasSubstr("bigram"), HasSubstr("memory of rank 0"), HasSubstr("by the formula 0"),
                    HasSubstr("sample of generated text")));
}

TEST(Program, LearnsRegularText) {
  const TemporaryFolder folder;
  const std::string report = folder.path("r.json");
  const ProgramResult result = test::run(tiny_train(folder, {"--steps", "60", "--lr", "0.01", "--micro-batch",
                                                             "8", "--report", report, "--dtype", "fp32"}));
  ASSERT_EQ(result.status, 0) << result.errors;
  const json document = json::parse(test::read_file(report));
  // It starts at 5.5; the letters of the text without their order have an entropy of 2.6.
  EXPECT_LT(document["steps"].back()["loss"], 3.0);
  EXPECT_LT(document["validation_loss"], 3.0);
}

void expect_keys(const json& object, const std::vector<std::pair<const char*, json::value_t>>& keys) {
  for (const auto& [key, type] : keys) {
    ASSERT_TRUE(object.contains(key)) << key;
    const json::value_t found = object[key].type();
    const bool integers = type == json::value_t::number_integer && object[key].is_number_integer();
    const bool numbers = type == json::value_t::number_float && object[key].is_number();
    EXPECT_TRUE(found == type || integers || numbers) << key << " is " << object[key].type_name();
  }
}

TEST(Program, ReportHasEveryKeyOfItsSchema) {
  const TemporaryFolder folder;
  const std::string path = folder.path("r.json");
  const ProgramResult result =
      test::run(tiny_train(folder, {"--report", path, "--digest-every", "2", "--eval-every", "1", "--ngrams",
                                    "--sample-bytes", "3"}));
  ASSERT_EQ(result.status, 0) << result.errors;
  EXPECT_THAT(result.out, HasSubstr("report: " + path));
  const json report = json::parse(test::read_file(path));
  using enum json::value_t;
  expect_keys(report, {{"schema", string},
                       {"version", string},
                       {"world", number_integer},
                       {"stage", number_integer},
                       {"config", object},
                       {"numerics_fingerprint", string},
                       {"model_name", string},
                       {"data", string},
                       {"steps", array},
                       {"validation", array},
                       {"validation_loss", number_float},
                       {"weights_digest", string},
                       {"state_digest", string},
                       {"memory", object},
                       {"traffic", object},
                       {"model", object},
                       {"tokens_per_second", number_float},
                       {"learned_tokens_per_second", number_float},
                       {"matmul_peak_flops", number_float},
                       {"matmul_peak_share", number_float},
                       {"unigram_entropy", number_float},
                       {"bigram_entropy", number_float},
                       {"trigram_entropy", number_float},
                       {"sample", string}});
  ASSERT_EQ(report["steps"].size(), 3u);
  for (const json& step : report["steps"]) {
    expect_keys(step, {{"step", number_integer},
                       {"loss", number_float},
                       {"grad_norm", number_float},
                       {"clip_coefficient", number_float},
                       {"applied", boolean},
                       {"skipped_because", string},
                       {"lr", number_float},
                       {"loss_scale", number_float},
                       {"tokens", number_integer},
                       {"positions", number_integer},
                       {"seconds", number_float},
                       {"between_seconds", number_float},
                       {"update_seconds", number_float},
                       {"cpu_seconds", number_float},
                       {"exposed_gather_seconds", number_float},
                       {"exposed_reduce_seconds", number_float},
                       {"exposed_offload_seconds", number_float},
                       {"exposed_message_seconds", number_float},
                       {"offload", object},
                       {"disk_idle", object},
                       {"offload_bytes", object}});
    expect_keys(step["offload"], {{"to_host_seconds", number_float},
                                  {"from_host_seconds", number_float},
                                  {"host_update_seconds", number_float},
                                  {"disk_seconds", number_float}});
    expect_keys(step["disk_idle"], {{"nothing_asked_seconds", number_float},
                                    {"no_buffer_seconds", number_float},
                                    {"norm_seconds", number_float}});
    expect_keys(step["offload_bytes"], {{"to_host", number_integer},
                                        {"from_host", number_integer},
                                        {"nvme_read", number_integer},
                                        {"nvme_written", number_integer}});
    EXPECT_EQ(step.contains("weights_digest"), step["step"] == 2);
  }
  EXPECT_EQ(report["validation"].size(), 3u);
  EXPECT_EQ(report["weights_digest"].get<std::string>().size(), 32u);
  EXPECT_NE(report["weights_digest"], report["state_digest"]);
  const json& device = report["memory"]["device"];
  expect_keys(device, {{"peak_bytes", number_integer}, {"by_category", object}});
  expect_keys(device["by_category"], {{"parameters", number_integer},
                                      {"gathered", number_integer},
                                      {"gradients", number_integer},
                                      {"optimizer", number_integer},
                                      {"activations", number_integer},
                                      {"communication", number_integer},
                                      {"workspace", number_integer},
                                      {"other", number_integer}});
  expect_keys(report["model"], {{"parameters", number_integer}, {"flops_per_token", number_float}});
  expect_keys(report["traffic"], {{"formula_elements", number_integer},
                                  {"formula_bytes", number_integer},
                                  {"control", object},
                                  {"by_axis", array}});
  expect_keys(report["mesh"], {{"axes", json::value_t::string}, {"coordinates", array}});
  expect_keys(report["placement"], {{"ranks_on_host", number_integer},
                                    {"threads", number_integer},
                                    {"cores", number_integer},
                                    {"host_cores", number_integer},
                                    {"nodes", array}});
  expect_keys(report["placement"]["nodes"][0],
              {{"name", json::value_t::string}, {"ranks", array}, {"bytes_to_other_nodes", number_integer}});
  for (const json& step : report["steps"]) {
    // The update is part of the step; here all processor time of a rank is within its wall-clock time.
    EXPECT_GT(step["update_seconds"], 0);
    EXPECT_LT(step["update_seconds"], step["seconds"]);
    EXPECT_GT(step["cpu_seconds"], 0);
    EXPECT_GE(step["between_seconds"], 0);
  }
  EXPECT_EQ(report["config"]["zero_optimization"]["stage"], 0);
}

TEST(Program, AResumedRunFitsInTheLimitThatAutoUsesUp) {
  const TemporaryFolder folder;
  const std::string swap = folder.path("swap"), saves = folder.path("saves");
  std::filesystem::create_directory(swap);
  const std::vector<std::string> state{"--stage",
                                       "3",
                                       "--dtype",
                                       "bf16",
                                       "--offload-optimizer",
                                       "nvme",
                                       "--nvme-path",
                                       swap,
                                       "--offload-ratio",
                                       "0.5",
                                       "--set",
                                       "tranche.master=split",
                                       "--set",
                                       "tranche.offload_tile=4096"};
  const auto train = [&](std::vector<std::string> more) {
    more.insert(more.end(), state.begin(), state.end());
    const ProgramResult result = test::run(tiny_train(folder, more));
    EXPECT_EQ(result.status, 0) << result.errors;
    return result.out;
  };
  (void)train({"--checkpoint-dir", saves, "--save-every", "1"});
  std::vector<std::string> plan{
      "plan",   "--model",      "gpt-nano", "--sequence", "16", "--set", "tranche.workspace=8MiB",
      "--json", "--host-state", "0"};
  plan.insert(plan.end(), state.begin(), state.end());
  const std::int64_t least = json::parse(test::run(plan).out)["peak"]["host"]["bytes"];
  constexpr std::int64_t reader = (std::int64_t{32} << 20) + 4096, block = 4 * (12 * 32 * 32 + 13 * 32);
  for (const std::int64_t room : {50'000, 150'000, 250'000}) {
    const std::string limit = std::to_string(least + reader + block + 8192 + room);
    const std::string out = train({"--resume", saves + "/step-00000001", "--host-memory", limit});
    EXPECT_THAT(out, AllOf(HasSubstr("because auto found 32."), Not(HasSubstr("tranche.host_state is 0 B"))));
  }
}

TEST(Program, AdviceSearchesWithTheHostStateThatWasAskedFor) {
  const TemporaryFolder folder;
  const auto states = [&](const char* host_state) {
    const Options options = parse_arguments(
        tiny_train(folder, {"--stage", "3", "--offload-optimizer", "nvme", "--nvme-path", folder.path(""),
                            "--host-memory", "1GiB", "--host-state", host_state}));
    std::ostringstream out, errors;
    const Output output{out, errors, false};
    tools::Run run(options, output);
    EXPECT_EQ(run.prepare(), 0) << errors.str();
    const OffloadConfig asked = run.plan_request(1).config.offload;
    EXPECT_EQ(asked.host_state_reason, "");
    return std::pair(asked.host_state, run.settings.config.offload.host_state);
  };
  EXPECT_EQ(states("4096"), std::pair(std::int64_t{4096}, std::int64_t{4096}));
  EXPECT_EQ(states("auto").first, -1);
  EXPECT_GT(states("auto").second, 4096) << "all that is asked for on nvme";
}

TEST(Program, OffloadChangesNoBitAndSaysWhatItMoves) {
  const TemporaryFolder folder;
  const std::string path = folder.path("r.json");
  const auto report = [&](std::vector<std::string> more, std::string* out = nullptr) {
    more.insert(more.end(), {"--report", path, "--stage", "3"});
    const ProgramResult result = test::run(tiny_train(folder, more));
    EXPECT_EQ(result.status, 0) << result.errors;
    if (out != nullptr) *out = result.out;
    return json::parse(test::read_file(path));
  };
  std::string out;
  const json plain = report({}, &out);
  EXPECT_THAT(out, Not(HasSubstr("offload")));
  EXPECT_EQ(plain["steps"].back()["offload_bytes"]["to_host"], 0);
  const std::string swap = folder.path("swap");
  std::filesystem::create_directory(swap);
  const json cpu = report(
      {"--offload-optimizer", "cpu", "--offload-param", "cpu", "--set", "wall_clock_breakdown=true"}, &out);
  EXPECT_THAT(
      out, AllOf(HasSubstr("between tiers in a step, rank 0: "), HasSubstr("offload: "), HasSubstr("bound "),
                 HasSubstr("in host memory ("), HasSubstr("host link per step"), Not(HasSubstr("nvme"))));
  const std::vector<std::string> on_nvme{"--offload-optimizer", "nvme", "--offload-param", "nvme",
                                         "--nvme-path",         swap,   "--host-state"};
  const auto with_host_state = [&](const char* bytes) {
    std::vector<std::string> flags = on_nvme;
    flags.emplace_back(bytes);
    return report(flags, &out);
  };
  const json automatic = with_host_state("auto");
  EXPECT_THAT(
      out, AllOf(HasSubstr(" of state that is asked for on nvme stay in host memory: tranche.host_state is "),
                 HasSubstr(", because auto found "), HasSubstr("; 0 puts all of this state on the disk"),
                 Not(HasSubstr("on nvme ("))));
  EXPECT_EQ(automatic["steps"].back()["offload_bytes"]["nvme_read"], 0);
  const json partly = with_host_state("200KiB");
  EXPECT_GT(partly["steps"].back()["offload_bytes"]["nvme_read"], 0);
  const json nvme = with_host_state("0");
  EXPECT_GT(nvme["steps"].back()["offload_bytes"]["nvme_read"],
            partly["steps"].back()["offload_bytes"]["nvme_read"]);
  EXPECT_THAT(out, AllOf(HasSubstr(" read from nvme, "), HasSubstr("swap file"), HasSubstr("on nvme ("),
                         HasSubstr("nvme per step")));
  for (const json& other : {cpu, automatic, partly, nvme}) {
    EXPECT_EQ(other["weights_digest"], plain["weights_digest"]);
    EXPECT_EQ(other["state_digest"], plain["state_digest"]);
    EXPECT_EQ(other["validation_loss"], plain["validation_loss"]);
    EXPECT_GT(other["steps"].back()["offload_bytes"]["to_host"].get<std::int64_t>(), 0);
    // The sum is over all steps, because an update that ends after the end of its step counts to the next.
    double updates = 0;
    for (const auto& step : other["steps"]) {
      updates += step["offload"]["host_update_seconds"].get<double>();
    }
    EXPECT_GT(updates, 0);
  }
  EXPECT_EQ(cpu["steps"].back()["offload_bytes"]["nvme_read"], 0);
  EXPECT_GT(nvme["steps"].back()["offload_bytes"]["nvme_written"].get<std::int64_t>(), 0);
}

TEST(Program, WallClockBreakdownHasTheTimesOfTheParts) {
  const TemporaryFolder folder;
  const auto train = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments{"--report", folder.path("r.json"), "--stage",
                                       "3",        "--accumulate",        "2"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return test::run(tiny_train(folder, arguments));
  };
  const ProgramResult with = train({"--set", "wall_clock_breakdown=true"});
  const json report = json::parse(test::read_file(folder.path("r.json")));
  EXPECT_THAT(with.out, AllOf(HasSubstr("\nstep 1 in ms: forward "), HasSubstr("\nstep 3 in ms: forward ")));
  for (const json& step : report["steps"]) {
    const double forward = step["forward_seconds"], backward = step["backward_seconds"];
    EXPECT_GT(forward, 0);
    EXPECT_GT(backward, 0);
    EXPECT_LE(forward + backward + step["update_seconds"].get<double>(),
              step["seconds"].get<double>() * 1.001);
  }
  const ProgramResult without = train({});
  EXPECT_THAT(without.out, Not(HasSubstr("in ms: forward")));
  const json plain = json::parse(test::read_file(folder.path("r.json")));
  EXPECT_FALSE(plain["steps"][0].contains("forward_seconds"));
  EXPECT_EQ(plain["weights_digest"], report["weights_digest"]);
}

TEST(Program, SameSeedSameBitsOtherSeedOthers) {
  const TemporaryFolder folder;
  const auto digest = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments{"--report", folder.path("r.json")};
    arguments.insert(arguments.end(), more.begin(), more.end());
    EXPECT_EQ(test::run(tiny_train(folder, arguments)).status, 0);
    return json::parse(test::read_file(folder.path("r.json")))["weights_digest"].get<std::string>();
  };
  const std::string one = digest({});
  EXPECT_EQ(digest({}), one);
  EXPECT_EQ(digest({"--threads", "2"}), one) << "sums do not depend on threads";
  EXPECT_EQ(digest({"--eval-every", "1", "--max-seconds", "1000"}), one);
  EXPECT_NE(digest({"--seed", "7"}), one);
}

TEST(Program, StopsByTimeButNotBeforeTheLeastSteps) {
  const TemporaryFolder folder;
  const auto steps = [&](const char* least) {
    const std::string path = folder.path("r.json");
    EXPECT_EQ(test::run(tiny_train(folder, {"--steps", "30", "--max-seconds", "0.000001", "--min-steps",
                                            least, "--report", path}))
                  .status,
              0);
    return json::parse(test::read_file(path))["steps"].size();
  };
  EXPECT_EQ(steps("1"), 1u);
  EXPECT_EQ(steps("7"), 7u);
}

TEST(Program, WritesATraceThatParses) {
  const TemporaryFolder folder;
  ASSERT_EQ(test::run(tiny_train(folder, {"--trace", folder.path("t.json")})).status, 0);
  const json trace = json::parse(test::read_file(folder.path("t.json")));
  EXPECT_TRUE(trace.contains("traceEvents"));
}

TEST(Program, TrainsOnTokensOfLlmcAndNanoGpt) {
  const TemporaryFolder folder;
  std::vector<std::uint16_t> tokens;
  for (int i = 0; i < 2000; ++i) tokens.push_back(static_cast<std::uint16_t>(i * i % 251));
  const auto loss = [&](const std::string& path) {
    const std::string report = folder.path("r.json");
    EXPECT_EQ(test::run(tiny_train(folder, {"--data", path, "--report", report})).status, 0);
    return json::parse(test::read_file(report))["steps"].back()["loss"].get<double>();
  };
  const double one = loss(folder.write("l.bin", test::llmc_tokens(tokens)));
  EXPECT_EQ(loss(folder.write("n.bin", test::nanogpt_tokens(tokens))), one) << "the same tokens";
}

TEST(Program, EvaluatesTheInitialWeights) {
  const TemporaryFolder folder;
  const std::string text = folder.write("a.txt", test::some_text(3000));
  const ProgramResult result = test::run(
      {"evaluate", "--model", "gpt-nano", "--data", text, "--ngrams", "--report", folder.path("r.json")});
  ASSERT_EQ(result.status, 0) << result.errors;
  EXPECT_THAT(result.out, AllOf(HasSubstr("validation loss of the initial weights"), HasSubstr("trigram")));
  const json report = json::parse(test::read_file(folder.path("r.json")));
  // Initial weights with deviation 0.02 have almost no effect: the loss is near that of 256 equally likely
  // bytes.
  EXPECT_NEAR(report["validation_loss"].get<double>(), 5.545, 0.1);
  EXPECT_TRUE(report["steps"].empty());
}

TEST(Program, ASearchSaysOfNoKeyThatItHasNoEffect) {
  const std::vector<std::string> plan{"plan", "--model", "gpt-nano", "--nvme-space", "1GiB"};
  EXPECT_THAT(test::run(plan).out, HasSubstr("tranche.nvme_space has no effect: nothing is on nvme"));
  std::vector<std::string> search = plan;
  search.insert(search.end(), {"--fit", "1GiB"});
  const ProgramResult found = test::run(search);
  EXPECT_EQ(found.status, 0) << found.errors;
  EXPECT_EQ(found.out.find("no effect"), found.out.npos) << found.out;
  search = {"plan", "--model", "gpt-nano", "--fit", "1GiB", "--set", "tranche.gather_for=step"};
  EXPECT_THAT(test::run(search).out, HasSubstr("tranche.gather_for: step has no effect: at stage 0"))
      << "the search has none of that, as the setting was dropped";
}

TEST(Program, EvaluatesHeldOutDataWithoutTrainingData) {
  const TemporaryFolder folder;
  const std::string text = folder.write("a.txt", test::some_text(3000));
  const auto evaluate = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments{"evaluate",
                                       "--model",
                                       "gpt-nano",
                                       "--validation-data",
                                       text,
                                       "--sequence",
                                       "16",
                                       "--threads",
                                       "1",
                                       "--debug-peak-seconds",
                                       "0.01",
                                       "--set",
                                       "tranche.workspace=8MiB"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return test::run(arguments);
  };
  const auto loss = [](const ProgramResult& result) {
    EXPECT_EQ(result.status, 0) << result.errors;
    return result.out.substr(std::min(result.out.find("validation loss"), result.out.size()));
  };
  const ProgramResult alone = evaluate({});
  EXPECT_THAT(alone.out, HasSubstr("windows of 16 tokens, 187 held out, 187 of them evaluated"));
  EXPECT_THAT(loss(alone), HasSubstr("over 2992 tokens"));
  EXPECT_EQ(loss(alone), loss(evaluate({"--data", folder.write("b.txt", test::some_text(500))})));
  EXPECT_THAT(evaluate({"--ngrams"}).errors,
              HasSubstr("--ngrams counts the n-grams of --data; give it the text"));
  EXPECT_THAT(test::run({"evaluate", "--model", "gpt-nano"}).errors, HasSubstr("no data: give --data"));
}

TEST(Program, InfoIsATableOrJson) {
  const ProgramResult table = test::run({"info"});
  EXPECT_EQ(table.status, 0);
  EXPECT_THAT(table.out, AllOf(HasSubstr("MPI"), HasSubstr("CUDA"), HasSubstr("bf16"), HasSubstr("threads")));
  const json info = json::parse(test::run({"info", "--json"}).out);
  for (const char* key : {"version", "build_type", "compiler", "mpi", "nccl", "hdf5", "cuda", "libraries",
                          "cpu", "matmul", "threads"}) {
    EXPECT_TRUE(info.contains(key)) << key;
  }
  EXPECT_TRUE(info["matmul"].contains("bf16"));
  EXPECT_FALSE(info.contains("mesh"));
  const std::vector<std::string> on_a_mesh{"info", "--mesh", "replicate=2, shard=*", "--ranks", "6"};
  EXPECT_THAT(test::run(on_a_mesh).out, HasSubstr("  rank 4         replicate 1, shard 1\n"));
  std::vector<std::string> as_json = on_a_mesh;
  as_json.emplace_back("--json");
  const json mesh = json::parse(test::run(as_json).out)["mesh"];
  EXPECT_EQ(mesh["axes"], "replicate=2, shard=3");
  EXPECT_EQ(mesh["coordinates"][4], (json{{"replicate", 1}, {"shard", 1}}));
  const ProgramResult refused = test::run({"info", "--mesh", "replicate=4", "--ranks", "6"});
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(refused.errors, HasSubstr("replicate=4"));
  EXPECT_THAT(test::run({"info", "--mesh", "shard=*", "--ranks", "65537"}).errors,
              HasSubstr("--ranks is 65537; the mesh of at most 65536 is shown"));
  EXPECT_EQ(test::run({"--version"}).status, 0);
}

}  // namespace
}  // namespace tranche::tools
