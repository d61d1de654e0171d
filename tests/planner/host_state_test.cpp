// tranche.host_state auto: what a plan finds free, what it says of it, and what the search makes of it.
#include "tranche/planner/host_state.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "tests/tools/program_fixture.h"
#include "tranche/planner/plan_text.h"

namespace tranche::planner {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

PlanRequest request_of(int ranks, OffloadTier parameters = OffloadTier::nvme) {
  PlanRequest request;
  request.model = load_plan_model("gpt-nano");
  request.ranks = ranks;
  request.sequence = 16;
  request.config = parse_config(
      R"({"bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1})",
      ranks);
  request.config.stage = 3;
  request.config.workspace_bytes = std::int64_t{8} << 20;
  request.config.offload.optimizer = OffloadTier::nvme;
  request.config.offload.parameters = parameters;
  request.config.offload.nvme_path = "/none";
  return request;
}

HostMemory limit(std::int64_t bytes) {
  return {.source = HostMemory::Source::configuration, .bytes = bytes};
}

std::int64_t resolved(PlanRequest request) {
  resolve_host_state(request);
  return request.config.offload.host_state;
}

std::int64_t host_peak(PlanRequest request, std::int64_t bytes) {
  request.config.offload.host_state = bytes;
  return plan_run(request).tier(Tier::host).peak;
}

TEST(HostState, IsWhatALimitLeavesBesideAllElse) {
  for (const int ranks : {1, 2}) {
    PlanRequest request = request_of(ranks);
    const PlanResult none = plan_run(request);
    const std::int64_t least = none.tier(Tier::host).peak, all = none.state.asked_on_nvme;
    ASSERT_GT(all, 0);
    EXPECT_EQ(none.state.stay_in_host, 0) << "an engine takes auto as 0";
    request.host_memory = limit(least);
    EXPECT_EQ(resolved(request), 0);
    request.host_memory = limit(least / 2);
    EXPECT_EQ(resolved(request), 0);
    std::int64_t before = 0;
    for (const int part : {1, 2, 3}) {
      request.host_memory = limit(least + all * part / 4);
      const std::int64_t bytes = resolved(request);
      EXPECT_GE(bytes, all * part / 4);
      EXPECT_GE(bytes, before);
      EXPECT_LE(host_peak(request, bytes), request.host_memory.bytes) << "within the limit, to the byte";
      before = bytes;
    }
    request.host_memory = limit(least + 2 * all);
    EXPECT_EQ(resolved(request), all) << "no more than there is";
  }
}

TEST(HostState, LeavesBytesThatAreGivenAndTiersThatAreNone) {
  PlanRequest request = request_of(1);
  request.host_memory = limit(std::int64_t{1} << 40);
  request.config.offload.host_state = 4711;
  EXPECT_EQ(resolved(request), 4711);
  request.config.offload.host_state = -1;
  request.config.offload.optimizer = request.config.offload.parameters = OffloadTier::cpu;
  EXPECT_EQ(resolved(request), -1);
}

TEST(HostState, NoLimitThatIsKnownKeepsNothing) {
  PlanRequest request = request_of(1);
  resolve_host_state(request);
  EXPECT_EQ(request.config.offload.host_state, 0);
  EXPECT_THAT(request.config.offload.host_state_reason, HasSubstr("auto finds no limit of host memory"));
}

TEST(HostState, LeavesAMarginOfAMachineAndCountsACpusDeviceMemory) {
  PlanRequest request = request_of(1);
  const PlanResult none = plan_run(request);
  const std::int64_t beside = none.tier(Tier::host).peak + none.tier(Tier::device).peak;
  request.host_memory = {HostMemory::Source::this_machine, beside, beside, 1};
  EXPECT_EQ(resolved(request), 0);
  const std::int64_t room = none.state.asked_on_nvme / 2;
  const std::int64_t available = (beside + room + 7) / 7 * 8;
  request.host_memory = {HostMemory::Source::control_group, available, available, 1};
  resolve_host_state(request);
  EXPECT_GE(request.config.offload.host_state, room);
  EXPECT_LT(request.config.offload.host_state, none.state.asked_on_nvme);
  EXPECT_THAT(request.config.offload.host_state_reason,
              AllOf(HasSubstr("what its control group's limit leaves, less "), HasSubstr("all else takes")));
}

TEST(HostState, RanksOfATensorAxisTakeTheSameBytes) {
  PlanRequest request = request_of(4, OffloadTier::none);
  request.config.mesh = "shard=2, tensor=2";
  request.config.train_batch_size = 2;
  const PlanResult none = plan_run(request);
  request.host_memory = limit(none.tier(Tier::host).peak + none.state.asked_on_nvme / 2);
  const std::int64_t bytes = resolved(request);
  EXPECT_GT(bytes, 0);
  for (int rank = 0; rank < 4; ++rank) {
    request.rank = rank;
    EXPECT_EQ(resolved(request), bytes) << rank;
    EXPECT_LE(host_peak(request, bytes), request.host_memory.bytes) << rank;
  }
}

TEST(HostState, TheSearchChoosesItWithinItsBudgets) {
  FitRequest fit;
  fit.plan = request_of(1);
  fit.keep_optimizer_tier = fit.keep_parameters_tier = true;
  const PlanResult none = plan_run(fit.plan);
  fit.budget = none.tier(Tier::device).peak * 2;
  fit.plan.host_memory = limit(none.tier(Tier::host).peak * 2 + none.state.asked_on_nvme / 2);
  const FitResult chosen = find_fit(fit);
  ASSERT_TRUE(chosen.fits);
  EXPECT_GT(chosen.config.offload.host_state, 0);
  EXPECT_GT(chosen.plan.state.stay_in_host, 0);
  EXPECT_LE(chosen.plan.tier(Tier::host).peak, fit.plan.host_memory.bytes);
  EXPECT_EQ(chosen.ladder[chosen.chosen].host, chosen.plan.tier(Tier::host).peak);
  EXPECT_EQ(json::parse(chosen.config.to_json())["tranche"]["host_state"], chosen.config.offload.host_state);
  fit.plan.config.offload.host_state = 0;
  EXPECT_EQ(find_fit(fit).plan.state.stay_in_host, 0);
}

TEST(HostState, PlansSayWhatStaysToTheByte) {
  const auto plan = [](std::vector<std::string> more) {
    std::vector<std::string> arguments{
        "plan", "--model",         "gpt-nano", "--sequence",  "16",   "--stage", "3", "--offload-optimizer",
        "nvme", "--offload-param", "nvme",     "--nvme-path", "/none"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const tools::test::ProgramResult result = tools::test::run(arguments);
    EXPECT_EQ(result.status, 0) << result.errors;
    return result.out;
  };
  const json disk = json::parse(plan({"--host-state", "0", "--json"}))["host_state"];
  EXPECT_EQ(disk["stay_in_host"], 0);
  const std::string all = std::to_string(disk["asked_on_nvme"].get<std::int64_t>());
  EXPECT_THAT(plan({"--host-state", "0"}),
              HasSubstr("of " + all + " B asked for on nvme 0 B stay in host memory"));
  EXPECT_THAT(plan({"--host-memory", "1GiB"}),
              AllOf(HasSubstr("of " + all + " B asked for on nvme " + all + " B stay in host memory"),
                    HasSubstr("as auto finds 1.00 GiB a rank (the limit that is given)"),
                    Not(HasSubstr("read from nvme"))));
  EXPECT_THAT(plan({"--host-memory", "0"}), HasSubstr("auto finds no limit of host memory"));
  EXPECT_THAT(plan({"--host-state", "100KiB"}), HasSubstr("tranche.host_state is 100.00 KiB\n"));
}

}  // namespace
}  // namespace tranche::planner
