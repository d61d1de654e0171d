// Plans of replicas of a model: bytes by axis of the mesh and to other nodes, the search, the cost of a step.

#include <gmock/gmock.h>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/tools/program_fixture.h"
#include "tranche/models/gpt.h"
#include "tranche/models/llama.h"
#include "tranche/planner/plan_text.h"
#include "tranche/planner/planner.h"

namespace tranche::planner {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using tools::test::ProgramResult;

PlanRequest gpt_on(int ranks) {
  PlanRequest request;
  request.model.name = "gpt-mini";
  request.model.language = std::make_shared<models::Gpt>(models::GptConfig::preset("gpt-mini"));
  request.sequence = 128;
  request.ranks = ranks;
  request.config.workspace_bytes = 8 << 20;
  return request;
}

/// A model that four ranks of the axis `tensor` can share.
models::GptConfig four_heads() {
  models::GptConfig model = models::GptConfig::preset("gpt-mini");
  model.heads = 4;
  return model;
}

std::vector<std::string> planned_with(const std::vector<std::string>& more) {
  std::vector<std::string> arguments{"plan", "--model", "gpt-mini", "--set", "tranche.workspace=8MiB"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

TEST(PlanOfAMesh, TellsWhatGoesAlongEachAxis) {
  const auto plan_on = [](const std::string& mesh, const std::vector<std::string>& more) {
    std::vector<std::string> arguments = planned_with(
        {"--ranks", "8", "--ranks-per-node", "4", "--rank", "5", "--stage", "2", "--mesh", mesh});
    arguments.insert(arguments.end(), more.begin(), more.end());
    const ProgramResult result = tools::test::run(arguments);
    EXPECT_EQ(result.status, 0) << result.errors;
    return result.out;
  };
  const auto along = [](const json& plan, std::string_view axis, const char* key) {
    for (const json& sent : plan["traffic"]["by_axis"]) {
      if (sent["axis"] == axis) return sent[key].get<std::int64_t>();
    }
    return std::int64_t{0};
  };
  // Each node has a replica, so only sums are sent to the other node.
  json plan = json::parse(plan_on("replicate=2, shard=*", {"--json"}));
  EXPECT_EQ(plan["mesh"], "replicate=2, shard=4");
  EXPECT_EQ(plan["coordinate"], (json{{"replicate", 1}, {"shard", 1}}));
  EXPECT_GT(along(plan, "shard", "bytes"), 0);
  EXPECT_GT(along(plan, "replicate", "bytes"), 0);
  EXPECT_EQ(plan["bytes_to_other_nodes"]["bytes"], along(plan, "replicate", "bytes"));
  EXPECT_EQ(plan["bytes_to_other_nodes"]["exact"], true);
  EXPECT_EQ(plan["traffic_total"]["bytes"],
            along(plan, "shard", "bytes") + along(plan, "replicate", "bytes"));
  EXPECT_EQ(along(plan, "shard", "formula_bytes"), along(plan, "shard", "bytes"));
  // Ranks of the replicas alternate: two of a rank's three peers on the axis of shards are on the other node.
  plan = json::parse(plan_on("shard=4, replicate=2", {"--json", "--set", "tranche.collectives=messages"}));
  EXPECT_EQ(plan["coordinate"], (json{{"replicate", 1}, {"shard", 2}}));
  EXPECT_EQ(plan["bytes_to_other_nodes"]["bytes"], along(plan, "shard", "bytes") / 3 * 2);
  EXPECT_EQ(plan["bytes_to_other_nodes"]["exact"], true);
  plan = json::parse(plan_on("shard=4, replicate=2", {"--json"}));
  // Two of a node's ranks share a replica: their gathers and their common sum cross once.
  EXPECT_LT(plan["bytes_to_other_nodes"]["bytes"], along(plan, "shard", "bytes") / 3 * 2);
  EXPECT_EQ(plan["bytes_to_other_nodes"]["exact"], true);
  EXPECT_THAT(
      plan_on("replicate=2, shard=*", {}),
      AllOf(HasSubstr("5 of 8, 4 on a node"), HasSubstr("replicate=2, shard=4; this is replicate 1, shard 1"),
            HasSubstr("    by shard"), HasSubstr("    by replicate"), HasSubstr(" from its node, "),
            HasSubstr(" of them from this rank"), Not(HasSubstr("at most")), Not(HasSubstr("differs"))));
  EXPECT_THAT(plan_on("replicate=8, shard=1", {}),
              AllOf(HasSubstr("2, boundary reduction (nothing is sharded: all stages hold the same)"),
                    HasSubstr("replicate=8\n")));
}

TEST(PlanOfAMesh, ANodeSendsWhatTheGuideSays) {
  // The table in docs/guides/mesh.md for two nodes of two ranks: bytes per parameter, half of which leave the
  // node.
  const std::vector<std::string> copies{"--mesh", "replicate=2, shard=2"};
  const auto with = [&](const std::string& key) {
    std::vector<std::string> flags = copies;
    flags.insert(flags.end(), {"--set", key});
    return flags;
  };
  const std::vector<std::tuple<std::vector<std::string>, double, double>> cases{
      {{}, 8, 32},
      {copies, 8, 20},
      {with("tranche.replicate=parameters"), 6, 18},
      {with("tranche.replica_sum=step"), 8, 8},
      {{"--set", "tranche.collectives=messages"}, 12, 48}};
  for (const auto& [flags, once, four_times] : cases) {
    for (const auto& [accumulate, law] : {std::pair("1", once), std::pair("4", four_times)}) {
      std::vector<std::string> arguments =
          planned_with({"--ranks", "4", "--ranks-per-node", "2", "--stage", "3", "--dtype", "bf16",
                        "--micro-batch", "1", "--accumulate", accumulate, "--json"});
      arguments.insert(arguments.end(), flags.begin(), flags.end());
      const ProgramResult result = tools::test::run(arguments);
      ASSERT_EQ(result.status, 0) << result.errors;
      const json plan = json::parse(result.out);
      const double parameters = plan["model"]["parameters"];
      // The rest is padding, and small units whose collectives use messages.
      EXPECT_NEAR(plan["bytes_to_other_nodes"]["node_bytes"].get<double>() / (parameters / 2), law,
                  0.01 * law)
          << fmt::format("{} at accumulation {}", fmt::join(flags, " "), accumulate);
    }
  }
}

TEST(PlanOfAMesh, ANodesBytesAreThoseOfItsRanksOrLeftOut) {
  const auto plan_of = [](const std::string& mesh, const std::string& per_node, int rank, bool as_json) {
    std::vector<std::string> arguments = planned_with({"--ranks", "4", "--ranks-per-node", per_node, "--rank",
                                                       std::to_string(rank), "--mesh", mesh, "--stage", "1"});
    if (as_json) arguments.emplace_back("--json");
    const ProgramResult result = tools::test::run(arguments);
    EXPECT_EQ(result.status, 0) << result.errors;
    return result.out;
  };
  int counted = 0;
  for (const char* mesh : {"pipeline=2, tensor=2", "tensor=2, pipeline=2", "replicate=2, tensor=2", "shard=4",
                           "replicate=2, shard=2", "tensor=2, replicate=2", "pipeline=2, shard=2"}) {
    for (const int per_node : {2, 3}) {
      std::map<int, std::int64_t> sums;
      std::vector<json> plans;
      for (int rank = 0; rank < 4; ++rank) {
        plans.push_back(
            json::parse(plan_of(mesh, std::to_string(per_node), rank, true))["bytes_to_other_nodes"]);
        EXPECT_EQ(plans.back()["exact"], true) << mesh;
        sums[rank / per_node] += plans.back()["bytes"].get<std::int64_t>();
      }
      for (int rank = 0; rank < 4; ++rank) {
        const json& plan = plans[static_cast<std::size_t>(rank)];
        if (!plan.contains("node_bytes")) continue;
        ++counted;
        EXPECT_EQ(plan["node_bytes"], sums[rank / per_node]) << mesh << " " << per_node << " " << rank;
      }
    }
  }
  EXPECT_GT(counted, 20);
  EXPECT_THAT(plan_of("tensor=2, pipeline=2", "2", 0, false),
              AllOf(HasSubstr(" from this rank; others of its node may send more or less"),
                    Not(HasSubstr("from its node"))));
}

TEST(PlanOfAMesh, IsKeptByTheSearch) {
  const ProgramResult result = tools::test::run(
      planned_with({"--ranks", "8", "--mesh", "replicate=2, shard=*", "--fit", "80MiB", "--json"}));
  ASSERT_EQ(result.status, 0) << result.errors;
  const json plan = json::parse(result.out);
  EXPECT_EQ(plan["mesh"], "replicate=2, shard=4");
  EXPECT_EQ(plan["config"]["tranche"]["mesh"], "replicate=2, shard=*");
  EXPECT_EQ(plan["fits"], true);
}

TEST(PlanOfAMesh, CostsTheGroupsStepAndTheSumsOverReplicas) {
  PlanRequest request = gpt_on(8);
  request.config.stage = 1;
  request.config.overlap = false;
  const double flat = step_cost(request, {}).exposed;
  request.config.mesh = "replicate=2, shard=4";
  const double copies = step_cost(request, {}).exposed;
  request.ranks = 4;
  request.config.mesh = "";
  const double one_copy = step_cost(request, {}).exposed;
  EXPECT_GT(copies, one_copy) << "their sums over replicas";
  // Half of a quarter of the elements is sent to the other replica: fp32 sums, and the fp32 main gradient
  // back.
  const PlanResult plan = plan_run(request);
  const double sent = static_cast<double>(plan.padded_elements) / 4 / 2 * 8;
  EXPECT_NEAR(copies - one_copy, sent / CostModel().network, 0.02 * sent / CostModel().network)
      << "more parts have more padding";
  EXPECT_GT(flat, one_copy);
}

TEST(PlanOfAMesh, PadsAsTheEngineDoes) {
  // In stage 3 a rank keeps its shard of every buffer, and no other weights.
  struct Case {
    const char* what;
    std::function<void(Config&)> set;
  };
  const Case cases[] = {
      {"AdamW", [](Config&) {}},
      {"Muon", [](Config& config) { config.optimizer.type = "Muon"; }},
      {"block8", [](Config& config) { config.precision.moments = DataType::block8; }},
      {"frozen",
       [](Config& config) {
         config.frozen = {"*.ln_1.*", "*wpe*"};
       }},
      {"LoRA",
       [](Config& config) {
         config.lora.rank = 3;
         config.lora.targets = {"c_attn", "c_fc"};
       }},
  };
  std::mt19937 random(7);
  const auto draw = [&](int most) { return std::uniform_int_distribution<int>(1, most)(random); };
  for (const Case& one : cases) {
    for (int round = 0; round < 4; ++round) {
      const int replicas = draw(3), shards = draw(7);
      PlanRequest request = gpt_on(replicas * shards);
      one.set(request.config);
      request.config.stage = 3;
      request.config.mesh = fmt::format("replicate={}, shard={}", replicas, shards);
      const PlanResult plan = plan_run(request);
      const std::int64_t kept = plan.state.parameters / size_of(request.config.precision.compute);
      EXPECT_EQ(plan.padded_elements, kept * shards) << one.what << " on " << request.config.mesh;
      std::int64_t placed = 0;
      for (const PlacedState& state : plan.placed) placed += state.elements;
      EXPECT_EQ(placed, plan.padded_elements);
    }
  }
}

TEST(PlanOfAMesh, HasAStagingBufferForEachGroupOnGpus) {
  PlanRequest request = gpt_on(4);
  request.model.language = std::make_shared<models::Gpt>(four_heads());
  request.device = DeviceKind::cuda;
  request.config.staging_bytes = 3 << 20;
  const auto staged = [&](const char* mesh) {
    request.config.mesh = mesh;
    return plan_run(request).tier(Tier::device).persistent[Category::communication];
  };
  EXPECT_EQ(staged(""), 3 << 20);
  EXPECT_EQ(staged("replicate=2, shard=2"), 3 * (3 << 20)) << "all ranks', and two groups'";
  EXPECT_EQ(staged("replicate=4, shard=1"), 2 * (3 << 20)) << "a group of one has none";
  EXPECT_EQ(staged("pipeline=4"), 2 * (3 << 20)) << "all ranks', and that of both ends";
  EXPECT_EQ(staged("pipeline=2, shard=2"), 3 * (3 << 20)) << "and that of the stage";
  EXPECT_EQ(staged("replicate=2, pipeline=2"), 4 * (3 << 20))
      << "replicas', and the stage's over all replicas";
  EXPECT_EQ(staged("tensor=4"), 3 * (3 << 20)) << "all ranks', that of rows, and that of whole tensors' sums";
  EXPECT_EQ(staged("shard=2, tensor=2"), 4 * (3 << 20)) << "and the shard's";
  EXPECT_EQ(staged("context=4"), 2 * (3 << 20)) << "all ranks', which share state, and that of attention";
  EXPECT_EQ(staged("shard=2, context=2"), 2 * (3 << 20));
  EXPECT_EQ(staged("context=2, tensor=2"), 5 * (3 << 20))
      << "and those that share state, rows and whole tensors";
  models::LlamaConfig llama = models::LlamaConfig::preset("llama-mini");
  llama.key_value_heads = 2;
  request.model.language = std::make_shared<models::Llama>(llama);
  EXPECT_EQ(staged("tensor=2, shard=2"), 4 * (3 << 20)) << "each rank of tensor has a head of its own";
  EXPECT_EQ(staged("tensor=4"), 4 * (3 << 20)) << "two ranks each share a head of keys and values";
}

// The ranks of a stage in all replicas, which own matrices, are a group of the engine's own.
TEST(PlanOfAMesh, HasAStagingBufferForTheOwnersOfMatricesOnGpus) {
  PlanRequest request = gpt_on(8);
  request.model.language = std::make_shared<models::Gpt>(four_heads());
  request.device = DeviceKind::cuda;
  request.config.staging_bytes = 3 << 20;
  request.config.stage = 1;
  const auto staged = [&](const char* mesh, Replicate replicate, const char* optimizer) {
    request.config.mesh = mesh;
    request.config.replicate = replicate;
    request.config.optimizer.type = optimizer;
    return plan_run(request).tier(Tier::device).persistent[Category::communication];
  };
  const auto of_owners = [&](const char* mesh, Replicate replicate) {
    return staged(mesh, replicate, "Muon") - staged(mesh, replicate, "AdamW");
  };
  EXPECT_EQ(of_owners("replicate=2, pipeline=2, tensor=2", Replicate::parameters), 3 << 20);
  EXPECT_EQ(of_owners("replicate=2, pipeline=2, tensor=2", Replicate::all), 0);
  EXPECT_EQ(of_owners("replicate=2, shard=2, tensor=2", Replicate::parameters), 0)
      << "all ranks are the stage";
  EXPECT_EQ(of_owners("replicate=2, pipeline=2, shard=2", Replicate::parameters), 0);
}

TEST(PlanOfAMesh, TellsWhatLayersSendBetweenNodes) {
  PlanRequest request = gpt_on(4);
  request.model.language = std::make_shared<models::Gpt>(four_heads());
  request.ranks_per_node = 2;
  const auto notes = [&](const char* mesh) {
    request.config.mesh = mesh;
    return plan_run(request).notes;
  };
  EXPECT_THAT(notes("shard=2, tensor=2"),
              testing::Not(testing::Contains(HasSubstr("ranks of tensor are on several nodes"))));
  const auto between = [&](const char* mesh, std::int64_t ranks, std::int64_t elsewhere) {
    const models::GptConfig model = models::GptConfig::preset("gpt-mini");
    // To each other rank: messages of a rank's rows (10 per block, 2 each for embedding and head), and 3
    // numbers per token.
    const std::int64_t to_each =
        (10 * model.layers + 4) * 128 / ranks * model.width * size_of(request.config.precision.compute) +
        3 * 128 * 4;
    return fmt::format(
        "tranche.mesh \"{}\": ranks of tensor are on several nodes: layers wait for {} that a rank sends the "
        "others in each step, and {} of it go to other nodes",
        mesh, format_bytes(to_each * (ranks - 1)), format_bytes(to_each * elsewhere));
  };
  EXPECT_THAT(notes("tensor=4"), testing::Contains(between("tensor=4", 4, 2)));
  EXPECT_THAT(notes("tensor=2, shard=2"), testing::Contains(between("tensor=2, shard=2", 2, 1)));
  const std::int64_t to_each = 6 * models::GptConfig::preset("gpt-mini").layers * 128 / 4 *
                               models::GptConfig::preset("gpt-mini").width *
                               size_of(request.config.precision.compute);
  EXPECT_THAT(notes("context=4"),
              testing::Contains(fmt::format(
                  "tranche.mesh \"context=4\": ranks of context are on several nodes: layers wait for {} "
                  "that a rank sends the others in each step, and {} of it go to other nodes",
                  format_bytes(3 * to_each), format_bytes(2 * to_each))));
  request.ranks_per_node = 3;  // ranks 0 and 1 are on one node, ranks 2 and 3 are not
  EXPECT_THAT(notes("shard=2, tensor=2"), testing::Contains(between("shard=2, tensor=2", 2, 1)));
}

TEST(PlanOfAMesh, SearchesForAllRanksOfTheAxisTensor) {
  PlanRequest request = gpt_on(2);
  models::GptConfig model = models::GptConfig::preset("gpt-mini");
  model.vocabulary = 8193;  // the second rank has one token more than the first
  request.model.language = std::make_shared<models::Gpt>(model);
  request.config.micro_batch_size = 4;
  request.config.mesh = "tensor=2";
  const auto peak = [&](const Config& config, int rank) {
    PlanRequest one = request;
    one.config = config;
    one.rank = rank;
    return plan_run(one).tier(Tier::device).peak;
  };
  FitRequest fit;
  fit.plan = request;
  fit.keep_optimizer_tier = fit.keep_parameters_tier = true;
  fit.budget = peak(request.config, 1);
  for (int round = 0; round < 3; ++round) {
    const FitResult result = find_fit(fit);
    ASSERT_TRUE(result.fits) << round;
    EXPECT_EQ(result.rank, 1);
    EXPECT_EQ(result.plan.tier(Tier::device).peak, peak(result.config, 1));
    EXPECT_LE(peak(result.config, 0), peak(result.config, 1));
    EXPECT_LE(peak(result.config, 1), fit.budget);
    fit.budget = peak(result.config, 1) - 1;
  }

  // Ranks of tensor share the operations, and wait for rows of other ranks.
  CostModel rates;
  rates.network = 1e9;
  const StepCost cut = step_cost(request, rates);
  request.ranks = 1;
  request.config.mesh.clear();
  const StepCost whole = step_cost(request, rates);
  EXPECT_DOUBLE_EQ(cut.compute, whole.compute / 2);
  EXPECT_EQ(whole.exposed, 0);
  const std::int64_t tokens = 4 * 128, messages = 10 * model.layers + 4;
  EXPECT_DOUBLE_EQ(cut.exposed, static_cast<double>(messages * tokens / 2 * model.width *
                                                        size_of(request.config.precision.compute) +
                                                    3 * tokens * 4) /
                                    rates.network);
}

TEST(PlanMesh, ChainsAreRefusedOnGpusAndNotedElsewhere) {
  PlanRequest request = gpt_on(2);
  request.config.mesh = "tensor=2";
  request.config.tensor_sums = TensorSums::chain;
  EXPECT_THAT(
      plan_run(request).notes,
      testing::Contains(HasSubstr("tranche.tensor_sums chain is refused at the start where the machine's "
                                  "products do not add up in ascending order")));
  const PlanResult chained = plan_run(request);
  EXPECT_EQ(chained.formula_elements, std::nullopt);
  EXPECT_EQ(chained.axes.at(MeshAxis::tensor).formula_bytes, std::nullopt);
  EXPECT_THAT(plan_text(request, chained, 0),
              AllOf(HasSubstr("by the formula"), HasSubstr("none for chains\n"), Not(HasSubstr("differs"))));
  EXPECT_TRUE(nlohmann::json::parse(chained.traffic)["formula_elements"].is_null());
  request.device = DeviceKind::cuda;
  std::string text = "accepted";
  try {
    (void)plan_run(request);
  } catch (const ConfigurationError& error) {
    text = error.message();
  }
  EXPECT_EQ(
      text,
      "tranche.tensor_sums: chain: products on GPUs do not add up in ascending order, so that no chain has "
      "the bits of one rank; write rank_order");
}

}  // namespace
}  // namespace tranche::planner
