// tranche.host_state auto: what a plan finds free, what it says of it, and what the search makes of it.
#include "tranche/planner/host_state.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "checkpoint/reader.h"
#include "tests/tools/program_fixture.h"
#include "tranche/comm/backends.h"
#include "tranche/core/error.h"
#include "tranche/models/gpt.h"
#include "tranche/planner/mesh_search.h"
#include "tranche/planner/mesh_search_text.h"
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

/// Bytes of a checkpoint's reader, which count to a limit.
const std::int64_t reader = checkpoint::Reader::staging_bytes();

/// A limit that leaves `bytes` beside it.
HostMemory limit(std::int64_t bytes) {
  return {.source = HostMemory::Source::configuration, .bytes = bytes + reader};
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
      EXPECT_LE(host_peak(request, bytes), request.host_memory.bytes - reader)
          << "within the limit, to the byte";
      before = bytes;
    }
    request.host_memory = limit(least + 2 * all);
    EXPECT_EQ(resolved(request), all) << "no more than there is";
  }
}

TEST(HostState, IsWithinALimitHoweverItsBytesAreRounded) {
  int found = 0;
  for (const DataType moments : {DataType::float32, DataType::block8}) {
    for (const std::int64_t tile : {std::int64_t{4096}, std::int64_t{1} << 20}) {
      for (const OffloadTier parameters : {OffloadTier::none, OffloadTier::nvme}) {
        PlanRequest request = request_of(2, parameters);
        request.config.precision.moments = moments;
        request.config.offload.tile_elements = tile;
        const PlanResult none = plan_run(request);
        const std::int64_t least = none.tier(Tier::host).peak, all = none.state.asked_on_nvme;
        const auto homes = [&](std::int64_t bytes) {  // bytes that just hold the buffers that `bytes` hold
          PlanRequest at = request;
          at.config.offload.host_state = bytes;
          return plan_run(at).state.stay_in_host;
        };
        for (const std::int64_t edge : {std::int64_t{0}, homes(all / 2), homes(all - 1), all}) {
          for (const std::int64_t beside : {-4096, -257, -1, 1, 256, 4096}) {
            request.host_memory = limit(least + edge + beside);
            const std::int64_t bytes = resolved(request);
            if (edge + beside >= 0) {
              EXPECT_LE(host_peak(request, bytes), request.host_memory.bytes - reader);
            }
            if (edge > 0) {
              EXPECT_GE(bytes, edge + beside - 8192) << "no more than rounding is lost";
            }
            found += bytes > 0 ? 1 : 0;
            if (HasFailure()) {
              FAIL() << name_of(moments) << ", tiles of " << tile << ", " << name_of(parameters) << ", "
                     << edge << " of " << all << ", beside it " << beside;
            }
          }
        }
      }
    }
  }
  EXPECT_GT(found, 120);
}

TEST(HostState, FewMicroBatchesStandForMany) {
  PlanRequest request = request_of(1);
  const PlanResult none = plan_run(request);
  request.host_memory = limit(none.tier(Tier::host).peak + none.state.asked_on_nvme / 2);
  const std::int64_t few = resolved(request);
  request.config.accumulation_steps = 100'000;  // their plans would take hours
  request.config.train_batch_size = 100'000;
  EXPECT_NEAR(static_cast<double>(resolved(request)), static_cast<double>(few), 1 << 16);
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
  EXPECT_THAT(request.config.offload.host_state_reason,
              HasSubstr("because auto found no limit of host memory"));
}

TEST(HostState, LeavesHalfOfAMachineAndCountsACpusDeviceMemory) {
  PlanRequest request = request_of(1);
  const PlanResult none = plan_run(request);
  const std::int64_t beside = none.tier(Tier::host).peak + none.tier(Tier::device).peak + reader;
  request.host_memory = {HostMemory::Source::this_machine, 2 * beside, 2 * beside, 1};
  EXPECT_EQ(resolved(request), 0);
  request.host_memory.bytes += none.state.asked_on_nvme;
  resolve_host_state(request);
  EXPECT_GE(request.config.offload.host_state, none.state.asked_on_nvme / 2);
  EXPECT_LT(request.config.offload.host_state, none.state.asked_on_nvme);
  EXPECT_THAT(request.config.offload.host_state_reason,
              HasSubstr("(half of what this machine has available; --host-memory gives another limit)"));
  request.config.offload.host_state = -1;
  const std::int64_t room = none.state.asked_on_nvme / 2;
  const std::int64_t available = (beside + room + 7) / 7 * 8;
  request.host_memory = {HostMemory::Source::control_group, available, available, 1};
  resolve_host_state(request);
  EXPECT_GE(request.config.offload.host_state, room);
  EXPECT_LT(request.config.offload.host_state, none.state.asked_on_nvme);
  EXPECT_THAT(
      request.config.offload.host_state_reason,
      AllOf(HasSubstr("what its control group's limit leaves, less "), HasSubstr("everything else takes")));
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
    EXPECT_LE(host_peak(request, bytes), request.host_memory.bytes - reader) << rank;
  }
}

/// Calls `work` with each rank, and a number that all agree on.
void on_all_ranks(int ranks, const std::function<void(int, const MostOfAll&)>& work) {
  run_thread_ranks(ranks, [&](int rank, const CommunicatorFactory& factory) {
    CommunicatorOptions options;
    options.timeout_seconds = 60;
    const std::unique_ptr<Communicator> world = factory(options);
    work(rank, [&](std::int64_t own) {
      own = -own;
      world
          ->all_reduce(&own, 1, DataType::int64, ReduceOperation::minimum, {"test", "most", Traffic::control})
          .wait();
      return -own;
    });
  });
}

TEST(HostState, RanksThatPlanThemselvesFindTheSame) {
  PlanRequest request = request_of(4, OffloadTier::none);
  request.config.mesh = "shard=2, tensor=2";
  request.config.train_batch_size = 2;
  const PlanResult none = plan_run(request);
  request.host_memory = limit(none.tier(Tier::host).peak + none.state.asked_on_nvme / 2);
  const std::int64_t expected = resolved(request);
  std::array<std::int64_t, 4> found{};
  on_all_ranks(4, [&](int rank, const MostOfAll& most) {
    PlanRequest own = request;
    own.rank = rank;
    if (rank > 1) own.host_memory.bytes *= 2;  // the least limit holds
    resolve_host_state(own, most);
    found[static_cast<std::size_t>(rank)] = own.config.offload.host_state;
  });
  EXPECT_THAT(found, testing::Each(expected));
}

TEST(HostState, ARankWhosePlanFailsThrowsAndHoldsUpNone) {
  std::array<std::string, 3> errors;
  on_all_ranks(3, [&](int rank, const MostOfAll& most) {
    PlanRequest own = request_of(3);
    own.rank = rank;
    own.host_memory = limit(std::int64_t{1} << 40);
    if (rank == 1) own.lengths = {100};
    try {
      resolve_host_state(own, most);
      EXPECT_EQ(own.config.offload.host_state, 0) << "a rank that has no plan fits nowhere";
    } catch (const ConfigurationError& error) {
      errors[static_cast<std::size_t>(rank)] = error.message();
    }
  });
  EXPECT_EQ(errors[0] + errors[2], "");
  EXPECT_THAT(errors[1], HasSubstr("a length of 100 is planned"));
}

TEST(HostState, LeavesRoomToPutHalvesOfWeightsTogether) {
  const auto beside = [](MasterFormat master, double ratio) {
    PlanRequest request = request_of(1, OffloadTier::none);
    request.config.precision.master = master;
    request.config.offload.ratio = ratio;
    const std::int64_t peak = plan_run(request).tier(Tier::host).peak;
    request.host_memory = limit(std::int64_t{1} << 30);
    for (std::int64_t room = 0;; room += 4096) {  // until the first byte is free for state
      request.host_memory = limit(peak + room + 1);
      if (resolved(request) > 0) return room;
    }
  };
  EXPECT_EQ(beside(MasterFormat::split, 1), 0) << "tiles have whole master weights";
  EXPECT_EQ(beside(MasterFormat::fp32, 0.5), 0);
  constexpr std::int64_t block = 12 * 32 * 32 + 13 * 32;  // elements of a block of gpt-nano
  EXPECT_GE(beside(MasterFormat::split, 0.5), 4 * block);
  EXPECT_LE(beside(MasterFormat::split, 0.5), 4 * block + 8192 + 1024);
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

/// Expects that a search's trial has the host state, the bytes and the seconds of its own configuration.
void expect_what_stays(PlanRequest request, const FitTrial& trial, const Config& config) {
  request.config = config;
  EXPECT_EQ(trial.host_state, config.offload.host_state);
  EXPECT_DOUBLE_EQ(trial.cost.total(), step_cost(request, request.rates).total());
  request.config.offload.host_state = -1;
  EXPECT_EQ(trial.host_state, resolved(request));
  EXPECT_EQ(trial.host, host_peak(request, trial.host_state));
  const double kept = trial.cost.total();
  request.config.offload.host_state = 0;
  EXPECT_LT(kept, step_cost(request, request.rates).total()) << "the disk is slow";
}

TEST(HostState, TheSearchRanksByWhatStays) {
  FitRequest fit;
  fit.plan = request_of(1);
  fit.plan.rates.nvme = fit.rates.nvme = 1e6;
  const PlanResult none = plan_run(fit.plan);
  fit.budget = std::int64_t{1} << 30;
  fit.keep_micro_batch = true;
  // The tiers are kept, so that all trials have state on nvme; half of it stays.
  fit.keep_optimizer_tier = fit.keep_parameters_tier = true;
  fit.plan.host_memory = limit(none.tier(Tier::host).peak + none.state.asked_on_nvme / 2);
  const FitResult result = find_fit(fit);
  ASSERT_TRUE(result.fits);
  int with_state = 0;
  for (const FitTrial& trial : result.ladder) {
    if (!trial.fits) continue;
    Config config = result.config;
    config.activation_checkpointing = trial.checkpoint_every > 0;
    config.checkpoint_every = std::max(1, trial.checkpoint_every);
    config.offload.activations = trial.activations;
    config.offload.host_state = trial.host_state;
    expect_what_stays(fit.plan, trial, config);
    with_state += trial.host_state > 0 ? 1 : 0;
  }
  EXPECT_GT(with_state, 0);
  EXPECT_EQ(result.plan.state.stay_in_host, [&] {
    PlanRequest chosen = fit.plan;
    chosen.config = result.config;
    return plan_run(chosen).state.stay_in_host;
  }());
  EXPECT_THAT(fit_text(fit, result),
              HasSubstr("host state " + format_bytes(result.config.offload.host_state)));
  EXPECT_EQ(json::parse(fit_json(fit, result))["ladder"][result.chosen]["host_state_bytes"],
            result.config.offload.host_state);
}

TEST(HostState, WhatStaysDecidesBetweenTheDiskAndComputingAgain) {
  models::GptConfig gpt = models::GptConfig::preset("gpt-nano");
  gpt.layers = 4;
  gpt.heads = 4;
  gpt.width = 512;
  gpt.vocabulary = 4096;
  gpt.positions = 128;
  FitRequest fit;
  PlanRequest& plan = fit.plan;
  plan = request_of(1, OffloadTier::none);
  plan.model = {};
  plan.model.name = "wide";
  plan.model.language = std::make_shared<models::Gpt>(gpt);
  plan.sequence = 128;
  plan.config.micro_batch_size = plan.config.train_batch_size = 8;
  plan.config.offload.tile_elements = 1 << 18;
  fit.keep_micro_batch = fit.keep_parameters_tier = true;
  const auto with = [&](OffloadTier tier, bool again) {
    PlanRequest request = plan;
    request.config.offload.optimizer = tier;
    request.config.activation_checkpointing = again;
    return request;
  };
  // All on the device does not fit; with the state on disk it does, or if activations are computed again.
  const PlanResult disk = plan_run(with(OffloadTier::nvme, false));
  fit.budget =
      std::max(disk.tier(Tier::device).peak, plan_run(with(OffloadTier::none, true)).tier(Tier::device).peak);
  ASSERT_LT(fit.budget, plan_run(with(OffloadTier::none, false)).tier(Tier::device).peak);
  // Three seconds of computing, whose forward pass may hide some of the disk's 1.6.
  const std::int64_t all = disk.state.asked_on_nvme, some = all * 2 / 5;
  fit.rates.operations *= step_cost(with(OffloadTier::none, false), fit.rates).compute / 3;
  fit.rates.nvme = static_cast<double>(all) / 0.8;
  fit.rates.host_link = fit.rates.host_update = 1e15;
  const auto seconds = [&](PlanRequest request, std::int64_t stays) {
    request.config.offload.host_state = stays;
    return step_cost(request, fit.rates).total();
  };
  const double again = seconds(with(OffloadTier::none, true), 0);
  ASSERT_GT(seconds(with(OffloadTier::nvme, false), 0), again);
  ASSERT_LT(seconds(with(OffloadTier::nvme, false), some), again);
  const auto chosen = [&](std::int64_t stays) {
    plan.host_memory = limit(disk.tier(Tier::host).peak + stays);
    EXPECT_GT(host_peak(with(OffloadTier::cpu, false), 0), plan.host_memory.bytes) << "not in host memory";
    const FitResult result = find_fit(fit);
    EXPECT_TRUE(result.fits);
    MeshSearchRequest search;
    search.fit = fit;
    const MeshSearchResult mesh = search_meshes(search);
    EXPECT_TRUE(mesh.fits);
    EXPECT_EQ(mesh.config.offload.optimizer, result.config.offload.optimizer);
    EXPECT_EQ(mesh.config.offload.host_state, result.config.offload.host_state);
    EXPECT_DOUBLE_EQ(mesh.chosen.seconds, result.ladder[result.chosen].cost.total());
    return result.config.offload.optimizer;
  };
  EXPECT_EQ(chosen(0), OffloadTier::none);
  EXPECT_EQ(chosen(some), OffloadTier::nvme);
  const auto meshes = [&] {
    MeshSearchRequest search;
    search.fit = fit;
    return search_meshes(search);
  };
  // The next best on less time lacks a byte of the device's memory, and has the seconds of what stays.
  fit.budget = disk.tier(Tier::device).peak - 1;
  const std::optional<MeshTrial> less = meshes().less_time;
  ASSERT_TRUE(less);
  EXPECT_EQ(less->missing, 1);
  EXPECT_GE(less->trial.host_state, some);
  EXPECT_DOUBLE_EQ(less->seconds, seconds(with(OffloadTier::nvme, false), less->trial.host_state));
  // A configuration that lacks room on the disk would be faster only if all of the host memory held state.
  plan.host_memory = limit(disk.tier(Tier::host).peak);
  ASSERT_LT(seconds(with(OffloadTier::nvme, false), plan.host_memory.bytes), again);
  fit.budget = plan_run(with(OffloadTier::none, true)).tier(Tier::device).peak;
  fit.nvme_budget = disk.tier(Tier::nvme).peak - 1;
  const MeshSearchResult mesh = meshes();
  EXPECT_EQ(mesh.chosen.trial.optimizer, OffloadTier::none);
  ASSERT_TRUE(mesh.less_time);
  EXPECT_EQ(mesh.less_time->trial.optimizer, OffloadTier::none) << describe(*mesh.less_time);
}

TEST(HostState, AMeshIsRankedByWhatStays) {
  for (const char* axes : {"pipeline=1, context=1, tensor=1", "pipeline=2"}) {
    MeshSearchRequest search;
    search.fit.plan = request_of(2, OffloadTier::none);
    search.fit.plan.config.pipeline_schedule = "zb-h1";
    search.fit.keep_stage = search.fit.keep_micro_batch = true;
    search.fit.plan.rates.nvme = search.fit.rates.nvme = 1e6;
    search.fit.keep_optimizer_tier = search.fit.keep_parameters_tier = true;
    search.fit.plan.config.train_batch_size = 4;
    search.fit.plan.config.accumulation_steps = 2;
    search.fit.budget = std::int64_t{1} << 30;
    search.axes = axes;
    PlanRequest on_mesh = search.fit.plan;
    if (search.axes == "pipeline=2") {
      on_mesh.config.mesh = "pipeline=2, shard=1";
      on_mesh.config.accumulation_steps = 4;
    }
    const PlanResult none = plan_run(on_mesh);
    search.fit.plan.host_memory = limit(none.tier(Tier::host).peak + none.state.asked_on_nvme / 2);
    const MeshSearchResult result = search_meshes(search);
    ASSERT_TRUE(result.fits) << axes;
    PlanRequest chosen = search.fit.plan;
    chosen.config = result.config;
    chosen.rank = result.rank;
    EXPECT_GT(result.config.offload.host_state, 0) << axes;
    EXPECT_GT(result.plan.state.stay_in_host, 0) << axes;
    EXPECT_EQ(result.plan.state.stay_in_host, plan_run(chosen).state.stay_in_host) << axes;
    EXPECT_LE(result.plan.tier(Tier::host).peak, search.fit.plan.host_memory.bytes - reader) << axes;
    EXPECT_EQ(result.chosen.trial.host_state, result.config.offload.host_state) << axes;
    chosen.config.offload.host_state = -1;
    EXPECT_EQ(resolved(chosen), result.config.offload.host_state) << axes;
    search.fit.plan.config.offload.host_state = 0;
    const MeshSearchResult without = search_meshes(search);
    EXPECT_EQ(without.config.offload.host_state, 0) << axes;
    EXPECT_GT(without.chosen.seconds, result.chosen.seconds) << axes;
    // None of all configurations is faster, but for nanoseconds of the disk that one with more to compute may
    // hide: the search tries those only where the simpler one does not fit.
    search.fit.plan.config.offload.host_state = -1;
    search.exhaustive = true;
    EXPECT_NEAR(search_meshes(search).chosen.seconds, result.chosen.seconds, 1e-6 * result.chosen.seconds)
        << axes;
    search.exhaustive = false;
    search.fit.plan.host_memory = limit(std::int64_t{1} << 30);
    EXPECT_LT(search_meshes(search).chosen.trial.cost.offload, 0.25 * without.chosen.trial.cost.offload)
        << axes << ": all of a stage's state stays";
    for (const MeshTrial& one : result.planned) {
      EXPECT_TRUE(!one.trial.fits || one.seconds >= result.chosen.seconds) << describe(one);
    }
  }
}

/// A search with state on nvme, half of which the limit of host memory leaves room for.
FitRequest half_on_disk() {
  FitRequest fit;
  fit.plan = request_of(1);
  fit.plan.rates.nvme = fit.rates.nvme = 1e6;
  fit.budget = std::int64_t{1} << 30;
  fit.keep_micro_batch = fit.keep_optimizer_tier = fit.keep_parameters_tier = true;
  const PlanResult none = plan_run(fit.plan);
  fit.plan.host_memory = limit(none.tier(Tier::host).peak + none.state.asked_on_nvme / 2);
  return fit;
}

MeshSearchRequest on_meshes(const FitRequest& fit) {
  MeshSearchRequest search;
  search.fit = fit;
  return search;
}

/// The configuration of a trial of a search that keeps stage and tiers.
PlanRequest plan_of(const FitRequest& fit, const FitTrial& trial) {
  PlanRequest request = fit.plan;
  Config& config = request.config;
  config.activation_checkpointing = trial.checkpoint_every > 0;
  config.checkpoint_every = std::max(1, trial.checkpoint_every);
  config.offload.optimizer = trial.optimizer;
  config.offload.parameters = trial.parameters;
  config.offload.activations = trial.activations;
  config.offload.host_state = std::max<std::int64_t>(0, trial.host_state);
  config.micro_batch_size = trial.micro_batch;
  config.accumulation_steps = trial.accumulation;
  return request;
}

TEST(HostState, ASearchCountsWhatStaysToTheSpaceOnNvme) {
  FitRequest fit = half_on_disk();
  PlanRequest run = fit.plan;
  resolve_host_state(run);
  const std::int64_t least = plan_run(run).tier(Tier::nvme).peak;
  ASSERT_GT(least, 0);
  ASSERT_LT(least, plan_run(fit.plan).tier(Tier::nvme).peak) << "auto would be too much for the disk";
  for (const std::int64_t lacks : {0, 1}) {
    fit.nvme_budget = least - lacks;
    const FitResult result = find_fit(fit);
    EXPECT_EQ(result.fits, lacks == 0);
    EXPECT_EQ(result.plan.tier(Tier::nvme).peak, least);
    EXPECT_EQ(result.config.offload.host_state, run.config.offload.host_state);
    EXPECT_EQ(result.config.offload.host_state_reason, run.config.offload.host_state_reason);
    EXPECT_EQ(result.ladder[result.chosen].nvme, least);
    EXPECT_EQ(result.ladder.size() == 1, lacks > 0) << "others with this state are not tried";
    const MeshSearchResult mesh = search_meshes(on_meshes(fit));
    EXPECT_EQ(mesh.fits, lacks == 0);
    EXPECT_EQ(mesh.plan.tier(Tier::nvme).peak, least);
    EXPECT_EQ(mesh.config.offload.host_state, run.config.offload.host_state);
    EXPECT_EQ(mesh.config.offload.host_state_reason, run.config.offload.host_state_reason);
    EXPECT_EQ(mesh.chosen.missing, lacks);
    EXPECT_EQ(mesh.counts.by_state > 0, lacks > 0);
    EXPECT_DOUBLE_EQ(mesh.chosen.seconds, step_cost(plan_of(fit, mesh.chosen.trial), fit.rates).total());
  }
}

TEST(HostState, ACpuThatComputesAgainLeavesMoreForState) {
  FitRequest fit = half_on_disk();
  PlanRequest& plan = fit.plan;
  plan.sequence = 64;
  plan.config.micro_batch_size = plan.config.train_batch_size = 16;
  PlanRequest again = plan;
  again.config.activation_checkpointing = true;
  const auto both = [](const PlanRequest& request) {
    const PlanResult result = plan_run(request);
    return result.tier(Tier::host).peak + result.tier(Tier::device).peak;
  };
  const std::int64_t asked = plan_run(plan).state.asked_on_nvme;
  ASSERT_GT(both(plan), both(again) + asked / 2);
  const std::int64_t available = 2 * (both(again) + reader + asked / 2);
  plan.host_memory = again.host_memory = {HostMemory::Source::this_machine, available, available, 1};
  resolve_host_state(again);
  fit.nvme_budget = plan_run(again).tier(Tier::nvme).peak;
  const FitResult result = find_fit(fit);
  EXPECT_TRUE(result.fits);
  EXPECT_EQ(result.plan.tier(Tier::nvme).peak, fit.nvme_budget);
  const MeshSearchResult mesh = search_meshes(on_meshes(fit));
  EXPECT_TRUE(mesh.fits);
  EXPECT_EQ(mesh.plan.tier(Tier::nvme).peak, fit.nvme_budget);
}

TEST(HostState, WhatLacksDeviceMemoryIsReportedWithWhatStays) {
  FitRequest fit = half_on_disk();
  std::int64_t least = fit.budget;
  for (const bool again : {false, true}) {
    PlanRequest run = fit.plan;
    run.config.activation_checkpointing = again;
    least = std::min(least, plan_run(run).tier(Tier::device).peak);
  }
  fit.budget = least - 1;
  const MeshSearchResult result = search_meshes(on_meshes(fit));
  ASSERT_FALSE(result.fits);
  PlanRequest run = plan_of(fit, result.chosen.trial);
  EXPECT_EQ(result.chosen.missing, 1);
  EXPECT_DOUBLE_EQ(result.chosen.seconds, step_cost(run, fit.rates).total());
  EXPECT_EQ(result.chosen.trial.host, plan_run(run).tier(Tier::host).peak);
  EXPECT_GT(result.plan.state.stay_in_host, 0);
  run.config.offload.host_state = -1;
  resolve_host_state(run);
  EXPECT_EQ(result.config.offload.host_state, run.config.offload.host_state);
  EXPECT_EQ(result.config.offload.host_state_reason, run.config.offload.host_state_reason);
}

TEST(HostState, EveryTrialOfAMeshHasTheSecondsOfItsOwnPlan) {
  FitRequest fit = half_on_disk();
  fit.keep_micro_batch = false;
  fit.plan.sequence = 64;
  fit.plan.config.train_batch_size = fit.plan.config.accumulation_steps = 8;
  PlanRequest run = fit.plan;
  run.config.activation_checkpointing = true;
  run.config.micro_batch_size = 4;
  run.config.accumulation_steps = 2;
  fit.budget = plan_run(run).tier(Tier::device).peak;
  fit.plan.host_memory = limit(std::int64_t{1} << 30);
  const MeshSearchResult result = search_meshes(on_meshes(fit));
  ASSERT_TRUE(result.fits);
  int fit_with_none = 0;
  for (const MeshTrial& one : result.planned) {
    EXPECT_DOUBLE_EQ(one.seconds, step_cost(plan_of(fit, one.trial), fit.rates).total()) << describe(one);
    fit_with_none += one.trial.fits && one.trial.host_state < 0 ? 1 : 0;
  }
  EXPECT_GT(fit_with_none, 0) << "planned only to judge a larger micro-batch";
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
                    HasSubstr("because auto found 1.00 GiB a rank (the limit that is given)"),
                    Not(HasSubstr("read from nvme"))));
  EXPECT_THAT(plan({"--host-memory", "0"}), HasSubstr("because auto found no limit of host memory"));
  EXPECT_THAT(plan({"--host-state", "100KiB"}), HasSubstr("tranche.host_state is 100.00 KiB\n"));
  const auto search = [&](const char* ranks, const char* axes, const char* host_memory, bool as_json) {
    std::vector<std::string> more{"--fit",         "64MiB",    "--ranks", ranks,
                                  "--mesh",        axes,       "--set",   "tranche.workspace=8MiB",
                                  "--host-memory", host_memory};
    if (as_json) more.emplace_back("--json");
    return plan(more);
  };
  EXPECT_THAT(search("1", "search", "1GiB", false),
              AllOf(HasSubstr("of " + all + " B asked for on nvme " + all + " B stay in host memory"),
                    HasSubstr(", because auto found 1.00 GiB a rank (the limit that is given)"),
                    HasSubstr("parameters nvme, host state "), HasSubstr(" --host-state " + all + " ")));
  EXPECT_THAT(
      search("2", "search, tensor=2", "1GiB", false),
      AllOf(HasSubstr("\ntranche.host_state is "), HasSubstr(", because auto found 1.00 GiB a rank")));
  EXPECT_THAT(search("1", "search", "0", false),
              AllOf(HasSubstr(" 0 B stay in host memory"), HasSubstr(" --host-state 0 ")));
  const json found = json::parse(search("1", "search", "1GiB", true));
  EXPECT_EQ(std::to_string(found["host_state"]["bytes"].get<std::int64_t>()), all);
  EXPECT_EQ(found["search"]["chosen"]["host_state_bytes"], found["host_state"]["bytes"]);
  EXPECT_THAT(found["search"]["command"].get<std::string>(), HasSubstr(" --host-state " + all + " "));
}

}  // namespace
}  // namespace tranche::planner
