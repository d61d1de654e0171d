// The search for a mesh: its bounds, its choices, and runs of the proposed configurations.

#include "tranche/planner/mesh_search.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <vector>

#include "engine/pipeline_order.h"
#include "pipeline/schedule/simulate.h"
#include "planner/levers.h"
#include "tests/core/error_text.h"
#include "tests/core/sweep.h"
#include "tests/tools/program_fixture.h"
#include "tranche/comm/backends.h"
#include "tranche/core/random.h"
#include "tranche/models/gpt.h"
#include "tranche/models/llama.h"
#include "tranche/planner/machine.h"
#include "tranche/training/batch_feeder.h"

namespace tranche::planner {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;
using tools::test::ProgramResult;
using tools::test::TemporaryFolder;
using tranche::test::message_of;

models::GptConfig small_gpt(int layers, int width) {
  models::GptConfig gpt = models::GptConfig::preset("gpt-nano");
  gpt.layers = layers;
  gpt.heads = 4;
  gpt.width = width;
  gpt.vocabulary = 64;
  gpt.positions = 32;
  return gpt;
}

MeshSearchRequest search_of(const models::GptConfig& gpt, int ranks, std::int64_t budget) {
  MeshSearchRequest request;
  PlanRequest& plan = request.fit.plan;
  plan.model.name = "small";
  plan.model.language = std::make_shared<models::Gpt>(gpt);
  plan.sequence = 32;
  plan.ranks = ranks;
  plan.config.workspace_bytes = 1 << 19;
  plan.config.staging_bytes = 1 << 16;
  plan.config.precision.compute = plan.config.precision.communication = DataType::float32;
  plan.config.micro_batch_size = 1;
  plan.config.accumulation_steps = 2;
  request.fit.budget = budget;
  request.fit.rates.network = 1e8;
  request.fit.rates.operations = 1e11;
  return request;
}

/// The settings of a trial that determine the choice.
auto settings_of(const MeshTrial& one) {
  return std::tuple(one.mesh, one.schedule, one.trial.stage, one.trial.reduction, one.trial.checkpoint_every,
                    one.trial.vocabulary_chunk, one.trial.optimizer, one.trial.parameters,
                    one.trial.activations, one.trial.micro_batch);
}

std::int64_t sum_of(const SearchCounts& counts) {
  return counts.by_state + counts.by_activations + counts.by_micro_batch + counts.by_time + counts.refused +
         counts.planned;
}

TEST(MeshSearch, TriesEveryMeshOfTheRanksAndKeepsWhatIsGiven) {
  const std::vector<std::string> all = all_meshes(8);
  EXPECT_EQ(all.size(), 35U) << "8 = 2 x 2 x 2 shared out over five axes";
  EXPECT_EQ(all.front(), "shard=8") << "the simplest";
  EXPECT_THAT(all, testing::Contains("replicate=2, pipeline=2, context=2"));
  for (const std::string& mesh : all) EXPECT_EQ(Mesh::parse(mesh, 8).ranks(), 8) << mesh;
  EXPECT_THAT(all_meshes(8, "tensor=2"), AllOf(testing::SizeIs(10), Each(HasSubstr("tensor=2"))));
  EXPECT_THAT(all_meshes(8, "shard=*, tensor=2"), testing::SizeIs(10));
  EXPECT_THAT(all_meshes(8, "tensor=1, context=1, replicate=1"),
              testing::ElementsAre("shard=8", "pipeline=2, shard=4", "pipeline=4, shard=2", "pipeline=8"));
  EXPECT_THAT(all_meshes(1), testing::ElementsAre("shard=1"));
  EXPECT_EQ(searched_axes("search"), "");
  EXPECT_EQ(searched_axes("search, tensor=2,pipeline=4"), "tensor=2, pipeline=4");
  EXPECT_EQ(searched_axes("tensor=2"), std::nullopt);
  EXPECT_EQ(
      message_of<ConfigurationError>([] { (void)all_meshes(8, "tensor=3"); }),
      "mesh \"tensor=3, replicate=*\": tensor 3 does not divide the 8 ranks, so replicate cannot take the "
      "rest; the closest mesh of 8 ranks is \"tensor=4, replicate=*\"");
}

/// The most device memory of a rank in the whole step of a trial, which has planned a few micro-batches.
std::int64_t peak_of_step(const MeshSearchRequest& request, const MeshTrial& one) {
  const FitTrial& trial = one.trial;
  PlanRequest plan = request.fit.plan;
  plan.config.mesh = one.mesh;
  if (!one.schedule.empty()) plan.config.pipeline_schedule = one.schedule;
  plan.config.accumulation_steps = trial.micro_batch * trial.accumulation;
  plan.config = with_levers(plan.config,
                            {trial.stage, trial.reduction, trial.checkpoint_every, trial.vocabulary_chunk,
                             trial.optimizer, trial.parameters, trial.activations},
                            trial.micro_batch);
  std::int64_t most = 0;
  for (plan.rank = 0; plan.rank < plan.ranks; ++plan.rank) {
    most = std::max(most, plan_run(plan).tier(Tier::device).peak);
  }
  return most;
}

/// The most micro-batches that each stage of the trial's pipeline holds at once; none without a pipeline.
std::vector<std::int64_t> held_at_once(const MeshSearchRequest& request, const MeshTrial& one) {
  if (one.schedule.empty()) return {};
  Config config = request.fit.plan.config;
  config.pipeline_schedule = one.schedule;
  config.accumulation_steps = one.trial.accumulation;
  const int stages = Mesh::parse(one.mesh, request.fit.plan.ranks).size(MeshAxis::pipeline);
  return pipeline::peak_activations(detail::schedule_of(config, stages));
}

/// The bounds of the search rely on these facts about all plans. In the order of an exhaustive search their
/// seconds ascend. None takes less memory than its bound. None takes less than the same with the smallest
/// micro-batch, of which every stage holds at most as many, unless the step is one micro-batch and its
/// offloaded state takes the main gradient away.
void expect_what_bounds_assume(const MeshSearchRequest& request, const MeshSearchResult& whole) {
  std::map<decltype(settings_of(MeshTrial())), MeshTrial> smallest;
  const auto without_micro_batch = [](MeshTrial one) {
    one.trial.micro_batch = 0;
    return settings_of(one);
  };
  for (const MeshTrial& one : whole.planned) {
    if (one.trial.micro_batch == 1) smallest[without_micro_batch(one)] = one;
  }
  double seconds = 0;
  for (const MeshTrial& one : whole.planned) {
    SCOPED_TRACE(fmt::format("{} {} stage {} {} k {} micro-batch {}", one.mesh, one.schedule, one.trial.stage,
                             name_of(one.trial.reduction), one.trial.checkpoint_every,
                             one.trial.micro_batch));
    EXPECT_LE(one.bound, one.trial.peak);
    EXPECT_LE(seconds, one.seconds);
    seconds = one.seconds;
    const auto least = smallest.find(without_micro_batch(one));
    if (least == smallest.end() ||
        (one.trial.optimizer != OffloadTier::none && one.trial.accumulation == 1)) {
      continue;
    }
    const std::vector<std::int64_t> held = held_at_once(request, one),
                                    of_least = held_at_once(request, least->second);
    if (!std::equal(held.begin(), held.end(), of_least.begin(), std::greater_equal<>())) continue;
    EXPECT_LE(least->second.trial.peak, one.trial.peak);
  }
}

/// Expects the pruned search to choose what the exhaustive one does, which plans everything in the order of
/// its seconds. The budgets are at these fractions between the smallest and the largest memory of a plan.
void expect_equal_searches(MeshSearchRequest request, const std::vector<double>& shares) {
  request.exhaustive = true;
  const MeshSearchResult whole = search_meshes(request);
  ASSERT_TRUE(whole.fits);
  EXPECT_EQ(whole.counts.planned + whole.counts.refused, whole.counts.all);
  expect_what_bounds_assume(request, whole);
  std::int64_t most = 0, least = request.fit.budget;
  for (const MeshTrial& one : whole.planned) {
    most = std::max(most, one.trial.peak);
    least = std::min(least, one.trial.peak);
  }
  request.exhaustive = false;
  std::int64_t planned = 0;
  for (const double share : shares) {
    const std::int64_t budget = least + static_cast<std::int64_t>(share * static_cast<double>(most - least));
    SCOPED_TRACE(budget);
    request.fit.budget = budget;
    const MeshSearchResult pruned = search_meshes(request);
    EXPECT_EQ(pruned.counts.all, whole.counts.all);
    EXPECT_EQ(sum_of(pruned.counts), pruned.counts.all);
    // The fastest whose whole step fits: a step may take more than the trial of a few micro-batches.
    const auto expected = std::find_if(whole.planned.begin(), whole.planned.end(), [&](const MeshTrial& one) {
      const bool chosen = pruned.fits && settings_of(one) == settings_of(pruned.chosen);
      return one.trial.peak <= budget && (chosen || peak_of_step(request, one) <= budget);
    });
    ASSERT_EQ(pruned.fits, expected != whole.planned.end());
    planned += pruned.counts.planned;
    if (!pruned.fits) continue;
    EXPECT_LT(pruned.counts.planned, whole.counts.planned / 2);
    EXPECT_EQ(settings_of(pruned.chosen), settings_of(*expected));
    EXPECT_EQ(pruned.chosen.seconds, expected->seconds);
    EXPECT_GE(pruned.chosen.trial.peak, expected->trial.peak) << "whole steps may pack a little worse";
    EXPECT_LE(pruned.chosen.trial.peak, budget);
  }
  std::printf("measured: %lld of %lld configurations planned by the exhaustive search, %lld by %zu others\n",
              static_cast<long long>(whole.counts.planned), static_cast<long long>(whole.counts.all),
              static_cast<long long>(planned), shares.size());
}

TEST(MeshSearch, BoundsLeaveNothingOutThatWouldBeChosen) {
  MeshSearchRequest request = search_of(small_gpt(2, 32), 8, std::int64_t{1} << 40);
  request.fit.keep_optimizer_tier = request.fit.keep_parameters_tier = true;
  request.fit.plan.config.pipeline_schedule = "zb-h1";
  request.fit.plan.config.accumulation_steps = 1;
  request.axes = tranche::test::sanitized ? "context=1, replicate=1, tensor=1" : "context=1, replicate=1";
  expect_equal_searches(request, {0, 0.02, 0.1, 0.4});
}

// Two stages hold two micro-batches of one sample, or one of two, which takes less memory.
TEST(MeshSearch, ALargerMicroBatchMayFitWhereTheSmallestDoesNot) {
  MeshSearchRequest request = search_of(small_gpt(2, 32), 8, std::int64_t{1} << 40);
  Config& config = request.fit.plan.config;
  config.pipeline_schedule = "zb-h1";
  config.accumulation_steps = 1;
  config.reduction = ReductionPolicy::micro_batch;
  request.fit.keep_stage = request.fit.keep_optimizer_tier = request.fit.keep_parameters_tier = true;
  request.axes = "pipeline=2, shard=4";
  request.exhaustive = true;
  const MeshSearchResult whole = search_meshes(request);
  request.exhaustive = false;
  const auto smallest = std::min_element(
      whole.planned.begin(), whole.planned.end(),
      [](const MeshTrial& one, const MeshTrial& other) { return one.trial.peak < other.trial.peak; });
  EXPECT_EQ(smallest->trial.micro_batch, 2);
  for (const MeshTrial& budget : whole.planned) {
    request.fit.budget = budget.trial.peak;
    const auto expected = std::find_if(whole.planned.begin(), whole.planned.end(), [&](const MeshTrial& one) {
      return one.trial.peak <= request.fit.budget;
    });
    const MeshSearchResult pruned = search_meshes(request);
    ASSERT_TRUE(pruned.fits) << request.fit.budget;
    EXPECT_EQ(settings_of(pruned.chosen), settings_of(*expected)) << request.fit.budget;
  }
}

// All five axes and all ZeRO stages: every schedule, adapters whose state may go to every tier, Muon with two
// micro-batches. Plans of the exhaustive search take these tests minutes.
class MeshSearchSlow : public testing::TestWithParam<int> {};
TEST_P(MeshSearchSlow, BoundsLeaveNothingOutThatWouldBeChosen) {
  MeshSearchRequest request = search_of(small_gpt(2, 32), 8, std::int64_t{1} << 40);
  Config& config = request.fit.plan.config;
  request.fit.keep_optimizer_tier = request.fit.keep_parameters_tier = GetParam() != 1;
  config.accumulation_steps = GetParam() == 2 ? 2 : 1;
  if (GetParam() > 0) config.pipeline_schedule = GetParam() == 1 ? "zb-h1" : "1f1b";
  if (GetParam() == 1) config.lora.rank = 2;
  if (GetParam() == 2) config.optimizer.type = "Muon";
  expect_equal_searches(request, {0, 0.01, 0.05, 0.2, 0.6});
}
INSTANTIATE_TEST_SUITE_P(Models, MeshSearchSlow, testing::Values(0, 1, 2));

TEST(MeshSearch, ChoosesDataRanksWhereTheModelFits) {
  MeshSearchRequest request = search_of(small_gpt(4, 32), 8, std::int64_t{1} << 30);
  request.fit.rates.network = 1e11;
  const MeshSearchResult result = search_meshes(request);
  ASSERT_TRUE(result.fits);
  EXPECT_EQ(result.chosen.mesh, "shard=8");
  EXPECT_EQ(result.chosen.trial.stage, 0);
  EXPECT_EQ(result.counts.planned, 2) << "the smallest micro-batch, and the first that is tried";
  EXPECT_EQ(sum_of(result.counts), result.counts.all);
  EXPECT_EQ(std::count_if(result.meshes.begin(), result.meshes.end(),
                          [](const SearchedMesh& one) { return one.verdict == "chosen"; }),
            1);
}

TEST(MeshSearch, ChoosesStage3WhereTheStateDoesNotFit) {
  MeshSearchRequest request = search_of(small_gpt(8, 64), 8, std::int64_t{1} << 40);
  request.fit.keep_optimizer_tier = request.fit.keep_parameters_tier = true;
  request.fit.plan.config.accumulation_steps = 1;  // a pipeline would be idle
  request.fit.plan.sequence = 8;                   // so that activations are small
  request.fit.rates.network = 1e11;
  // The budget is a third of the state of stage 0, which is 16 bytes per parameter.
  request.fit.plan.config.stage = 0;
  request.fit.budget = plan_run(request.fit.plan).tier(Tier::device).persistent.total() / 3;
  const MeshSearchResult result = search_meshes(request);
  ASSERT_TRUE(result.fits);
  EXPECT_EQ(result.chosen.mesh, "shard=8");
  EXPECT_EQ(result.chosen.trial.stage, 3);
  EXPECT_GT(result.counts.by_state, 0);
  EXPECT_LE(result.chosen.trial.peak, request.fit.budget);
}

TEST(MeshSearch, ChoosesTensorWhereALayerDoesNotFit) {
  models::GptConfig gpt = small_gpt(2, 128);
  MeshSearchRequest request = search_of(gpt, 8, std::int64_t{1} << 40);
  request.fit.keep_optimizer_tier = request.fit.keep_parameters_tier = true;
  // A gathered block with its gradient needs more than all shards.
  PlanRequest plan = request.fit.plan;
  plan.config.stage = 3;
  plan.config.activation_checkpointing = true;
  request.fit.budget = plan_run(plan).tier(Tier::device).peak * 11 / 20;
  const MeshSearchResult result = search_meshes(request);
  ASSERT_TRUE(result.fits);
  EXPECT_GT(Mesh::parse(result.chosen.mesh, 8).size(MeshAxis::tensor), 1) << result.chosen.mesh;
}

TEST(MeshSearch, ChoosesAPipelineBetweenNodesAndShardsWithin) {
  MeshSearchRequest request = search_of(models::GptConfig::preset("gpt2"), 16, std::int64_t{70} << 30);
  PlanRequest& plan = request.fit.plan;
  plan.sequence = 1024;
  plan.ranks_per_node = 8;
  plan.device = DeviceKind::cuda;
  plan.config.precision.compute = plan.config.precision.communication = DataType::bfloat16;
  plan.config.workspace_bytes = plan.config.staging_bytes = 8 << 20;
  plan.config.accumulation_steps = 2;
  request.axes = "tensor=1, context=1";
  ProjectionRequest machine;
  machine.machine = load_machine("dgx-h100");
  machine.network = LinkRate{100e6, 1e-4};  // a hundredth of a fast network
  request.machine = machine;
  request.fit.rates.operations = 300e12;
  const MeshSearchResult slow = search_meshes(request);
  ASSERT_TRUE(slow.fits);
  const Mesh chosen = Mesh::parse(slow.chosen.mesh, 16);
  EXPECT_EQ(chosen.size(MeshAxis::pipeline), 2) << slow.chosen.mesh;
  EXPECT_EQ(chosen.size(MeshAxis::shard) * chosen.size(MeshAxis::replicate), 8) << slow.chosen.mesh;
  EXPECT_GT(slow.counts.projected, 1);
  request.machine->network = LinkRate{400e9, 1e-6};
  const MeshSearchResult fast = search_meshes(request);
  ASSERT_TRUE(fast.fits);
  EXPECT_LT(fast.chosen.seconds, slow.chosen.seconds);
}

TEST(MeshSearch, WhereNothingFitsNamesTheMeshThatLacksLeast) {
  MeshSearchRequest request = search_of(small_gpt(2, 32), 2, 590 << 10);
  request.fit.plan.config.pipeline_schedule = "zb-h1";
  const MeshSearchResult result = search_meshes(request);
  EXPECT_FALSE(result.fits);
  EXPECT_GT(result.chosen.missing, 0);
  EXPECT_EQ(result.chosen.missing, result.plan.tier(Tier::device).peak - request.fit.budget);
  EXPECT_EQ(sum_of(result.counts), result.counts.all);
  const std::int64_t budget = request.fit.budget;
  request.fit.budget = budget + result.chosen.missing;
  EXPECT_TRUE(search_meshes(request).fits) << "what it takes is enough";
  request.fit.budget = budget + result.chosen.missing * 9 / 10;
  EXPECT_FALSE(search_meshes(request).fits) << "another mesh lacks less";
}

TEST(MeshSearch, NeedsABudget) {
  for (const std::int64_t budget : {0, -1}) {
    EXPECT_EQ(
        message_of<InvalidArgument>([&] { (void)search_meshes(search_of(small_gpt(2, 32), 2, budget)); }),
        "a budget of " + std::to_string(budget) + " bytes; it must be at least 1");
  }
}

TEST(MeshSearch, HonoursWhatIsGivenAndLeavesOutWhatIsRefused) {
  MeshSearchRequest request = search_of(small_gpt(4, 32), 8, std::int64_t{1} << 30);
  request.fit.plan.config.world_size_invariant = true;
  request.fit.plan.config.train_batch_size = 16;
  request.fit.plan.config.accumulation_steps = 0;
  for (const MeshTrial& one : search_meshes(request).planned) {
    EXPECT_EQ(Mesh::parse(one.mesh, 8).size(MeshAxis::replicate), 1) << one.mesh;
  }
  request = search_of(small_gpt(4, 32), 8, std::int64_t{1} << 30);
  request.fit.keep_stage = true;
  request.fit.plan.config.stage = 2;
  request.fit.plan.config.pipeline_schedule = "zb-h1";
  request.axes = "pipeline=2";
  const MeshSearchResult result = search_meshes(request);
  ASSERT_TRUE(result.fits);
  EXPECT_EQ(result.chosen.trial.stage, 2);
  EXPECT_EQ(result.chosen.schedule, "zb-h1");
  // Three samples on eight ranks: no mesh with 2, 4 or 8 data ranks can share them.
  request = search_of(small_gpt(4, 32), 8, std::int64_t{1} << 30);
  request.fit.plan.config.mesh = "pipeline=4, tensor=2";
  request.fit.plan.config.accumulation_steps = 3;
  for (const SearchedMesh& one : search_meshes(request).meshes) {
    const int data_ranks = Mesh::parse(one.mesh, 8).data_ranks();
    if (data_ranks == 1) continue;
    EXPECT_EQ(one.verdict,
              "the 3 samples of a step cannot be shared by " + std::to_string(data_ranks) + " data ranks");
  }
}

/// Trains a few steps of the chosen configuration, on thread ranks with the budget as memory limit.
void run_choice(const MeshSearchRequest& request, const Config& chosen) {
  const PlanRequest& plan = request.fit.plan;
  run_thread_ranks(plan.ranks, [&](int, const CommunicatorFactory& factory) {
    Config config = chosen;
    config.device_memory_limit = request.fit.budget;
    validate_config(config, plan.ranks);
    RuntimeOptions options = RuntimeOptions::from(config);
    options.threads = 1;
    options.log_level = LogLevel::off;
    Runtime runtime(options, factory);
    Engine engine(runtime, plan.model.spec(plan.sequence), config);
    const training::BatchShape shape{config.micro_batch_size, config.accumulation_steps,
                                     runtime.mesh().data_ranks()};
    const training::BatchFeeder feeder(engine, plan.model.language->shape().vocabulary, shape, plan.sequence,
                                       false);
    const std::vector<std::int32_t> tokens(static_cast<std::size_t>(shape.micro_batch * plan.sequence), 1);
    const std::vector<std::int64_t> samples(static_cast<std::size_t>(shape.micro_batch), 0);
    const ConstTensorView view{tokens.data(), DataType::int32, {shape.micro_batch, plan.sequence}};
    const models::TokenBatch batch{view, view, samples};
    for (int step = 0; step < 3; ++step) {
      models::train_step(*plan.model.language, engine, [&](std::int64_t) { return batch; });
      (void)engine.step();
    }
    EXPECT_LE(runtime.ledger().account(Tier::device).peak, request.fit.budget);
  });
}

/// A search with a drawn model, number of ranks and budget, which may be too small.
MeshSearchRequest drawn_search(std::uint64_t number) {
  const RandomKey key{45, RandomPurpose::test, 4};
  std::uint64_t counter = number * 16;
  const auto pick = [&](std::uint32_t n) { return static_cast<int>(random_bits(key, counter++) % n); };
  MeshSearchRequest request =
      search_of(small_gpt(1 + pick(5), 16 * (1 + pick(4))), 2 + pick(7), std::int64_t{1} << 40);
  if (pick(3) == 0) {
    models::LlamaConfig llama = models::LlamaConfig::preset("llama-nano");
    llama.layers = 1 + pick(4);
    request.fit.plan.model.language = std::make_shared<models::Llama>(llama);
    request.fit.plan.sequence = 16;
  }
  Config& config = request.fit.plan.config;
  config.accumulation_steps = 1 + pick(4);
  if (pick(2) == 0) {
    config.precision.compute = config.precision.communication = DataType::bfloat16;
    config.workspace_bytes = 8 << 20;
  }
  if (pick(4) == 0) config.lora.rank = 2;
  request.fit.rates.network = pick(2) == 0 ? 1e6 : 1e10;
  request.fit.budget = search_meshes(request).plan.tier(Tier::device).peak / (1 + pick(4));
  return request;
}

void expect_proposals_fit(const tranche::test::Sweep& cases) {
  for (const std::uint64_t number : tranche::test::rounds(cases)) {
    MeshSearchRequest request = drawn_search(number);
    MeshSearchResult result = search_meshes(request);
    if (!result.fits) {
      request.fit.budget += result.chosen.missing;
      result = search_meshes(request);
    }
    ASSERT_TRUE(result.fits) << number;
    SCOPED_TRACE("proposal " + std::to_string(number) + ": " + result.chosen.mesh);
    run_choice(request, result.config);
  }
}

TEST(MeshSearch, NoProposalIsOutOfMemory) {
  expect_proposals_fit(tranche::test::sweep({0, 2}));
}
TEST(MeshSearchProposalsSlow, NoProposalIsOutOfMemory) {
  expect_proposals_fit(tranche::test::sweep({2, 28}));
}

ProgramResult planned_by(const std::vector<std::string>& more) {
  std::vector<std::string> arguments{"plan",
                                     "--model",
                                     "gpt-nano",
                                     "--sequence",
                                     "32",
                                     "--ranks",
                                     "4",
                                     "--set",
                                     "tranche.workspace=1MiB",
                                     "--set",
                                     "tranche.communication_slab=1MiB",
                                     "--dtype",
                                     "fp32"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return tools::test::run(arguments);
}

TEST(MeshSearchProgram, TellsWhatItChoseAndTriedAndHowToRunIt) {
  const TemporaryFolder folder;
  const std::string file = folder.path("chosen.json");
  const ProgramResult text =
      planned_by({"--fit", "64MiB", "--mesh", "search", "--accumulate", "2", "--write", file});
  ASSERT_EQ(text.status, 0) << text.errors;
  EXPECT_THAT(text.out,
              AllOf(HasSubstr("search of 15 meshes of 4 ranks within 64.00 MiB"),
                    HasSubstr("by a formula: a rank sends"), HasSubstr("without a machine file (--machine)"),
                    HasSubstr("choice                     "), HasSubstr("why "),
                    HasSubstr("on the meta device"), HasSubstr("they take at least as long as the choice"),
                    HasSubstr("mpirun -n 4 tranche train --model gpt-nano --config " + file),
                    HasSubstr("configuration: " + file)));
  const ProgramResult again = planned_by({"--config", file, "--device-memory", "64MiB"});
  EXPECT_EQ(again.status, 0) << again.errors;

  const ProgramResult object =
      planned_by({"--fit", "64MiB", "--mesh", "search, tensor=2", "--accumulate", "2", "--json"});
  ASSERT_EQ(object.status, 0) << object.errors;
  const json search = json::parse(object.out)["search"];
  EXPECT_EQ(search["axes"], "tensor=2");
  EXPECT_EQ(search["machine"], nullptr);
  EXPECT_THAT(search["chosen"]["mesh"].get<std::string>(), HasSubstr("tensor=2"));
  EXPECT_EQ(search["meshes"].size(), 4U);
  const json& counts = search["configurations"];
  EXPECT_EQ(counts["all"].get<std::int64_t>(),
            counts["by_state"].get<std::int64_t>() + counts["by_activations"].get<std::int64_t>() +
                counts["by_micro_batch"].get<std::int64_t>() + counts["by_time"].get<std::int64_t>() +
                counts["refused"].get<std::int64_t>() + counts["planned"].get<std::int64_t>());
  EXPECT_THAT(search["command"].get<std::string>(),
              AllOf(StartsWith("mpirun -n 4 tranche train --model gpt-nano "), HasSubstr("tensor=2"),
                    HasSubstr("--device-memory 67108864")));
}

TEST(MeshSearchProgram, SearchesForABatchThatIsSmallerThanTheRanks) {
  const ProgramResult result =
      planned_by({"--fit", "64MiB", "--mesh", "search", "--set", "train_batch_size=2", "--json"});
  ASSERT_EQ(result.status, 0) << result.errors;
  const json search = json::parse(result.out)["search"];
  EXPECT_LE(Mesh::parse(search["chosen"]["mesh"].get<std::string>(), 4).data_ranks(), 2);
  EXPECT_THAT(
      planned_by({"--fit", "64MiB", "--mesh", "search, shard=4", "--set", "train_batch_size=2"}).errors,
      HasSubstr("train_batch_size 2 is not a multiple of"));
}

TEST(MeshSearchProgram, LeavesOutWhatTheMachineHasNoFiguresFor) {
  const TemporaryFolder folder;
  const ProgramResult result =
      planned_by({"--fit", "1200KiB", "--mesh", "search, shard=4", "--host-memory", "200MiB", "--machine",
                  "epyc-9654-2s", "--nvme-path", folder.path(""), "--nvme-space", "1GiB"});
  EXPECT_TRUE(result.status == 0 || result.status == 3) << result.errors;
}

TEST(MeshSearchProgram, SaysThatOneStageOfAPipelineWasSimulated) {
  const auto out = [](const char* mesh) {
    return planned_by({"--fit", "64MiB", "--mesh", mesh, "--accumulate", "2", "--machine", "epyc-9654-2s"})
        .out;
  };
  const std::string of_stage = " s a step by its stage's simulation and the schedule's formula; ";
  EXPECT_THAT(out("search, pipeline=2, shard=2"), HasSubstr(of_stage));
  EXPECT_THAT(out("search, shard=4"),
              AllOf(HasSubstr(" s a step in the simulation; "), Not(HasSubstr(of_stage))));
}

TEST(MeshSearchProgram, SaysWhatWouldMakeRoom) {
  const ProgramResult result = planned_by({"--fit", "2200KiB", "--mesh", "search"});
  EXPECT_EQ(result.status, 3) << result.errors;
  EXPECT_THAT(result.out, AllOf(HasSubstr("nothing fits in 2.15 MiB: "),
                                HasSubstr(" comes closest: it takes "), HasSubstr(" more than is available"),
                                HasSubstr("what would make room"), HasSubstr("--fit ")));
}

TEST(MeshSearchProgram, RefusesWhatASearchDoesNotHave) {
  const auto errors = [](const std::vector<std::string>& more) {
    const ProgramResult result = planned_by(more);
    EXPECT_EQ(result.status, 2) << result.out;
    return result.errors;
  };
  EXPECT_THAT(errors({"--mesh", "search"}), HasSubstr("--mesh search finds the axes for a budget: give --fit "
                                                      "SIZE, or name the axes of the mesh"));
  EXPECT_THAT(errors({"--mesh", "search", "--fit", "1GiB", "--rank", "1"}),
              HasSubstr("--rank is not for --mesh search"));
  EXPECT_THAT(errors({"--mesh", "search", "--fit", "1GiB", "--machine", "epyc-9654-2s", "--trace", "t.json"}),
              HasSubstr("--trace is not for --mesh search"));
  EXPECT_THAT(errors({"--mesh", "search, tensor=3", "--fit", "1GiB"}),
              HasSubstr("tensor 3 does not divide the 4 ranks"));
  EXPECT_THAT(errors({"--mesh", "search, tensr=2", "--fit", "1GiB"}), HasSubstr("the closest is tensor"));
  EXPECT_THAT(tools::test::run({"train", "--mesh", "search"}).errors,
              HasSubstr("tranche plan --fit SIZE searches a mesh; name the axes that it finds"));
  EXPECT_THAT(
      errors({"--mesh", "search, tensor=2", "--fit", "1GiB", "--set", "tensor_parallel.autotp_size=4"}),
      HasSubstr("give one of the two"));
}

}  // namespace
}  // namespace tranche::planner
