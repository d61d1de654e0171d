// Recorded steps and their simulation.

#include "tranche/planner/projection.h"
#include "tranche/models/gpt.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "planner/record_steps.h"
#include "tests/tools/program_fixture.h"
#include "tools/plan/calibrate.h"
#include "tranche/core/error.h"

namespace tranche::planner {
namespace {

using detail::RecordedWork;
using detail::WorkKind;
using detail::WorkRecorder;
using namespace tools;  // for the program, which runs what is planned

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using tools::test::message_of;
using tools::test::ProgramResult;
using tools::test::TemporaryFolder;

PlanRequest request_of(int ranks, int stage, bool overlap) {
  PlanRequest request;
  request.model.name = "gpt-nano";
  models::GptConfig gpt = models::GptConfig::preset("gpt-nano");
  gpt.layers = 4;
  request.model.language = std::make_shared<models::Gpt>(gpt);
  request.sequence = 16;
  request.ranks = ranks;
  request.config.stage = stage;
  request.config.overlap = overlap;
  request.config.micro_batch_size = 2;
  request.config.accumulation_steps = 1;
  request.config.train_batch_size = 2 * ranks;
  return request;
}

/// Round figures: GEMMs at 1 GFLOP/s, other kernels at 1 GB/s, collectives of `collective` seconds.
Machine machine_of(double collective) {
  Machine machine;
  machine.name = "round";
  machine.source = "measured";
  machine.cores = 2;
  ComputeShare share;
  share.ranks = 2;
  share.memory_bytes_per_second = 1e9;
  for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
    share.products.push_back({dtype, "nn", {64}, {1e9}});
  }
  machine.shares.push_back(share);
  for (const char* operation : {"all_gather", "reduce_scatter"}) {
    machine.collectives.push_back({operation, 2, 2, 0, {{{1, collective}, {1e12, collective * (1 + 1e-9)}}}});
  }
  machine.host_link = {1e9, 0};
  machine.host_bytes_per_second = 1e9;
  return machine;
}

Projection projected(const PlanRequest& plan, const Machine& machine) {
  return project({plan, machine, std::nullopt, 0});
}

/// The index of the n-th work of this kind and unit from `begin` on; -1 if there is none.
int find(const WorkRecorder& recorder, WorkKind kind, const std::string& name, const std::string& detail,
         int begin = 0) {
  for (int i = begin; i < static_cast<int>(recorder.work().size()); ++i) {
    const RecordedWork& work = recorder.work()[static_cast<std::size_t>(i)];
    if (work.kind == kind && work.name == name && (detail.empty() || work.detail == detail)) return i;
  }
  return -1;
}

/// True if work `later` waits for `earlier`, directly or indirectly.
bool behind(const WorkRecorder& recorder, int later, int earlier) {
  std::vector<int> open{later};
  std::vector<bool> seen(recorder.work().size(), false);
  while (!open.empty()) {
    const int at = open.back();
    open.pop_back();
    if (at == earlier) return true;
    if (at < earlier || seen[static_cast<std::size_t>(at)]) continue;
    seen[static_cast<std::size_t>(at)] = true;
    const auto& after = recorder.work()[static_cast<std::size_t>(at)].after;
    open.insert(open.end(), after.begin(), after.end());
  }
  return false;
}

TEST(RecordedSteps, StageThreeGathersAheadOfWhatComputes) {
  const auto recorder = record_steps(request_of(2, 3, true), 1);
  const int begin = find(*recorder, WorkKind::mark, step_mark, "");
  const int first = find(*recorder, WorkKind::collective, "all_gather", "h.1", begin);
  const int second = find(*recorder, WorkKind::collective, "all_gather", "h.2", begin);
  ASSERT_GE(first, 0);
  ASSERT_GE(second, 0);
  // The kernel that needs h.1 follows its gather. The gather of h.2 was issued before and waits for neither.
  int user = first;
  while (!(recorder->work()[static_cast<std::size_t>(user)].kind == WorkKind::kernel &&
           behind(*recorder, user, first))) {
    ++user;
  }
  EXPECT_LT(second, user);
  EXPECT_FALSE(behind(*recorder, second, user));
}

TEST(RecordedSteps, WithoutOverlapTheHostWaitsForEveryCollective) {
  const auto recorder = record_steps(request_of(2, 3, false), 1);
  const int begin = find(*recorder, WorkKind::mark, step_mark, "");
  int collectives = 0;
  for (int i = begin; i < static_cast<int>(recorder->work().size()); ++i) {
    if (recorder->work()[static_cast<std::size_t>(i)].kind != WorkKind::collective) continue;
    ++collectives;
    // The work that is issued after the collective, on any lane, waits for it.
    ASSERT_LT(i + 1, static_cast<int>(recorder->work().size()));
    EXPECT_TRUE(behind(*recorder, i + 2, i)) << recorder->work()[static_cast<std::size_t>(i)].name;
  }
  EXPECT_GE(collectives, 5 + 5 + 5);
}

TEST(RecordedSteps, CountWhatThePlanCounts) {
  const PlanRequest request = request_of(2, 2, true);
  const auto recorder = record_steps(request, 1);
  const PlanResult plan = plan_run(request);
  double operations = 0;
  std::int64_t kernels = 0;
  for (int i = find(*recorder, WorkKind::mark, step_mark, ""); i < static_cast<int>(recorder->work().size());
       ++i) {
    const RecordedWork& work = recorder->work()[static_cast<std::size_t>(i)];
    if (work.kind != WorkKind::kernel) continue;
    ++kernels;
    operations += work.operations;
  }
  EXPECT_EQ(kernels, plan.work.kernels);
  EXPECT_EQ(operations, plan.work.floating_point_operations);
}

TEST(RecordedSteps, RecordingChangesNoPlan) {
  const PlanRequest request = request_of(3, 3, true);
  const PlanResult before = plan_run(request);
  (void)record_steps(request, 2);
  EXPECT_EQ(plan_run(request).memory, before.memory);
}

TEST(Projected, PartsAddUpToTheStep) {
  for (const int stage : {0, 1, 2, 3}) {
    const Projection projection = projected(request_of(2, stage, true), machine_of(1e-3));
    const StepBreakdown& step = projection.step;
    EXPECT_GT(step.compute, 0);
    EXPECT_GT(step.optimizer, 0);
    double path = 0;
    for (const auto& [name, seconds] : projection.critical_path) path += seconds;
    EXPECT_NEAR(path, step.total(), 1e-9 + 1e-6 * step.total()) << stage;
    EXPECT_NEAR(projection.tokens_per_second, 2 * 2 * 16 / step.total(), 1e-6);
  }
}

TEST(Projected, SlowCollectivesAreExposedAndOverlapHidesFastOnes) {
  const Projection slow = projected(request_of(2, 3, true), machine_of(0.1));
  // Five units are gathered twice and reduced once; milliseconds of compute hide little of that.
  EXPECT_GT(slow.step.exposed_gather + slow.step.exposed_reduce, 0.9 * 15 * 0.1);
  EXPECT_LT(slow.efficiency, 0.2);
  const Projection fast = projected(request_of(2, 3, true), machine_of(1e-4));
  const Projection serial = projected(request_of(2, 3, false), machine_of(1e-4));
  EXPECT_LT(fast.step.exposed_gather + fast.step.exposed_reduce, 0.5 * 15e-4);
  EXPECT_NEAR(serial.step.exposed_gather + serial.step.exposed_reduce, 15e-4, 1e-4);
}

TEST(Projected, UnitsLargerThanThePrefetchBucketHideTheirGathersToo) {
  const double all = projected(request_of(2, 3, true), machine_of(1e-3)).step.total();
  PlanRequest request = request_of(2, 3, true);
  request.config.prefetch_elements = request.config.max_live_elements = 0;
  EXPECT_DOUBLE_EQ(projected(request, machine_of(1e-3)).step.total(), all);
  request.config.depth = 1;
  EXPECT_GT(projected(request, machine_of(1e-3)).step.total(), 1.05 * all);
}

TEST(Projected, CollectivesThatKeepACoreBusyTakeItFromCompute) {
  Machine machine = machine_of(1e-3);
  const double free = projected(request_of(2, 2, true), machine).step.total();
  for (CollectiveTable& table : machine.collectives) table.cores = 1;
  const double shared = projected(request_of(2, 2, true), machine).step.total();
  EXPECT_GT(shared, free + 0.5e-3);  // the rank has one core
}

TEST(Projected, MoreMicroBatchesThanAreSimulatedCostInProportion) {
  const auto seconds = [](std::int64_t micro_batches) {
    PlanRequest request = request_of(2, 2, true);
    request.config.accumulation_steps = micro_batches;
    request.config.train_batch_size = 4 * micro_batches;
    return projected(request, machine_of(1e-4)).step.total();
  };
  const double one = seconds(4) - seconds(3);
  EXPECT_NEAR(seconds(12), seconds(4) + 8 * one, 1e-9);
}

TEST(Projected, BetweenNodesTheNetworkIsShared) {
  const Machine machine = machine_of(1e-3);
  const LinkRate network{1e9, 1e-5};
  const double gather = collective_seconds(machine, network, "all_gather", 4, 2, 2, 1e6);
  EXPECT_NEAR(gather, 1e-3 + 1e-5 + 0.5e6 / 1e9, 1e-7);
  // Partial sums of the two ranks on a node are fp32.
  const double reduce = collective_seconds(machine, network, "reduce_scatter", 4, 2, 2, 1e6);
  EXPECT_NEAR(reduce, 1e-3 + 1e-5 + 2 * 0.5e6 / 1e9, 1e-7);
  // GPUs send their own data: four on a node send twice as much in bf16 as its CPUs in fp32. NCCL's ring adds
  // up.
  Machine gpus = machine_of(1e-3);
  gpus.device = DeviceKind::cuda;
  for (CollectiveTable& table : gpus.collectives) table.ranks = 4;
  EXPECT_NEAR(collective_seconds(gpus, network, "reduce_scatter", 8, 4, 2, 1e6),
              1e-3 + 1e-5 + 4 * 0.5e6 / 1e9, 1e-7);
  EXPECT_NEAR(collective_seconds(gpus, network, "reduce_scatter", 8, 4, 2, 1e6, true),
              1e-3 + 1e-5 + 0.5e6 / 1e9, 1e-7);
  EXPECT_NEAR(collective_seconds(gpus, network, "all_gather", 8, 4, 2, 1e6), 1e-3 + 1e-5 + 0.5e6 / 1e9, 1e-7);
  EXPECT_NEAR(collective_seconds(machine, network, "all_gather", 2, 2, 2, 1e6), 1e-3, 1e-7);
  for (const char* operation : {"all_gather", "reduce_scatter"}) {
    const double inside = collective_seconds(machine, network, operation, 2, 2, 2, 1e6);
    EXPECT_NEAR(collective_seconds(machine, network, operation, 4, 2, 2, 1e6, false, 1, true),
                inside + 1e-5 + 2 * 0.5e6 / 1e9, 1e-7)
        << "messages: " << operation;
  }
  EXPECT_NEAR(collective_seconds(machine, network, "all_gather", 8, 1, 2, 8e6), 3e-5 + 7e6 / 1e9, 1e-7);
}

TEST(Projected, StepsHaveTheNodesAndTheNetworkOfTheRequest) {
  Machine machine = machine_of(1e-4);
  machine.network = LinkRate{1e18, 5e-3};
  const auto exposed = [&](int ranks_per_node, const std::optional<LinkRate>& network) {
    PlanRequest request = request_of(4, 3, false);  // without overlap, so that no communication is hidden
    request.ranks_per_node = ranks_per_node;
    const StepBreakdown step = project({request, machine, network, 0}).step;
    return step.exposed_gather + step.exposed_reduce;
  };
  // Fifteen collectives. On one node four ranks take three times as long as the two that were measured.
  EXPECT_NEAR(exposed(0, std::nullopt), 15 * 3e-4, 1e-4);
  EXPECT_NEAR(exposed(2, std::nullopt), 15 * (1e-4 + 5e-3), 1e-4) << "the machine's own network";
  EXPECT_NEAR(exposed(2, LinkRate{1e18, 1e-3}), 15 * (1e-4 + 1e-3), 1e-4) << "the request's comes first";
  EXPECT_NEAR(exposed(1, LinkRate{1e18, 1e-3}), 15 * 2e-3, 1e-4) << "four nodes: two latencies";
  // Each node sends half of the gathered data, and half of the reduced data in fp32.
  PlanRequest request = request_of(4, 3, false);
  request.ranks_per_node = 2;
  const PlanResult plan = plan_run(request);
  const double gathered = static_cast<double>(plan.data.at("all_gather").elements) * 4 / 3;
  const double reduced = static_cast<double>(plan.data.at("reduce_scatter").elements) * 4 / 3;
  const double sent = (gathered * 2 + reduced * 4) / 2;
  EXPECT_NEAR(exposed(2, LinkRate{1e8, 0}), 15 * 1e-4 + sent / 1e8, 1e-4 + 0.01 * sent / 1e8);
}

TEST(Projected, NodesSendWhatThePlanCountsButGathersOnce) {
  // 8 of 15 parts of a rank's data are for the other node. In a reduction each rank of a node sends them; in
  // a gather one ring transfers them for all eight.
  PlanRequest request = request_of(16, 3, true);
  request.ranks_per_node = 8;
  request.device = DeviceKind::cuda;
  for (const std::int64_t micro_batches : {1, 6}) {
    request.config.accumulation_steps = micro_batches;
    request.config.train_batch_size = 2 * 16 * micro_batches;
    const PlanResult plan = plan_run(request);
    const auto crossing = [&](const char* operation) {
      return static_cast<double>(plan.data.at(operation).bytes) * 8 / 15;
    };
    const double sent = project({request, load_machine("dgx-h100"), std::nullopt, 0}).node_bytes;
    EXPECT_NEAR(sent, 8 * crossing("reduce_scatter") + crossing("all_gather"), 1e-6 * sent) << micro_batches;
    EXPECT_NEAR(static_cast<double>(plan.crossing_bytes), crossing("reduce_scatter") + crossing("all_gather"),
                16);
    EXPECT_FALSE(plan.crossing_exact);
  }
}

TEST(Projected, NodesSendTheInt8GradientsThatARunSends) {
  // Four ranks on two nodes. In stage 1 only gradients are sent as int8 blocks. Weights are gathered
  // unquantized, and cross the network once for all ranks of a node.
  PlanRequest request = request_of(4, 1, false);
  request.ranks_per_node = 2;
  request.config.quantized_gradients = true;
  request.config.accumulation_steps = 2;
  request.config.train_batch_size = 16;
  request.config.reduction = ReductionPolicy::micro_batch;
  std::int64_t sent = 0, gathered = 0, exchanges = 0;  // by rank 0 in its second step
  run_thread_ranks(request.ranks, [&](int rank, const CommunicatorFactory& factory) {
    Config config = request.config;
    validate_config(config, request.ranks);
    RuntimeOptions options = RuntimeOptions::from(config);
    options.threads = 1;
    options.log_level = LogLevel::off;
    Runtime runtime(options, factory);
    Engine engine(runtime, request.model.spec(request.sequence), config);
    const std::vector<std::int32_t> tokens(2 * 16, 1);
    const ConstTensorView view{tokens.data(), DataType::int32, Shape{2, 16}};
    const std::vector<std::int64_t> samples{0, 1};
    for (int step = 0; step < 2; ++step) {
      for (int m = 0; m < 2; ++m) request.model.language->forward_backward(engine, {view, view, samples});
      (void)engine.step();
    }
    if (rank != 0) return;
    const json traffic = json::parse(engine.traffic_report());
    sent = traffic["all_to_all"]["bytes"].get<std::int64_t>();
    exchanges = traffic["all_to_all"]["calls"].get<std::int64_t>();
    gathered = traffic["all_gather"]["bytes"].get<std::int64_t>();
  });
  EXPECT_GT(exchanges, 0);
  // Both ranks of a node send two of their three parts to the other node; a gather crosses once for both.
  const double crossing = 2.0 * static_cast<double>(sent) * 2 / 3 + static_cast<double>(gathered) * 2 / 3;
  const Machine machine = machine_of(1e-3);
  const Projection projection = project({request, machine, LinkRate{1e9, 0}, 0});
  EXPECT_NEAR(projection.node_bytes, crossing, 1e-9 * crossing);
  // Each exchange also waits for its share of the network.
  const Projection slow = project({request, machine, LinkRate{1e6, 0}, 0});
  EXPECT_NEAR(slow.step.total() - projection.step.total(), crossing * (1e-6 - 1e-9), 0.01 * crossing * 1e-6);
  EXPECT_GT(slow.step.exposed_reduce - projection.step.exposed_reduce,
            0.99 * 2.0 * static_cast<double>(sent) * 2 / 3 * (1e-6 - 1e-9));
}

TEST(Projected, CopiesInANodeEachGatherInsideOfIt) {
  // At stage 3 only the sums over the two replicas cross the network.
  Machine machine = machine_of(1e-4);
  const auto exposed = [&](const char* mesh) {
    PlanRequest request = request_of(4, 3, false);  // without overlap, so that no communication is hidden
    request.ranks_per_node = 2;
    request.config.mesh = mesh;
    const StepBreakdown step = project({request, machine, LinkRate{1e18, 5e-3}, 0}).step;
    return step.exposed_gather + step.exposed_reduce;
  };
  // Five units are reduced inside a node and over the replicas, which also gather the sums. A node has two
  // groups of replicas, so two groups cross at the same time.
  EXPECT_NEAR(exposed("replicate=2, shard=2"), 15 * 1e-4 + 10 * 5e-3, 2e-3);
  EXPECT_NEAR(exposed("shard=2, replicate=2"), 15 * 5e-3 + 10 * 1e-4, 2e-3) << "the other way round";
  EXPECT_NEAR(exposed(""), 15 * (1e-4 + 5e-3), 1e-3);
}

TEST(Projected, EfficiencyIsAgainstARankWithTheSameShareOfItsNode) {
  // At stage 0 a single rank does much the same work. With collectives of no duration it is no faster; with
  // both cores it would be twice as fast.
  EXPECT_NEAR(projected(request_of(2, 0, true), machine_of(1e-9)).efficiency, 1, 0.1);
}

TEST(Projected, LayersWaitForTheRowsOfTheAxisTensor) {
  constexpr double message = 0.25;
  PlanRequest request = request_of(2, 0, true);
  request.config = parse_config(
      R"({"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 0, "mics_shard_size": 1},
          "train_micro_batch_size_per_gpu": 2, "train_batch_size": 2})",
      2);
  const Projection cut = projected(request, machine_of(message));
  request.ranks = 1;
  request.config = parse_config(R"({"train_batch_size": 2})", 1);
  const Projection one =
      project({request, machine_of(message), std::nullopt, 2});  // on two cores, as the two ranks together
  EXPECT_LT(cut.step.compute, 0.9 * one.step.compute) << "rows that all ranks need are not divided";
  EXPECT_GT(cut.step.compute, 0.4 * one.step.compute);
  // 10 messages for each of four blocks, 2 for the embedding, and 3 for the head with its statistics. Whole
  // tensors are reduced and gathered during and after them.
  const double waited = cut.step.exposed_gather + cut.step.exposed_reduce;
  EXPECT_GE(waited, 45 * message);
  EXPECT_LT(waited, 60 * message);
  EXPECT_NEAR(cut.efficiency, one.step.total() / cut.step.total() / 2, 0.01 * cut.efficiency);
  EXPECT_DOUBLE_EQ(cut.tokens_per_second, 2 * 16 / cut.step.total());
}

TEST(Projected, RefusesWhatItHasNoFiguresFor) {
  const auto text = [](const PlanRequest& request, const Machine& machine) {
    return message_of<ConfigurationError>([&] { (void)projected(request, machine); });
  };
  PlanRequest nodes = request_of(4, 3, true);
  nodes.ranks_per_node = 2;
  EXPECT_THAT(text(nodes, machine_of(1)), HasSubstr("4 ranks, 2 on a node, need --network RATE,LATENCY"));
  PlanRequest nvme = request_of(1, 0, true);
  nvme.config.offload.optimizer = OffloadTier::nvme;
  nvme.config.offload.nvme_path = "/tmp";
  EXPECT_THAT(text(nvme, machine_of(1)), HasSubstr("has no disk; calibrate with --dir DIR"));
  PlanRequest half = request_of(1, 0, true);
  half.config.precision.compute = half.config.precision.communication = DataType::float16;
  half.config.loss_scaling = true;
  EXPECT_THAT(text(half, machine_of(1)), HasSubstr("has no rates of fp16 products"));
  Machine silent = machine_of(1);
  silent.collectives.clear();
  EXPECT_THAT(text(request_of(2, 3, true), silent), HasSubstr("has no times of all_gather"));
  PlanRequest gpu = request_of(1, 0, true);
  gpu.device = DeviceKind::cuda;
  EXPECT_THAT(text(gpu, machine_of(1)), HasSubstr("give --device cpu"));
}

TEST(Projected, OffloadedStateIsExposedOnSlowRoads) {
  PlanRequest request = request_of(1, 0, true);
  request.config.offload.optimizer = OffloadTier::cpu;
  Machine machine = machine_of(1);
  const Projection fast = projected(request, machine);
  machine.host_link.bytes_per_second = 1e6;
  const Projection slow = projected(request, machine);
  EXPECT_GT(slow.step.exposed_offload, fast.step.exposed_offload + 0.01);
  request.config.offload.optimizer = OffloadTier::nvme;
  request.config.offload.nvme_path = "/tmp";
  machine.host_link.bytes_per_second = 1e9;
  machine.disk = LinkRate{1e6, 0};
  const PlanResult plan = plan_run(request);
  const double disk =
      static_cast<double>(plan.offload_bytes.nvme_read + plan.offload_bytes.nvme_written) / 1e6;
  const Projection nvme = projected(request, machine);
  EXPECT_GT(nvme.step.total(), 0.99 * disk);
  EXPECT_LT(nvme.step.total(), 1.2 * disk);

  // A read and a write take the memory bandwidth of two nodes each, beside kernels on all cores.
  const double compute = nvme.step.compute;
  machine.disk_cores = 2.0 * machine.cores;
  EXPECT_NEAR(projected(request, machine).step.compute, 5 * compute, 0.2 * compute);
}

TEST(Projected, TheBackwardPassHidesUpdatesAsReduced) {
  PlanRequest request = request_of(1, 0, true);
  request.config.gradient_clipping = 0;
  request.config.offload.optimizer = OffloadTier::nvme;
  request.config.offload.tile_elements = 4096;  // many more tiles than buffers
  request.config.offload.nvme_path = "/tmp";
  Machine machine = machine_of(1);
  machine.host_link.bytes_per_second = 1e12;
  machine.disk = LinkRate{1e15, 0};
  const double compute = projected(request, machine).step.compute;
  const PlanResult plan = plan_run(request);
  const auto bytes = static_cast<double>(plan.offload_bytes.nvme_read + plan.offload_bytes.nvme_written);
  // The disk is busy for as long as a step computes. At the boundary only the next forward pass hides it.
  machine.disk = LinkRate{bytes / compute, 0};
  const Projection at_the_boundary = projected(request, machine);
  request.config.update = UpdateTime::as_reduced;
  const Projection as_reduced = projected(request, machine);
  EXPECT_GT(at_the_boundary.step.total(), 1.3 * compute);
  EXPECT_LT(as_reduced.step.total(), 0.95 * at_the_boundary.step.total());
  EXPECT_GE(as_reduced.step.total(), compute);
  EXPECT_EQ(plan_run(request).offload_bytes.nvme_read, plan.offload_bytes.nvme_read);
}

// --- The program -------------------------------------------------------------------------------------------

std::vector<std::string> plan_arguments(const std::vector<std::string>& more) {
  std::vector<std::string> arguments{"plan",    "--model", "gpt-nano", "--ranks",  "16",   "--ranks-per-node",
                                     "8",       "--stage", "3",        "--device", "cuda", "--machine",
                                     "dgx-h100"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

TEST(PlanMachine, SaysTheStepTimeAndWhereItsFiguresAreFrom) {
  const ProgramResult text = tools::test::run(plan_arguments({}));
  EXPECT_EQ(text.status, 0) << text.errors;
  EXPECT_THAT(text.out, AllOf(HasSubstr("step time on DGX H100"),
                              HasSubstr("datasheet figures, not measured"), HasSubstr("exposed gather"),
                              HasSubstr(" % of a rank that is alone, which updates all of the state in ")));
  const ProgramResult document = tools::test::run(plan_arguments({"--json", "--network", "50GB/s,5us"}));
  ASSERT_EQ(document.status, 0) << document.errors;
  const json projection = json::parse(document.out)["projection"];
  EXPECT_EQ(projection["source"], "datasheet");
  const double sum =
      projection["compute_seconds"].get<double>() + projection["exposed_gather_seconds"].get<double>() +
      projection["exposed_reduce_seconds"].get<double>() +
      projection["exposed_offload_seconds"].get<double>() + projection["optimizer_seconds"].get<double>() +
      projection["other_seconds"].get<double>();
  EXPECT_NEAR(sum, projection["step_seconds"].get<double>(), 1e-12);
  EXPECT_GT(projection["tokens_per_second"], 0);
}

TEST(PlanMachine, NetworkAndRanksOfANodeCount) {
  const auto seconds = [](const std::string& network, const std::string& ranks_per_node) {
    const ProgramResult result = tools::test::run(
        plan_arguments({"--json", "--network", network, "--ranks-per-node", ranks_per_node}));
    EXPECT_EQ(result.status, 0) << result.errors;
    return json::parse(result.out)["projection"]["step_seconds"].get<double>();
  };
  const double fast = seconds("400GB/s,5us", "8");
  EXPECT_GT(seconds("40GB/s,5us", "8"), fast);
  EXPECT_GT(seconds("400GB/s,500us", "8"), fast);
  EXPECT_LT(seconds("400GB/s,5us", "16"), fast) << "all on one node";
  EXPECT_GT(seconds("400GB/s,5us", "4"), fast) << "four nodes";
}

TEST(PlanMachine, ASearchAndItsPlanHaveOneStepTime) {
  const auto fit = [](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = plan_arguments({"--fit", "1GiB", "--set", "train_batch_size=256"});
    std::erase(arguments, "--stage");
    std::erase(arguments, "3");
    arguments.insert(arguments.end(), more.begin(), more.end());
    return tools::test::run(arguments);
  };
  const ProgramResult text = fit({});
  ASSERT_EQ(text.status, 0) << text.errors;
  EXPECT_THAT(text.out, AllOf(HasSubstr("a rank of DGX H100 (8 x H100 SXM 80 GB) sends "),
                              HasSubstr("seconds: the simulated step of what fits, as below; a formula with "
                                        "these rates gives the order"),
                              testing::Not(HasSubstr("100 TFLOP/s"))));
  const json document = json::parse(fit({"--json"}).out);
  for (const json& trial : document["ladder"]) {
    if (trial["chosen"] == true) {
      EXPECT_DOUBLE_EQ(trial["seconds"].get<double>(), document["projection"]["step_seconds"].get<double>());
    }
    EXPECT_EQ(trial["seconds"].is_null(), trial["fits"] == false);
  }
  // The flag's network applies to the search as well.
  const json slow = json::parse(fit({"--json", "--network", "1MB/s,5us"}).out)["cost_model"];
  EXPECT_LT(slow["network_bytes_per_second"].get<double>(), 1e6);
  EXPECT_GT(document["cost_model"]["network_bytes_per_second"].get<double>(), 1e9);
  EXPECT_DOUBLE_EQ(document["cost_model"]["host_link_bytes_per_second"].get<double>(),
                   load_machine("dgx-h100").host_link.bytes_per_second);
}

TEST(PlanMachine, OffloadTakesTheMachinesRates) {
  const ProgramResult text = tools::test::run(plan_arguments({"--offload-optimizer", "cpu"}));
  ASSERT_EQ(text.status, 0) << text.errors;
  EXPECT_THAT(text.out, AllOf(HasSubstr("GB/s, DGX H100"), testing::Not(HasSubstr("--host-link"))));
}

TEST(PlanMachine, WritesTheSimulatedStepAsATimeline) {
  const TemporaryFolder folder;
  const std::string path = folder.path("step.json");
  const ProgramResult result = tools::test::run(plan_arguments({"--trace", path}));
  ASSERT_EQ(result.status, 0) << result.errors;
  const json trace = json::parse(tools::test::read_file(path));
  EXPECT_THAT(trace.dump(), AllOf(HasSubstr("all_gather"), HasSubstr("matmul"), HasSubstr("communication")));
}

TEST(PlanMachine, ErrorsNameFlagAndFile) {
  EXPECT_THAT(tools::test::run(plan_arguments({"--network", "fast,now"})).errors,
              HasSubstr("--network 'fast,now'"));
  EXPECT_THAT(tools::test::run(plan_arguments({"--network", "50GB"})).errors,
              HasSubstr("--network '50GB' is not RATE,LATENCY"));
  EXPECT_THAT(tools::test::run(plan_arguments({"--flops", "100T"})).errors,
              HasSubstr("--flops 100T is not for --machine dgx-h100, whose own rates are taken"));
  EXPECT_THAT(tools::test::run({"plan", "--model", "gpt-nano", "--network", "12.5GB"}).errors,
              HasSubstr("--network is for --fit SIZE or --machine FILE"));
  EXPECT_THAT(
      tools::test::run({"plan", "--model", "gpt-nano", "--fit", "1GiB", "--network", "400GB/s,5us"}).errors,
      HasSubstr("is RATE,LATENCY of a node, which goes with --machine"));
  EXPECT_THAT(tools::test::run({"plan", "--model", "gpt-nano", "--machine", "nowhere.json"}).errors,
              HasSubstr("there is no file 'nowhere.json'"));
  EXPECT_THAT(tools::test::run({"plan", "--model", "gpt-nano", "--trace", "t.json"}).errors,
              HasSubstr("--trace is of the step that --machine FILE has simulated"));
  const TemporaryFolder folder;
  const std::string bad = folder.write("bad.json", "{\"schema\": \"other\"}");
  EXPECT_THAT(tools::test::run({"plan", "--model", "gpt-nano", "--machine", bad}).errors,
              AllOf(HasSubstr("bad.json"), HasSubstr("schema is 'other', not 'tranche.machine'")));
}

TEST(Calibrate, AFolderThatIsNotThereIsRefusedBeforeAnythingIsMeasured) {
  const TemporaryFolder folder;
  const ProgramResult refused = tools::test::run(
      {"calibrate", "--out", folder.path("machine.json"), "--dir", folder.path("none"), "--seconds", "3000"});
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(refused.errors, HasSubstr("--dir '" + folder.path("none") +
                                        "': nothing can be written there: No such file or directory"));
  EXPECT_FALSE(std::filesystem::exists(folder.path("machine.json")));
}

TEST(Calibrate, MeasuresThisMachineForAPlan) {
  const TemporaryFolder folder;
  const std::string path = folder.path("machine.json");
  const ProgramResult calibrated =
      tools::test::run({"calibrate", "--out", path, "--seconds", "0.2", "--threads", "1"});
  ASSERT_EQ(calibrated.status, 0) << calibrated.errors;
  Machine machine = parse_machine(tools::test::read_file(path), path);
  EXPECT_TRUE(machine.measured());
  ASSERT_EQ(machine.shares.size(), 1u);
  EXPECT_GT(machine.shares[0].products.size(), 5u);
  EXPECT_GT(machine.shares[0].kernels.size(), 10u);
  // The measured kernels must suffice for all plans below, although they were measured in steps of one rank
  // with its state on the device.
  for (const char* operation : {"all_gather", "reduce_scatter", "all_reduce", "broadcast"}) {
    machine.collectives.push_back({operation, 2, 4, 1, {{{4096, 1e-5}, {1 << 20, 1e-3}}}});
  }
  const std::string with_collectives = folder.write("with_collectives.json", machine_json(machine));
  const std::vector<std::vector<std::string>> asked{
      {},
      {"--offload-optimizer", "cpu"},
      {"--offload-optimizer", "cpu", "--set", "optimizer.type=SGD"},
      {"--set", "optimizer.type=SGD"},
      {"--dtype", "fp32"},
      {"--dtype", "fp32", "--offload-optimizer", "cpu", "--offload-ratio", "0.5"},
      {"--ranks", "2", "--stage", "2"},
      {"--ranks", "2", "--stage", "3", "--offload-optimizer", "cpu", "--offload-param", "cpu"},
      {"--accumulate", "3", "--set", "data_types.grad_accum_dtype=bf16"},
      {"--accumulate", "2", "--set", "tranche.reduction=micro_batch"}};
  for (const std::vector<std::string>& further : asked) {
    std::vector<std::string> arguments{"plan", "--model", "gpt-nano", "--machine", with_collectives};
    arguments.insert(arguments.end(), further.begin(), further.end());
    const ProgramResult plan = tools::test::run(arguments);
    EXPECT_EQ(plan.status, 0) << plan.errors;
    EXPECT_THAT(plan.out, HasSubstr("calibrated: "));
    EXPECT_THAT(plan.out, testing::Not(HasSubstr("was not measured"))) << testing::PrintToString(further);
  }
}

TEST(Calibrate, MeasuresCollectivesOfAGroup) {
  std::vector<CollectiveTable> tables;
  run_thread_ranks(2, [&](int rank, const CommunicatorFactory& factory) {
    const auto communicator = factory({});
    std::vector<CollectiveTable> mine;
    const auto device = make_device({DeviceKind::cpu, 0, 1});
    measure_collectives(*communicator, device->memory(Tier::device), 0.05, mine);
    if (rank == 0) tables = std::move(mine);
  });
  ASSERT_EQ(tables.size(), 6u);
  for (const CollectiveTable& table : tables) {
    EXPECT_EQ(table.ranks, 2);
    EXPECT_EQ(table.time.points.size(), 5u) << table.operation;
  }
}

}  // namespace
}  // namespace tranche::planner
