// tranche plan: lists of units, the search, output, and refusals.

#include <gmock/gmock.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "tests/tools/program_fixture.h"
#include "tranche/config/config.h"
#include "tranche/core/error.h"
#include "tranche/models/gpt.h"
#include "tranche/planner/plan_text.h"
#include "tranche/planner/planner.h"

namespace tranche::planner {
namespace {

using namespace tools;  // for the program, which runs what is planned

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using tools::test::message_of;
using tools::test::ProgramResult;
using tools::test::TemporaryFolder;

// --- Lists of units ----------------------------------------------------------------------------------------

std::string list_error(const std::string& text) {
  return message_of<ConfigurationError>([&] { (void)parse_unit_list(text, "list.json"); });
}

TEST(UnitList, IsReadInOrder) {
  const PlanModel model = parse_unit_list(
      R"({"tokens_per_sample": 128, "flops_per_token": 6e3, "units": [
          {"name": "embedding", "tensors": {"table": [50, 8], "gain": []}, "uses_per_pass": 2},
          {"name": "block", "repeat": 3, "tensors": {"w": [8, 8], "b": [8]}}]})",
      "list.json");
  EXPECT_FALSE(model.covers_activations());
  const ModelSpec spec = model.spec(0);
  ASSERT_EQ(spec.units().size(), 4u);
  EXPECT_EQ(spec.units()[0].uses_per_micro_batch, 2);
  EXPECT_EQ(spec.units()[0].tensors[1].name, "embedding.gain");
  EXPECT_EQ(spec.units()[3].name, "block.2");
  EXPECT_EQ(spec.units()[3].tensors[0].name, "block.2.w");
  EXPECT_EQ(spec.parameters(), 401 + 3 * 72);
  EXPECT_EQ(spec.tokens_per_sample, 128);
  EXPECT_EQ(spec.flops_per_token, 6000);
}

TEST(UnitList, ErrorsNameFileAndKey) {
  EXPECT_THAT(list_error("[1]"), HasSubstr("list.json is not an object: a list of 1"));
  EXPECT_THAT(list_error("{\"units\": [}"), HasSubstr("list.json"));
  EXPECT_THAT(list_error("{}"), HasSubstr("list.json: units is missing"));
  EXPECT_THAT(list_error(R"({"units": []})"), HasSubstr("units has 0 entries; at least 1 are needed"));
  EXPECT_THAT(list_error(R"({"unit": 1, "units": [{}]})"),
              AllOf(HasSubstr("unit is an unknown key"), HasSubstr("did you mean 'units'?")));
  EXPECT_THAT(list_error(R"({"units": [5]})"), HasSubstr("units[0] is not an object: 5"));
  EXPECT_THAT(list_error(R"({"units": [{"tensors": {"w": [1]}}]})"), HasSubstr("units[0].name is missing"));
  EXPECT_THAT(list_error(R"({"units": [{"name": "a"}]})"), HasSubstr("units[0].tensors is missing"));
  EXPECT_THAT(list_error(R"({"units": [{"name": "a", "tensors": {"w": 4}}]})"),
              HasSubstr("units[0].tensors.w is not an array: 4"));
  EXPECT_THAT(list_error(R"({"units": [{"name": "a", "tensors": {"w": [4, 0]}}]})"),
              HasSubstr("units[0].tensors.w[1] is 0, which cannot be: from 1"));
  EXPECT_THAT(list_error(R"({"units": [{"name": "a", "tensors": {"w": [4000000000, 4000000000]}}]})"),
              HasSubstr("units[0].tensors.w is not a shape: "));
  EXPECT_THAT(list_error(R"({"units": [{"name": "a", "tensors": {"w": [1]}, "uses": 2}]})"),
              HasSubstr("units[0].uses is an unknown key"));
  EXPECT_THAT(list_error(R"({"units": [{"name": "a", "tensors": {"w": [1]}, "uses_per_pass": 0}]})"),
              HasSubstr("units[0].uses_per_pass is 0, which cannot be: from 1 to 1000 is wanted"));
  EXPECT_THAT(list_error(R"({"units": [{"name": "a", "tensors": {"w": [1]}, "repeat": 1.5}]})"),
              HasSubstr("units[0].repeat is not an integer: 1.5"));
  EXPECT_THAT(list_error(R"({"units": [{"name": "a", "tensors": {"w": [1]}, "repeat": 4096},
                                       {"name": "b", "tensors": {"w": [1]}}]})"),
              HasSubstr("units[1] is too much: a list of more than 4096 units is not planned"));
  EXPECT_THAT(
      list_error(
          R"({"units": [{"name": "a", "tensors": {"w": [1]}}, {"name": "a", "tensors": {"v": [1]}}]})"),
      HasSubstr("units[1].name is refused: there are two units 'a'"));
  EXPECT_THAT(list_error(R"({"tokens_per_sample": 0, "units": [{"name": "a", "tensors": {"w": [1]}}]})"),
              HasSubstr("tokens_per_sample is 0, which cannot be: from 1"));
  EXPECT_THAT(list_error(R"({"flops_per_token": "x", "units": [{"name": "a", "tensors": {"w": [1]}}]})"),
              HasSubstr("flops_per_token is not a number: \"x\""));
  EXPECT_THAT(list_error(R"({"units": [{"name": "a", "name": "b", "tensors": {"w": [1]}}]})"),
              HasSubstr("list.json: key 'units.name' is given twice; keep one"));
  EXPECT_THAT(list_error(R"({"units": [{"name": "", "tensors": {"w": [1]}}]})"),
              HasSubstr("units[0].name is an empty string"));
  EXPECT_THAT(list_error(R"({"units": [{"name": "a", "tensors": {}}]})"),
              HasSubstr("units[0].tensors has no tensor; at least one's name and extents are needed"));
  EXPECT_THAT(list_error(R"({"units": [{"name": "a", "tensors": {"w": [1, 1, 1, 1, 1, 1, 1]}}]})"),
              HasSubstr("units[0].tensors.w is not a shape: "));
}

TEST(UnitList, GathersAndReducesAsUnitsAreUsed) {
  PlanRequest request;
  request.model = parse_unit_list(R"({"units": [{"name": "tied", "tensors": {"w": [512]}, "uses_per_pass": 2},
                                                {"name": "block", "repeat": 2, "tensors": {"w": [1024]}}]})",
                                  "list");
  request.ranks = 2;
  request.config.stage = 3;
  request.config.accumulation_steps = 2;
  const PlanResult plan = plan_run(request);
  // Half of every unit belongs to another rank. The blocks are gathered forward and backward, the tied unit
  // once more.
  EXPECT_EQ(plan.data.at("all_gather").elements, 2 * (3 * 512 + 2 * 2 * 1024) / 2);
  EXPECT_EQ(plan.data.at("reduce_scatter").elements, 2 * (512 + 2 * 1024) / 2);
  EXPECT_EQ(plan.formula_elements,
            plan.data.at("all_gather").elements + plan.data.at("reduce_scatter").elements);
  EXPECT_EQ(plan.tier(Tier::device).category_peak[Category::activations], 0);
  EXPECT_EQ(plan.tier(Tier::device).category_peak[Category::gathered], 2 * 1024 * 2);
}

// --- Plans -------------------------------------------------------------------------------------------------

PlanRequest small_gpt(int ranks) {
  PlanRequest request;
  request.model.name = "gpt-mini";
  request.model.language = std::make_shared<models::Gpt>(models::GptConfig::preset("gpt-mini"));
  request.sequence = 128;
  request.ranks = ranks;
  request.config.workspace_bytes = 8 << 20;
  return request;
}

TEST(Plan, EveryRankHoldsTheSame) {
  PlanRequest request = small_gpt(7);
  request.config.stage = 3;
  const PlanResult first = plan_run(request);
  request.rank = 6;
  const PlanResult last = plan_run(request);
  EXPECT_EQ(first.memory, last.memory);
  EXPECT_EQ(first.traffic, last.traffic);
  EXPECT_GE(last.state.padding, first.state.padding);
}

TEST(Plan, ExchangeBuffersGrowWithTheRanksUnlessGiven) {
  EXPECT_EQ(parse_config("{}", 1).staging_bytes, 8 << 20);
  EXPECT_EQ(parse_config("{}", 4096).staging_bytes, 8 << 20);
  EXPECT_EQ(parse_config("{}", 65536).staging_bytes, 128 << 20);  // 2 x 1 KiB for each peer
  EXPECT_EQ(parse_config(R"({"tranche": {"communication_slab": "1MiB"}})", 65536).staging_bytes, 1 << 20);
}

TEST(Plan, ABudgetDoesNotStopIt) {
  PlanRequest request = small_gpt(2);
  request.config.device_memory_limit = 1 << 20;
  EXPECT_GT(plan_run(request).tier(Tier::device).peak, 10 << 20);
  request.config.offload.host_memory_limit = 1 << 20;
  request.device = DeviceKind::cuda;
  EXPECT_GT(plan_run(request).tier(Tier::host).peak, 8 << 20);
}

TEST(Plan, GpusTakeHostMemoryToo) {
  PlanRequest request = small_gpt(2);
  EXPECT_EQ(plan_run(request).tier(Tier::host).peak, 0);
  request.device = DeviceKind::cuda;
  const PlanResult plan = plan_run(request);
  // Two buffers for a micro-batch of 128 tokens and targets, and the staging buffer.
  EXPECT_EQ(plan.tier(Tier::host).peak, 2 * 2 * 128 * 4 + (8 << 20));
}

TEST(Plan, NamesTheCheaperStage) {
  // One large unit: stage 3 has to hold all of it again.
  PlanRequest request;
  request.model = parse_unit_list(R"({"units": [{"name": "whole", "tensors": {"w": [1000, 1000]}}]})", "one");
  request.ranks = 2;
  request.config.stage = 3;
  request.config.reduction = ReductionPolicy::micro_batch;
  EXPECT_THAT(plan_run(request).notes, testing::Contains(HasSubstr("would take less memory")));
}

TEST(Plan, TheNextUnitIsGatheredAheadWhateverThePrefetchBucket) {
  // 6.7 billion parameters. A block has 201 million, more than the default of the key allows to prefetch.
  PlanRequest request;
  request.model.name = "6.7B";
  request.model.language = std::make_shared<models::Gpt>(
      models::GptConfig{.layers = 32, .heads = 32, .width = 4096, .vocabulary = 32000});
  request.sequence = 512;
  request.ranks = 16;
  request.config.stage = 3;
  for (const std::int64_t prefetch : {50'000'000, 12'000'000, 0}) {
    request.config.prefetch_elements = prefetch;
    // Two blocks in bf16, except small tensors and padding.
    EXPECT_NEAR(static_cast<double>(plan_run(request).tier(Tier::device).category_peak[Category::gathered]),
                2 * 2 * 12 * 4096.0 * 4096.0, 1e6);
  }
}

TEST(Plan, ImpossibleRanksAreRefused) {
  const auto error = [](const auto& change) {
    PlanRequest request = small_gpt(2);
    change(request);
    return message_of<ConfigurationError>([&] { (void)plan_run(request); });
  };
  EXPECT_THAT(error([](PlanRequest& r) { r.ranks = 65537; }), HasSubstr("1 to 65536 ranks, not 65537"));
  EXPECT_THAT(error([](PlanRequest& r) { r.rank = 2; }), HasSubstr("no rank 2 among 2; the last is 1"));
  EXPECT_THAT(error([](PlanRequest& r) { r.ranks_per_node = -1; }), HasSubstr("-1 ranks on a node"));
  EXPECT_THAT(error([](PlanRequest& r) { r.config.staging_bytes = 512; }),
              HasSubstr("cannot hold 256 fp32 elements from each of 1 peers"));
}

// --- Costs and the search ----------------------------------------------------------------------------------

TEST(StepCost, FollowsItsFormulas) {
  PlanRequest request;
  request.model = parse_unit_list(
      R"({"flops_per_token": 3000, "units": [{"name": "u", "tensors": {"w": [1024]}}]})", "list");
  request.ranks = 2;
  request.config.accumulation_steps = 4;
  request.config.overlap = false;
  const CostModel rates{1e3, 1e3};  // a byte and an operation take a millisecond each
  const auto cost = [&](int stage, ReductionPolicy policy, bool overlap = false) {
    request.config.stage = stage;
    request.config.reduction = policy;
    request.config.overlap = overlap;
    return step_cost(request, rates);
  };
  constexpr auto boundary = ReductionPolicy::boundary, micro_batch = ReductionPolicy::micro_batch;
  // Half of 1024 elements is sent: 1.024 s in bf16, 2.048 s in fp32.
  EXPECT_DOUBLE_EQ(cost(0, boundary).compute, 12);
  EXPECT_DOUBLE_EQ(cost(0, boundary).exposed, 1.024 + 2.048);
  EXPECT_DOUBLE_EQ(cost(0, micro_batch).exposed, 4 * 1.024 + 2.048);
  EXPECT_DOUBLE_EQ(cost(1, boundary).exposed, 2 * 1.024);
  EXPECT_DOUBLE_EQ(cost(2, micro_batch).exposed, 5 * 1.024);
  EXPECT_DOUBLE_EQ(cost(3, micro_batch).exposed, 12 * 1.024);
  EXPECT_DOUBLE_EQ(cost(3, boundary).exposed, 9 * 1.024);
  // A micro-batch computes 1 s forward and 2 s backward. Stage 0: 3.072 s after the last backward.
  EXPECT_DOUBLE_EQ(cost(0, boundary, true).exposed, 3.072 - 2);
  EXPECT_DOUBLE_EQ(cost(1, boundary, true).exposed, 1.024 - 1);
  EXPECT_NEAR(cost(3, micro_batch, true).exposed, 4 * (3.072 - 3), 1e-12);
  request.ranks = 1;
  EXPECT_EQ(cost(3, micro_batch).exposed, 0);
}

TEST(StepCost, CountsWhatIsComputedAgainAsTheKernelsDo) {
  PlanRequest request = small_gpt(1);
  const double kept = plan_run(request).work.floating_point_operations;
  EXPECT_EQ(step_cost(request, {}).recompute, 0);
  request.config.activation_checkpointing = true;
  const double again = plan_run(request).work.floating_point_operations - kept;
  const double estimated = step_cost(request, {1, 1}).recompute;
  // The formula counts only GEMMs, no norms and activations; backward computes one GEMM less.
  EXPECT_NEAR(estimated, again, 0.1 * again);
}

FitRequest small_fit(int ranks, std::int64_t budget) {
  FitRequest request;
  request.plan = small_gpt(ranks);
  request.plan.config.train_batch_size = 16 * ranks;
  request.plan.config.micro_batch_size = 16;
  request.budget = budget;
  return request;
}

TEST(Fit, TheChosenFitsAndWhatIsCheaperDoesNot) {
  std::int64_t before = std::numeric_limits<std::int64_t>::max();
  double cost_before = 0;
  for (const std::int64_t budget : {2000, 400, 200, 120, 80, 60}) {
    const FitRequest request = small_fit(4, budget << 20);
    const FitResult result = find_fit(request);
    if (!result.fits) continue;
    const FitTrial& chosen = result.ladder[result.chosen];
    const std::int64_t peak = result.plan.tier(Tier::device).peak;
    EXPECT_LE(peak, request.budget);
    EXPECT_LE(peak, before);
    EXPECT_GE(chosen.cost.total(), cost_before) << "less memory is never cheaper";
    before = peak;
    cost_before = chosen.cost.total();
    for (const FitTrial& trial : result.ladder) {
      if (trial.fits) {
        EXPECT_GE(trial.cost.total(), chosen.cost.total());
      }
      EXPECT_EQ(trial.micro_batch * trial.accumulation, 16) << "the global batch is kept";
    }
    // The written configuration gives the same plan.
    PlanRequest again = request.plan;
    again.config = parse_config(result.config.to_json(), 4);
    EXPECT_EQ(plan_run(again).memory, result.plan.memory);
    EXPECT_EQ(again.config.train_batch_size, 64);
  }
  EXPECT_LT(before, 100 << 20) << "some small budget was met";
}

TEST(Fit, SmallBudgetsBringHigherStagesAndCheckpointing) {
  const FitResult roomy = find_fit(small_fit(4, std::int64_t{4} << 30));
  ASSERT_TRUE(roomy.fits);
  EXPECT_EQ(roomy.ladder.size(), 1u) << "the cheapest of all fits at once";
  EXPECT_EQ(roomy.ladder[roomy.chosen].checkpoint_every, 0);
  EXPECT_EQ(roomy.ladder[roomy.chosen].micro_batch, 16);
  const FitResult tight = find_fit(small_fit(4, 45 << 20));
  ASSERT_TRUE(tight.fits);
  EXPECT_GT(tight.ladder.size(), 1u);
  EXPECT_GT(tight.ladder[tight.chosen].stage, 0);
  EXPECT_GT(tight.ladder[tight.chosen].cost.total(), roomy.ladder[roomy.chosen].cost.total());
}

TEST(Fit, ChoosesAndEndsByTheSecondsThatItIsGiven) {
  FitRequest request = small_fit(4, std::int64_t{4} << 30);
  // The formula considers every configuration with recomputation more expensive, and ends with the first that
  // fits.
  request.seconds = [](const PlanRequest& candidate) {
    StepCost cost;
    cost.compute = candidate.config.activation_checkpointing ? 1 : 2;
    return cost;
  };
  const FitResult result = find_fit(request);
  ASSERT_TRUE(result.fits);
  const FitTrial& chosen = result.ladder[result.chosen];
  EXPECT_GT(chosen.checkpoint_every, 0);
  EXPECT_EQ(chosen.cost.total(), 1);
  EXPECT_TRUE(result.config.activation_checkpointing);
  EXPECT_EQ(result.ladder.size(), 2u) << "what is as dear is not tried";
}

TEST(Fit, SaysHowMuchIsMissing) {
  const FitRequest request = small_fit(2, 8 << 20);
  const FitResult result = find_fit(request);
  EXPECT_FALSE(result.fits);
  EXPECT_EQ(result.missing, result.plan.tier(Tier::device).peak - request.budget);
  EXPECT_GT(result.missing, 0);
  for (const FitTrial& trial : result.ladder) EXPECT_FALSE(trial.fits);
  EXPECT_THAT(fit_text(request, result),
              AllOf(HasSubstr("nothing fits in 8.00 MiB"), HasSubstr("more than is available")));
}

TEST(Fit, KeepsWhatIsGiven) {
  FitRequest request = small_fit(2, 60 << 20);
  request.keep_stage = request.keep_micro_batch = true;
  request.plan.config.stage = 1;
  request.plan.config.micro_batch_size = 8;
  request.plan.config.accumulation_steps = 2;
  request.plan.config.reduction = ReductionPolicy::boundary;
  const FitResult result = find_fit(request);
  for (const FitTrial& trial : result.ladder) {
    EXPECT_EQ(trial.stage, 1);
    EXPECT_EQ(trial.micro_batch, 8);
    EXPECT_EQ(trial.reduction, ReductionPolicy::boundary);
  }
}

TEST(Fit, OfOneRankAndOfLists) {
  FitRequest request;
  request.plan.model =
      parse_unit_list(R"({"units": [{"name": "u", "repeat": 4, "tensors": {"w": [65536]}}]})", "l");
  request.plan.ranks = 1;
  request.plan.config.workspace_bytes = 1 << 16;
  request.budget = 16 << 20;
  const FitResult result = find_fit(request);
  EXPECT_TRUE(result.fits);
  EXPECT_EQ(result.ladder.size(), 1u)
      << "one rank: stages do not differ, and a list has nothing to recompute";
  request.plan.ranks = 8;
  request.budget = (9 << 20) + (1 << 19);
  const FitResult sharded = find_fit(request);
  EXPECT_TRUE(sharded.fits) << fit_text(request, sharded);
  EXPECT_GT(sharded.ladder[sharded.chosen].stage, 0);
  EXPECT_THROW((void)find_fit({}), Error);
}

TEST(Fit, StateLeavesTheDeviceWhereNothingElseFits) {
  FitRequest request = small_fit(1, 1 << 20);
  request.keep_optimizer_tier = request.keep_parameters_tier = true;
  const FitResult least = find_fit(request);
  ASSERT_FALSE(least.fits);
  request.budget = least.plan.tier(Tier::device).peak * 7 / 10;
  EXPECT_FALSE(find_fit(request).fits);
  request.keep_optimizer_tier = request.keep_parameters_tier = false;
  const FitResult result = find_fit(request);
  ASSERT_TRUE(result.fits) << fit_text(request, result);
  const FitTrial& chosen = result.ladder[result.chosen];
  EXPECT_EQ(chosen.optimizer, OffloadTier::cpu) << fit_text(request, result);
  EXPECT_EQ(result.config.offload.optimizer, OffloadTier::cpu);
  EXPECT_GT(chosen.cost.offload, 0);
  EXPECT_EQ(chosen.host, result.plan.tier(Tier::host).peak);
  EXPECT_THAT(fit_text(request, result),
              AllOf(HasSubstr("cpu/none"), HasSubstr("updates 0.85 G parameters/s there"),
                    HasSubstr("offloaded: optimizer cpu"), Not(HasSubstr("nvme"))));
  // Without host memory for it nothing fits; with a disk it does.
  const auto host_memory = [](std::int64_t bytes) {
    return HostMemory{.source = HostMemory::Source::configuration, .bytes = bytes};
  };
  request.plan.host_memory = host_memory(chosen.host - 1);
  const FitResult bounded = find_fit(request);
  EXPECT_TRUE(!bounded.fits || bounded.plan.tier(Tier::host).peak < chosen.host);
  request.plan.host_memory = host_memory(chosen.host * 8 / 10);
  const FitResult too_little = find_fit(request);
  EXPECT_FALSE(too_little.fits);
  EXPECT_EQ(too_little.missing, 0) << "of device memory";
  EXPECT_THAT(fit_text(request, too_little), HasSubstr(" of host memory, "));
  request.plan.config.offload.nvme_path = "/scratch";
  const FitResult disk = find_fit(request);
  ASSERT_TRUE(disk.fits) << fit_text(request, disk);
  EXPECT_EQ(disk.ladder[disk.chosen].optimizer, OffloadTier::nvme);
  EXPECT_GT(disk.plan.tier(Tier::nvme).peak, 0);
  EXPECT_LE(disk.plan.tier(Tier::host).peak, request.plan.host_memory.bytes);
  request.nvme_budget = 4096;
  const FitResult nowhere = find_fit(request);
  EXPECT_FALSE(nowhere.fits);
}

TEST(StepCost, CountsWhatOffloadExposes) {
  PlanRequest request = small_gpt(1);
  EXPECT_EQ(step_cost(request, {}).offload, 0);
  request.config.offload.optimizer = OffloadTier::cpu;
  const OffloadCost cost = step_offload_cost(request, {});
  EXPECT_GT(cost.exposed, 0);
  EXPECT_DOUBLE_EQ(step_cost(request, {}).offload, cost.exposed);
  EXPECT_DOUBLE_EQ(step_cost(request, {}).total(), step_cost(request, {}).compute + cost.exposed);
}

TEST(OtherGathering, IsThePlanOfTheOtherSetting) {
  PlanRequest request = small_gpt(4);
  request.config.stage = 3;
  request.config.accumulation_steps = 3;
  const PlanResult use = plan_run(request);
  const auto sent = [](const PlanResult& plan) {
    std::int64_t elements = 0;
    for (const auto& [operation, count] : plan.data) elements += count.elements;
    return elements;
  };
  PlanRequest other = request;
  other.config.gather_for = GatherFor::step;
  const PlanResult step = plan_run(other);
  const std::optional<OtherGathering> price = plan_other_gathering(request, use);
  const std::optional<OtherGathering> back = plan_other_gathering(other, step);
  ASSERT_TRUE(price && back);
  EXPECT_EQ(price->gather_for, GatherFor::step);
  EXPECT_EQ(price->peak, step.tier(Tier::device).peak);
  EXPECT_EQ(price->elements, sent(step));
  EXPECT_EQ(back->gather_for, GatherFor::use);
  EXPECT_EQ(back->peak, use.tier(Tier::device).peak);
  EXPECT_EQ(back->elements, sent(use));
  // A unit is gathered twice in each of three micro-batches, or once.
  EXPECT_EQ(sent(use) - sent(step), 5 * use.padded_elements / 4 * 3);
  EXPECT_GT(price->peak, back->peak);

  CostModel slow;
  slow.network = 1e6;
  EXPECT_LT(step_cost(other, slow).exposed, step_cost(request, slow).exposed);
  request.config.persistent_tensor_elements = std::numeric_limits<std::int64_t>::max();
  EXPECT_FALSE(plan_other_gathering(request, plan_run(request))) << "nothing is gathered for its use";
  request.config.stage = 2;
  EXPECT_FALSE(plan_other_gathering(request, plan_run(request)));
  request.config.stage = 3;
  request.ranks = 1;
  EXPECT_FALSE(plan_other_gathering(request, plan_run(request)));
}

// --- The command -------------------------------------------------------------------------------------------

std::vector<std::string> plan_of(const std::vector<std::string>& more) {
  std::vector<std::string> arguments{"plan", "--model", "gpt-mini", "--set", "tranche.workspace=8MiB"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

TEST(PlanCommand, PrintsItsTables) {
  const ProgramResult result =
      tools::test::run(plan_of({"--ranks", "8", "--stage", "3", "--ranks-per-node", "4"}));
  ASSERT_EQ(result.status, 0) << result.errors;
  EXPECT_EQ(result.errors, "");
  EXPECT_THAT(result.out, AllOf(HasSubstr("gpt-mini: 2,767,872 parameters"), HasSubstr("0 of 8, 4 on a node"),
                                HasSubstr("3, micro_batch reduction"), HasSubstr("model state of this rank"),
                                HasSubstr("device memory"), HasSubstr("gathered"), HasSubstr("activations"),
                                HasSubstr("peak of"), HasSubstr("held then")));
  EXPECT_THAT(result.out, HasSubstr("  with gather_for step   "));
  EXPECT_THAT(
      result.out,
      AllOf(HasSubstr("6 x h.* master (optimizer)"), HasSubstr("all_gather"), HasSubstr("reduce_scatter"),
            HasSubstr("by the formula"), HasSubstr("control"), HasSubstr("data to other nodes    "),
            HasSubstr(" from its node, "), HasSubstr("host and device"), HasSubstr("NVMe"),
            HasSubstr("GFLOP counted by the kernels"), Not(HasSubstr("differs"))));
}

TEST(PlanCommand, JsonHasItsKeys) {
  const ProgramResult result = tools::test::run(plan_of({"--ranks", "4", "--stage", "2", "--json"}));
  ASSERT_EQ(result.status, 0) << result.errors;
  const json plan = json::parse(result.out);
  EXPECT_EQ(plan["schema"], plan_schema);
  EXPECT_EQ(plan["world"], 4);
  EXPECT_EQ(plan["stage"], 2);
  EXPECT_EQ(plan["fits"], nullptr);
  EXPECT_EQ(plan["covers_activations"], true);
  EXPECT_EQ(plan["peak"]["device"]["bytes"], plan["memory"]["device"]["peak_bytes"]);
  std::int64_t live = 0, categories = 0;
  for (const auto& item : plan["peak"]["device"]["live"]) live += item["bytes"].get<std::int64_t>();
  for (const auto& bytes : plan["peak"]["device"]["by_category"]) categories += bytes.get<std::int64_t>();
  EXPECT_EQ(plan["peak"]["device"]["bytes"], live);
  EXPECT_EQ(plan["peak"]["device"]["bytes"], categories);
  EXPECT_EQ(plan["traffic_total"]["elements"], plan["traffic"]["formula_elements"]);
  EXPECT_EQ(plan["traffic_total"]["bytes"], plan["traffic"]["formula_bytes"]);
  EXPECT_GT(plan["work"]["floating_point_operations"], plan["work"]["model_operations"]);
  EXPECT_EQ(plan["host_device_bytes"], 0);
  EXPECT_EQ(plan["nvme_bytes"], 0);
  EXPECT_EQ(plan["offload"], nullptr);
  EXPECT_EQ(plan["offload_bytes"]["to_host"], 0);
  EXPECT_GT(plan["model"]["parameters"], 0);
  EXPECT_GT(plan["state"]["optimizer"], 0);
}

TEST(PlanCommand, SaysWhatOffloadMovesAndWhenItIsHidden) {
  const std::vector<std::string> flags{"--offload-optimizer", "cpu", "--host-link", "1GB",
                                       "--host-update",       "2G",  "--flops",     "1T"};
  const ProgramResult tables = tools::test::run(plan_of(flags));
  ASSERT_EQ(tables.status, 0) << tables.errors;
  EXPECT_THAT(
      tables.out,
      AllOf(HasSubstr("model state of this rank"), HasSubstr("host memory"), HasSubstr("offload in a step"),
            HasSubstr("1.000 GB/s, --host-link"), HasSubstr("2 G parameters/s, --host-update"),
            HasSubstr("tokens per step at which offload is hidden: "), Not(HasSubstr("read from nvme"))));
  std::vector<std::string> as_json = flags;
  as_json.emplace_back("--json");
  const json plan = json::parse(tools::test::run(plan_of(as_json)).out);
  const json& offload = plan["offload"];
  const auto bytes = plan["offload_bytes"]["to_host"].get<double>();
  EXPECT_DOUBLE_EQ(offload["to_host_seconds"].get<double>(), bytes / 1e9);
  EXPECT_EQ(plan["host_device_bytes"], plan["offload_bytes"]["to_host"].get<std::int64_t>() +
                                           plan["offload_bytes"]["from_host"].get<std::int64_t>());
  EXPECT_EQ(offload["cost_model"]["host_update_parameters_per_second"], 2e9);
  EXPECT_GT(offload["break_even_tokens_per_step"], 0.0);
  // With twice the link speed half of the tokens suffice, because gpt-mini's updates are not the bottleneck.
  const json faster =
      json::parse(tools::test::run(plan_of({"--offload-optimizer", "cpu", "--host-link", "2GB",
                                            "--host-update", "20G", "--flops", "1T", "--json"}))
                      .out)["offload"];
  EXPECT_NEAR(faster["break_even_tokens_per_step"].get<double>() * 2,
              offload["break_even_tokens_per_step"].get<double>(),
              0.02 * offload["break_even_tokens_per_step"].get<double>());
  const ProgramResult disk =
      tools::test::run(plan_of({"--offload-optimizer", "nvme", "--nvme-path", "/none", "--host-state", "0"}));
  EXPECT_THAT(disk.out,
              AllOf(HasSubstr("nvme memory"), HasSubstr("read from nvme"), HasSubstr("--nvme-bandwidth")));
  EXPECT_FALSE(std::filesystem::exists("/none"));
  const ProgramResult host =
      tools::test::run(plan_of({"--offload-optimizer", "cpu", "--host-memory", "1MiB"}));
  EXPECT_EQ(host.status, 3);
  EXPECT_THAT(host.out, HasSubstr("does not fit in 1.00 MiB of host memory: "));
}

TEST(PlanCommand, ActivationsOfListsAreNotCovered) {
  const TemporaryFolder folder;
  const std::string list =
      folder.write("list.json", R"({"units": [{"name": "b", "repeat": 3, "tensors": {"w": [4096]}}]})");
  const ProgramResult result = tools::test::run({"plan", "--model", list, "--ranks", "2"});
  ASSERT_EQ(result.status, 0) << result.errors;
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("NOT COVERED"), HasSubstr("not covered"), HasSubstr("3 x b.* master")));
  EXPECT_THAT(tools::test::run({"plan", "--model", list, "--sequence", "5"}).errors,
              HasSubstr("which has no sequences"));
  EXPECT_THAT(tools::test::run({"plan", "--model", list, "--documents"}).errors,
              HasSubstr("does not use document boundaries"));
  const std::vector<std::string> llama{"plan", "--model", "qwen3-nano", "--documents"};
  EXPECT_EQ(tools::test::run(llama).status, 0);
}

TEST(PlanCommand, BudgetsHaveAStatus) {
  const ProgramResult fits = tools::test::run(plan_of({"--device-memory", "8GiB"}));
  EXPECT_EQ(fits.status, 0);
  EXPECT_THAT(fits.out, HasSubstr("fits in 8.00 GiB"));
  const ProgramResult not_enough = tools::test::run(plan_of({"--device-memory", "8MiB"}));
  EXPECT_EQ(not_enough.status, 3);
  EXPECT_THAT(not_enough.out, AllOf(HasSubstr("does not fit in 8.00 MiB"), HasSubstr("are missing")));
  EXPECT_EQ(tools::test::run(plan_of({"--fit", "2MiB"})).status, 3);
  const json document = json::parse(tools::test::run(plan_of({"--fit", "2MiB", "--json"})).out);
  EXPECT_EQ(document["fits"], false);
  EXPECT_GT(document["missing_bytes"], 0);
}

TEST(PlanCommand, WritesTheConfigurationThatFits) {
  const TemporaryFolder folder;
  const std::string file = folder.path("fit.json");
  const std::vector<std::string> flags{"--ranks", "4",     "--set",   "train_batch_size=64",
                                       "--fit",   "60MiB", "--write", file};
  const ProgramResult result = tools::test::run(plan_of(flags));
  ASSERT_EQ(result.status, 0) << result.errors << result.out;
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("<- chosen"), HasSubstr("fits: stage"), HasSubstr("configuration: " + file)));
  const ProgramResult again = tools::test::run(
      {"plan", "--model", "gpt-mini", "--config", file, "--ranks", "4", "--device-memory", "60MiB"});
  EXPECT_EQ(again.status, 0) << again.out;
  // A training's schedule ends with the training, not at the step that the plan assumed.
  std::ifstream written(file);
  EXPECT_EQ(json::parse(written)["tranche"]["total_steps"], 0);
  // Nothing is written if nothing fits.
  const std::string none = folder.path("none.json");
  EXPECT_EQ(tools::test::run(plan_of({"--fit", "2MiB", "--write", none})).status, 3);
  EXPECT_FALSE(std::filesystem::exists(none));
}

TEST(PlanCommand, Refusals) {
  const auto refused = [](const std::vector<std::string>& more) {
    const ProgramResult result = tools::test::run(plan_of(more));
    EXPECT_EQ(result.status, 2) << result.out;
    EXPECT_EQ(result.out, "");
    return result.errors;
  };
  EXPECT_THAT(refused({"--host-link", "fast"}), HasSubstr("--host-link: 'fast' is not a size"));
  EXPECT_THAT(refused({"--nvme-bandwidth", "0"}), HasSubstr("--nvme-bandwidth is 0, but must be above 0"));
  EXPECT_THAT(refused({"--host-update", "-1"}), HasSubstr("--host-update '-1' is no rate"));
  EXPECT_THAT(refused({"--ranks", "0"}), HasSubstr("--ranks is 0, but must be between 1 and 1000000000"));
  EXPECT_THAT(refused({"--ranks", "65537"}), HasSubstr("at most 65536"));
  EXPECT_THAT(refused({"--ranks", "2", "--rank", "2"}), HasSubstr("--rank 2 is not below --ranks 2"));
  EXPECT_THAT(refused({"--documents"}),
              HasSubstr("--documents: GPT2LMHeadModel does not use document boundaries"));
  EXPECT_THAT(refused({"--rank", "-1"}), HasSubstr("--rank is -1"));
  EXPECT_THAT(refused({"--ranks-per-node", "-1"}), HasSubstr("--ranks-per-node is -1"));
  EXPECT_THAT(refused({"--fit", "much"}), HasSubstr("--fit: 'much' is not a size"));
  EXPECT_THAT(refused({"--fit", "0"}), HasSubstr("--fit is 0, but must be above 0"));
  EXPECT_THAT(refused({"--fit", "1GiB", "--network", "fast"}), HasSubstr("--network: 'fast' is not a size"));
  EXPECT_THAT(refused({"--fit", "1GiB", "--flops", "100X"}), HasSubstr("--flops '100X' is no rate"));
  EXPECT_THAT(refused({"--write", "f.json"}), HasSubstr("--write is for the configuration that --fit"));
  EXPECT_THAT(refused({"--fit", "1GiB", "--write", "/nonexistent/f.json"}), HasSubstr("--write"));
  const std::vector<std::string> staged{"--ranks", "2", "--mesh", "pipeline=2"};
  const auto of_stages = [&](std::vector<std::string> more) {
    more.insert(more.begin(), staged.begin(), staged.end());
    return refused(more);
  };
  EXPECT_THAT(
      of_stages({"--fit", "1GiB"}),
      HasSubstr("--fit searches on replicate, shard, context and tensor; tranche.mesh "
                "\"pipeline=2\" has a pipeline: plan its stages with --rank, or search with --mesh 'search, "
                "pipeline=2'"));
  EXPECT_THAT(refused({"--rnks", "2"}), HasSubstr("did you mean --ranks?"));
  EXPECT_THAT(refused({"--data", "x"}), HasSubstr("unknown flag --data"));
  EXPECT_THAT(refused({"--stage", "4"}), HasSubstr("stage is 0 to 3"));
  EXPECT_THAT(refused({"--sequence", "5000"}), HasSubstr("sequence length 5000"));
  EXPECT_THAT(refused({"--ranks", "3", "--set", "train_batch_size=8"}), HasSubstr("train_batch_size 8"));
}

}  // namespace
}  // namespace tranche::planner
