// Projections of pipeline steps: one recorded rank of each stage, joined by messages.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/schedule/generators.h"
#include "pipeline/schedule/lower.h"
#include "pipeline/schedule/simulate.h"
#include "pipeline/schedule/text.h"
#include "planner/simulation.h"
#include "planner/step_graph.h"
#include "planner/work_cost.h"
#include "tests/core/rounds.h"
#include "tests/tools/program_fixture.h"
#include "tranche/core/error.h"
#include "tranche/models/gpt.h"
#include "tranche/planner/projection.h"
#include "tranche/planner/schedule_choice.h"

namespace tranche::planner {
namespace {

using detail::RecordedWork;
using detail::WorkKind;
using detail::WorkRecorder;
using pipeline::Action;
using pipeline::ActionKind;
using pipeline::PipelineSchedule;
using testing::HasSubstr;
using tools::test::message_of;
using tools::test::TemporaryFolder;

/// Bytes are transferred at 1 GB/s, GEMMs compute at 1 GFLOP/s, and a gather of two ranks takes `seconds`.
Machine machine_with_link(double seconds) {
  Machine machine;
  machine.name = "round";
  machine.source = "measured";
  machine.cores = 16;
  ComputeShare share;
  share.ranks = 2;
  share.memory_bytes_per_second = 1e9;
  for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
    share.products.push_back({dtype, "nn", {64}, {1e9}});
  }
  machine.shares.push_back(share);
  for (const char* operation : {"all_gather", "reduce_scatter"}) {
    machine.collectives.push_back({operation, 2, 2, 0, {{{1, seconds}, {1e12, seconds * (1 + 1e-9)}}}});
  }
  machine.host_link = {1e9, 0};
  machine.host_bytes_per_second = 1e9;
  return machine;
}

PlanRequest pipeline_request(int stages, std::int64_t micro_batches, const std::string& schedule = "1f1b") {
  PlanRequest request;
  request.model.name = "gpt-nano";
  models::GptConfig gpt = models::GptConfig::preset("gpt-nano");
  gpt.layers = 6;
  request.model.language = std::make_shared<models::Gpt>(gpt);
  request.sequence = 16;
  request.ranks = stages;
  request.config.mesh = fmt::format("pipeline={}", stages);
  request.config.pipeline_schedule = schedule;
  request.config.stage = 0;
  request.config.threads = 1;
  request.config.micro_batch_size = 2;
  request.config.accumulation_steps = micro_batches;
  request.config.train_batch_size = 2 * micro_batches;
  return request;
}

StepBreakdown step_of(const PlanRequest& plan, const Machine& machine) {
  return project({plan, machine, std::nullopt, 0}).step;
}
double seconds_of(const PlanRequest& plan, const Machine& machine) {
  return step_of(plan, machine).total();
}

/// The work that a rank's executor requests under a schedule with messages, whose passes take whole seconds.
std::shared_ptr<WorkRecorder> recorded(const PipelineSchedule& schedule, int rank,
                                       const pipeline::StageTimes& times) {
  const std::shared_ptr<WorkRecorder> recorder = WorkRecorder::make(true);
  recorder->mark("step");
  std::map<std::pair<int, bool>, int> lanes;  // by rank and direction
  const auto message = [&](WorkKind kind, int peer) {
    auto [lane, is_new] = lanes.try_emplace({peer, kind == WorkKind::send});
    if (is_new) lane->second = recorder->add_lane("channel");
    RecordedWork work;
    work.kind = kind;
    work.full_bytes = 2;
    work.dtype = DataType::bfloat16;
    work.ranks = 2;
    work.ranks_on_node = schedule.stages();
    work.members = std::make_shared<const std::vector<int>>(1, peer);
    return recorder->add(lane->second, std::move(work));
  };
  const auto peer_of = [&](const Action& action) {
    const Action other = partner(action);
    return schedule.rank_of_chunk[static_cast<std::size_t>(other.chunk)];
  };
  std::vector<std::size_t> posted(schedule.ranks.size());
  std::map<Action, Event> received;
  const auto of_rank = [&](const std::vector<double>& by_rank) {
    return by_rank[static_cast<std::size_t>(rank)] * schedule.stages() / schedule.chunks();
  };
  for (const Action& action : schedule.ranks[static_cast<std::size_t>(rank)]) {
    if (sends(action.kind)) {
      (void)message(WorkKind::send, peer_of(action));
    } else if (receives(action.kind)) {
      // Receives are posted in the order of the other rank's sends.
      const int peer = peer_of(action);
      const std::vector<Action>& theirs = schedule.ranks[static_cast<std::size_t>(peer)];
      for (std::size_t& next = posted[static_cast<std::size_t>(peer)]; !received.contains(action); ++next) {
        const Action& sent = theirs.at(next);
        if (sends(sent.kind) && peer_of(sent) == rank) {
          received.emplace(partner(sent), message(WorkKind::receive, peer));
        }
      }
      recorder->wait(WorkRecorder::host_lane, received.at(action));
    } else {
      RecordedWork work;
      work.kind = WorkKind::kernel;
      work.name = "pass";
      const double input = of_rank(times.input), weight = of_rank(times.weight);
      work.bytes_written = 1e9 * (action.kind == ActionKind::forward          ? of_rank(times.forward)
                                  : action.kind == ActionKind::backward       ? input + weight
                                  : action.kind == ActionKind::input_gradient ? input
                                                                              : weight);
      recorder->add(WorkRecorder::host_lane, std::move(work));
    }
  }
  return recorder;
}

/// The seconds of a schedule on a machine whose messages take `message` seconds.
double simulated(const PipelineSchedule& schedule, const pipeline::StageTimes& times, double message) {
  std::vector<RecordedRank> ranks;
  for (int rank = 0; rank < schedule.stages(); ++rank)
    ranks.push_back({rank, recorded(schedule, rank, times)});
  ProjectionRequest request;
  request.machine = machine_with_link(message);
  request.plan.ranks = schedule.stages();
  Config config;
  config.threads = 1;
  WorkCost costs(request, config);
  const StepGraph graph = graph_of(ranks, costs);
  double length = 0;
  for (const SimulatedSpan& span : simulate(graph.tasks, graph.ordered, graph.capacities)) {
    length = std::max(length, span.end);
  }
  return length;
}

TEST(StepGraph, LengthsOfJoinedRanksAreThoseOfTheSchedules) {
  for (const pipeline::NamedSchedule& named : pipeline::named_schedules()) {
    for (const auto& [stages, micro_batches] : {std::pair(1, 3), {2, 4}, {3, 6}, {4, 8}}) {
      const PipelineSchedule schedule = with_messages(pipeline::generate(named.name, stages, micro_batches));
      pipeline::StageTimes times = pipeline::StageTimes::equal(stages);
      EXPECT_NEAR(simulated(schedule, times, 1e-9), pipeline::simulate(schedule, times).length, 1e-5)
          << named.name << " " << stages;
      times.forward.back() = 3;
      times.weight.front() = 2;
      EXPECT_NEAR(simulated(schedule, times, 1e-9), pipeline::simulate(schedule, times).length, 1e-5)
          << named.name << " " << stages << ", uneven";
    }
  }
  // A table of 4 stages and 8 micro-batches.
  const auto length = [](const char* name) {
    return simulated(with_messages(pipeline::generate(name, 4, 8)), pipeline::StageTimes::equal(4), 1e-9);
  };
  EXPECT_NEAR(length("1f1b"), 33, 1e-5);
  EXPECT_NEAR(length("interleaved"), 28.5, 1e-5);
  EXPECT_NEAR(length("zb-v"), 25.5, 1e-5);
}

TEST(StepGraph, MessagesTakeTheTimeOfTheLink) {
  const pipeline::StageTimes times = pipeline::StageTimes::equal(2);
  const auto length = [&](const char* name, std::int64_t micro_batches, double message) {
    return simulated(with_messages(pipeline::generate(name, 2, micro_batches)), times, message);
  };
  // One micro-batch passes through both stages, with one message in each direction.
  EXPECT_NEAR(length("1f1b", 1, 5), 6 + 2 * 5, 1e-6);
  // A receive is posted when the stage needs the message. So with AFAB the second stage waits for each
  // residual, and the first stage for each gradient.
  for (const std::int64_t m : {2, 6}) {
    EXPECT_NEAR(length("afab", m, 0.5), 3.0 * static_cast<double>(m + 1) + 2 * 0.5 * static_cast<double>(m),
                1e-5);
  }
  // If messages take longest, 1F1B has one in each direction at the same time, and AFAB does not.
  const double slow = 1e4;
  EXPECT_NEAR(length("afab", 6, slow), 2 * 6 * slow, 50);
  EXPECT_NEAR(length("1f1b", 6, slow), (6 + 1) * slow, 50);
}

TEST(StepGraph, RanksThatDoNotMatchAreRefused) {
  const PipelineSchedule schedule = with_messages(pipeline::generate("1f1b", 2, 2));
  PipelineSchedule shorter = schedule;
  std::erase_if(shorter.ranks[1],
                [](const Action& action) { return action.kind == ActionKind::send_gradient; });
  const pipeline::StageTimes times = pipeline::StageTimes::equal(2);
  ProjectionRequest request;
  request.machine = machine_with_link(1);
  request.plan.ranks = 2;
  Config config;
  WorkCost costs(request, config);
  const std::vector<RecordedRank> ranks{{0, recorded(schedule, 0, times)}, {1, recorded(shorter, 1, times)}};
  EXPECT_EQ(message_of<LogicError>([&] { graph_of(ranks, costs); }),
            "recorded stages of a pipeline do not match: 0 and 2 of messages");
}

TEST(ProjectedPipeline, OneMicroBatchPassesAllStages) {
  const Machine fast = machine_with_link(1e-9);
  const auto compute = [&](int stages, int rank) {
    PlanRequest request = pipeline_request(stages, 1);
    request.rank = rank;
    return step_of(request, fast).compute;
  };
  const double whole = compute(1, 0);
  double of_stages = 0;
  for (int rank = 0; rank < 3; ++rank) of_stages += compute(3, rank);
  EXPECT_NEAR(of_stages, whole, 0.01 * whole) << "and gradients of the tied table are rounded twice";
  // Everything except the passes of its own stage is waiting.
  const StepBreakdown step = step_of(pipeline_request(3, 1), fast);
  EXPECT_NEAR(step.exposed_message + step.compute, whole, 0.02 * whole);
  // Two messages in each direction.
  const double message = 0.25;
  const auto more = [&](int stages) {
    return step_of(pipeline_request(stages, 1), machine_with_link(message)).exposed_message -
           step_of(pipeline_request(stages, 1), fast).exposed_message;
  };
  // With three ranks on a node a gather of two takes as long as measured.
  EXPECT_NEAR(more(3), 4 * message, 0.05 * message);
  EXPECT_NEAR(more(2), 2 * message, 0.05 * message);
}

TEST(ProjectedPipeline, MoreMicroBatchesCostWhatTheSlowestStageOrTheLinkTakes) {
  const Machine fast = machine_with_link(1e-9);
  const auto of = [](std::int64_t micro_batches, const char* schedule, const Machine& machine) {
    return seconds_of(pipeline_request(2, micro_batches, schedule), machine);
  };
  PlanRequest last = pipeline_request(2, 4);
  last.rank = 1;
  const double slowest =
      std::max(step_of(pipeline_request(2, 4), fast).compute, step_of(last, fast).compute) / 4;
  for (const char* schedule : {"1f1b", "afab", "zb-h1"}) {
    EXPECT_NEAR(of(6, schedule, fast) - of(4, schedule, fast), 2 * slowest, 0.05 * slowest) << schedule;
  }
  // If messages take longest, each micro-batch of 1F1B waits for one, and of AFAB for two.
  const Machine slow = machine_with_link(10);
  EXPECT_NEAR(of(6, "1f1b", slow) - of(4, "1f1b", slow), 2 * 10, 0.1);
  EXPECT_NEAR(of(6, "afab", slow) - of(4, "afab", slow), 4 * 10, 0.1);
}

TEST(ProjectedPipeline, MoreMicroBatchesThanAreSimulatedAreThoseOfAFile) {
  const Machine machine = machine_with_link(1e-3);
  const TemporaryFolder folder;
  for (const char* schedule : {"1f1b", "interleaved", "zb-v"}) {
    const std::string path =
        folder.write(std::string(schedule) + ".csv", write_schedule(pipeline::generate(schedule, 2, 46)));
    const Projection named = project({pipeline_request(2, 46, schedule), machine, std::nullopt, 0});
    EXPECT_THAT(named.notes, testing::Contains("46 micro-batches from the simulation of 4, 8 and 16"));
    EXPECT_NEAR(named.step.total() / seconds_of(pipeline_request(2, 46, path), machine), 1, 1e-3) << schedule;
  }
}

TEST(ProjectedPipeline, AStepIsExtrapolatedOnlyOnceItsReductionsAreHidden) {
  // With few micro-batches the step waits for reductions between nodes; with more, they are hidden. A
  // difference from before that state has been extrapolated to steps below zero.
  const TemporaryFolder folder;
  struct Case {
    int stages;
    std::string schedule;
    LinkRate network;
    bool extrapolated;  // whether fewer micro-batches are simulated than there are
  };
  const std::vector<Case> cases{{2, "zb-h1", {1e9, 5e-6}, false},
                                {2, "1f1b", {1e9, 5e-6}, true},
                                {2, "afab", {1e10, 5e-6}, false},
                                {4, "1f1b", {1.25e9, 20e-6}, false}};
  PlanRequest request = pipeline_request(8, 40);
  request.model.language = std::make_shared<models::Gpt>(models::GptConfig::preset("gpt2"));
  request.sequence = 1024;
  request.ranks_per_node = 1;
  request.device = DeviceKind::cuda;
  request.config.stage = 1;
  request.config.micro_batch_size = 1;
  for (const int round : tranche::test::rounds(4)) {
    const auto& [stages, schedule, network, extrapolated] = cases[static_cast<std::size_t>(round)];
    const std::int64_t micro_batches = 20 * stages;
    request.config.mesh = fmt::format("replicate=2, pipeline={}, shard=*", stages);
    request.config.accumulation_steps = micro_batches;
    request.config.train_batch_size = micro_batches * 8 / stages;
    const auto projected = [&](const std::string& order) {
      request.config.pipeline_schedule = order;
      return project({request, load_machine("dgx-h100"), network, 0});
    };
    const Projection named = projected(schedule);
    const std::string path =
        folder.write("schedule.csv", write_schedule(pipeline::generate(schedule, stages, micro_batches)));
    EXPECT_NEAR(named.step.total() / projected(path).step.total(), 1, 0.02) << stages << " " << schedule;
    EXPECT_EQ(
        fmt::format("{}", fmt::join(named.notes, "; ")).find(" micro-batches from the simulation of ") !=
            std::string::npos,
        extrapolated)
        << stages << " " << schedule;
  }
}

TEST(ProjectedPipeline, SchedulesDifferAsOnPaper) {
  // Four stages with similar work: the order of the lengths is that of the table.
  const Machine machine = machine_with_link(1e-6);
  PlanRequest request = pipeline_request(4, 8);
  request.config.pipeline_cuts = PipelineCuts::balanced;
  const auto projected = [&](const char* schedule) {
    request.config.pipeline_schedule = schedule;
    return seconds_of(request, machine);
  };
  const double plain = projected("1f1b");
  EXPECT_LT(projected("zb-h1"), plain);
  EXPECT_NEAR(projected("afab"), plain, 0.05 * plain);
}

TEST(ProjectedPipeline, StagesOnSeveralNodesSendThroughTheNetwork) {
  Machine machine = machine_with_link(1e-9);
  PlanRequest request = pipeline_request(2, 4);
  request.ranks_per_node = 1;
  EXPECT_THAT(message_of<ConfigurationError>([&] {
                project({request, machine, std::nullopt, 0});
              }),
              HasSubstr("need --network RATE,LATENCY"));
  const auto exposed = [&](const LinkRate& network) {
    return project({request, machine, network, 0}).step.exposed_message;
  };
  EXPECT_GT(exposed({1e18, 1}) - exposed({1e18, 0}), 4);
  const PlanResult plan = plan_run(request);
  const Projection projection = project({request, machine, LinkRate{1e9, 0}, 0});
  // The node sends messages between stages, and gradients of the tied table, which is on both ends.
  EXPECT_GE(projection.node_bytes, static_cast<double>(plan.data.at("send").bytes));
}

TEST(ProjectedPipeline, OnlyTheEndsOfAPipelineExchangeTheTiedTable) {
  // One rank of a node sends its gradients, even if the middle stages share the nodes of the ends.
  PlanRequest request = pipeline_request(4, 4);
  const auto projected = [&](int ranks_per_node) {
    request.ranks_per_node = ranks_per_node;
    return project({request, machine_with_link(1e-9), LinkRate{1e6, 0}, 0});
  };
  const Projection apart = projected(1), packed = projected(2);
  const auto messages = static_cast<double>(plan_run(request).data.at("send").bytes);
  EXPECT_GT(packed.node_bytes, 0);
  EXPECT_NEAR(packed.node_bytes, apart.node_bytes - messages, 1);
  EXPECT_LT(packed.step.total(), apart.step.total());
  // Two copies of the first stage on a node both send to their last stage.
  request.ranks = 8;
  request.config.mesh = "pipeline=4, replicate=2";
  request.config.train_batch_size = 16;
  EXPECT_NEAR(projected(4).node_bytes, 2 * packed.node_bytes, 1);
}

TEST(ProjectedPipeline, RecordingChangesNoPlanAndAllRanksHaveOneStep) {
  PlanRequest request = pipeline_request(2, 4, "zb-v");
  const PlanResult before = plan_run(request);
  const Machine machine = machine_with_link(1e-3);
  const double first = seconds_of(request, machine);
  EXPECT_EQ(plan_run(request).memory, before.memory);
  request.rank = 1;
  EXPECT_NEAR(seconds_of(request, machine), first, 1e-3 * first);
}

TEST(ProjectedPipeline, AStageIsShardedAndCut) {
  PlanRequest request = pipeline_request(2, 4);
  request.ranks = 8;
  request.config.mesh = "pipeline=2, shard=2, tensor=2";
  request.config.train_batch_size = 16;
  for (const int stage : {0, 3}) {
    request.config.stage = stage;
    const StepBreakdown step = step_of(request, machine_with_link(1e-4));
    EXPECT_GT(step.exposed_message, 0);
    EXPECT_GT(step.compute, 0);
  }
}

TEST(ScheduleChoices, AreOrderedByProjectedSecondsWhereThereAreSome) {
  const PlanRequest request = pipeline_request(2, 4);
  const std::vector<StagePlan> plans = plan_stages(request, 0);
  const Machine slow = machine_with_link(10);
  const auto seconds = [&](const PlanRequest& plan) { return seconds_of(plan, slow); };
  const std::vector<ScheduleChoice> choices = schedule_choices(request, plans, 0, seconds);
  const auto of = [&](const char* name) {
    return *std::find_if(choices.begin(), choices.end(),
                         [&](const ScheduleChoice& one) { return one.name == name; });
  };
  // The idealised lengths are equal; with messages that dominate AFAB waits for twice as many.
  EXPECT_NEAR(of("afab").length, of("1f1b").length, 1e-9);
  EXPECT_GT(*of("afab").seconds - *of("1f1b").seconds, 2.5 * 10);
  EXPECT_TRUE(
      std::is_sorted(choices.begin(), choices.end(),
                     [](const ScheduleChoice& a, const ScheduleChoice& b) { return a.seconds < b.seconds; }));
  EXPECT_THAT(schedule_choices_text(choices), HasSubstr("device peak      projected\n"));
  EXPECT_FALSE(schedule_choices(request, plans, 0).front().seconds);
}

}  // namespace
}  // namespace tranche::planner
