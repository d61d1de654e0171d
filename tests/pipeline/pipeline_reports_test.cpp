// The reports of a pipeline: memory, waiting times, traces, and the gathers of ZeRO stage 3.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "tests/pipeline/pipeline_fixture.h"
#include "tranche/models/llama.h"
#include "tranche/planner/planner.h"

namespace tranche::models::pipelines {
namespace {

using testing::HasSubstr;

/// The bytes of activations on the first stage at the peak of a step.
std::int64_t activations(const std::string& schedule, int micro_batches) {
  const std::shared_ptr<const LanguageModel> model = narrow_model(false, 4);
  Config config = pipeline_config(DataType::float32, 0, ReductionPolicy::boundary, micro_batches);
  config.mesh = "pipeline=4";
  config.pipeline_schedule = schedule;
  std::int64_t bytes = 0;
  on_ranks(4, model->spec(time_steps), config, [&](Engine& engine) {
    for (int step = 0; step < 3; ++step) (void)train(engine, *model);
    if (engine.stage().first()) {
      bytes = engine.runtime().ledger().account(Tier::device).category_peak[Category::activations];
    }
  });
  return bytes;
}

TEST(Pipeline, HoldsAsManyMicroBatchesAsTheScheduleSays) {
  EXPECT_EQ(activations("1f1b", 8), activations("1f1b", 64));
  const std::int64_t four = activations("afab", 4);
  // except the residual gradient of the micro-batch in backward, and the memory of a block's backward.
  EXPECT_NEAR(static_cast<double>(activations("afab", 8)) / static_cast<double>(four), 2, 0.2);
}

// Delayed weight gradients keep the saved activations of the recomputed block, which 1F1B frees at once.
TEST(Pipeline, PlansActivationsThatWaitForWeightGradients) {
  const std::shared_ptr<const LanguageModel> model = narrow_model(true, 7);
  const auto activations_of = [&](const char* schedule, int rank, bool recompute) {
    planner::PlanRequest request;
    request.model.language = model;
    request.sequence = time_steps;
    request.ranks = 3;
    request.rank = rank;
    request.config = pipeline_config(DataType::float32, 0, ReductionPolicy::boundary, 8);
    request.config.mesh = "pipeline=3";
    request.config.pipeline_schedule = schedule;
    request.config.activation_checkpointing = recompute;
    return planner::plan_run(request).tier(Tier::device).category_peak[Category::activations];
  };
  for (const int rank : {1, 2}) {
    for (const char* const split : {"zb-h1", "zb-v"}) {
      EXPECT_GT(activations_of(split, rank, true), activations_of("1f1b", rank, true) * 3 / 2)
          << split << ", rank " << rank;
      EXPECT_LE(activations_of(split, rank, true), activations_of(split, rank, false))
          << split << ", rank " << rank;
    }
  }
}

// Stage 1 begins late, so that stage 0 waits for its gradient. If stage 0 lost its core just then, it may not
// have waited, so that the test tries again.
TEST(Pipeline, TellsHowLongAStageWaitedForMessages) {
  const std::shared_ptr<const LanguageModel> model = narrow_model(false, 4);
  Config config = pipeline_config(DataType::float32, 0, ReductionPolicy::boundary, 1);
  config.mesh = "pipeline=2";
  std::array<double, 2> waited{}, seconds{};
  for (int attempt = 0; attempt < 5 && (waited[0] <= 0.05 || waited[1] >= waited[0]); ++attempt) {
    on_ranks(2, model->spec(time_steps), config, [&](Engine& engine) {
      const auto rank = static_cast<std::size_t>(engine.runtime().rank());
      StepData data(engine, model->shape().vocabulary);
      train_step(*model, engine, [&](std::int64_t m) {
        if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));
        return data.draw(engine, m);
      });
      const StepResult result = engine.step();
      waited[rank] = result.exposed_message_seconds;
      seconds[rank] = result.seconds;
    });
  }
  EXPECT_GT(waited[0], 0.05);
  EXPECT_LT(waited[0], seconds[0]);
  EXPECT_LT(waited[1], waited[0]);
}

/// The spans and arrows in a trace of all ranks.
struct Drawn {
  struct Arrow {
    double begins = -1, ends = -1;  ///< microseconds
    int from = -1, to = -1;         ///< ranks
    std::string made, needed;       ///< the spans at its ends
  };
  std::vector<std::multiset<std::string>> spans;  ///< by rank
  std::map<std::int64_t, Arrow> arrows;
};

Drawn drawn(const nlohmann::json& events, int ranks) {
  Drawn result;
  result.spans.resize(static_cast<std::size_t>(ranks));
  std::map<std::pair<int, int>, std::string> tracks;
  const auto track = [&](const nlohmann::json& event) {
    return tracks[{event["pid"].get<int>(), event["tid"].get<int>()}];
  };
  for (const auto& event : events) {
    if (event["ph"] == "M" && event["name"] == "thread_name") {
      tracks[{event["pid"].get<int>(), event["tid"].get<int>()}] = event["args"]["name"];
    }
  }
  for (const auto& event : events) {
    if (event["ph"] == "X" && track(event) == "pipeline") {
      result.spans[event["pid"].get<std::size_t>()].insert(event["name"].get<std::string>());
    }
  }
  const auto span_at = [&](const nlohmann::json& arrow) -> std::string {
    for (const auto& event : events) {
      if (event["ph"] != "X" || event["pid"] != arrow["pid"] || event["tid"] != arrow["tid"]) continue;
      const double begin = event["ts"], end = begin + event["dur"].get<double>(), at = arrow["ts"];
      if (begin <= at && at < end) return event["name"];
    }
    return "none";
  };
  for (const auto& event : events) {
    if (event["ph"] == "s") {
      Drawn::Arrow& arrow = result.arrows[event["id"]];
      EXPECT_EQ(arrow.from, -1) << "one beginning";
      arrow.begins = event["ts"];
      arrow.from = event["pid"];
      arrow.made = span_at(event);
    } else if (event["ph"] == "f") {
      Drawn::Arrow& arrow = result.arrows[event["id"]];
      EXPECT_EQ(arrow.to, -1) << "one end";
      arrow.ends = event["ts"];
      arrow.to = event["pid"];
      arrow.needed = span_at(event);
    }
  }
  return result;
}

TEST(Pipeline, TracesActionsAndMessages) {
  const std::shared_ptr<const LanguageModel> model = narrow_model(false, 4);
  Config config = pipeline_config(DataType::float32, 0, ReductionPolicy::boundary, 3);
  config.mesh = "shard=2, pipeline=3";
  constexpr int ranks = 6, trained_steps = 2;
  nlohmann::json events = nlohmann::json::array();
  std::mutex mutex;
  run_thread_ranks(ranks, [&](int rank, const CommunicatorFactory& factory) {
    Config own = config;
    validate_config(own, ranks);
    RuntimeOptions options = RuntimeOptions::from(own);
    options.trace = true;
    Runtime runtime(options, factory);
    Engine engine(runtime, model->spec(time_steps), own);
    for (int step = 0; step < trained_steps; ++step) train(engine, *model);
    engine.begin_evaluation();
    TokenData data(time_steps, model->shape().vocabulary, true);
    data.draw(1000 + runtime.mesh().data_rank(rank), 1);
    model->evaluate(engine, data.batch());
    (void)engine.end_evaluation();
    const std::string entries = runtime.trace()->entries("rank", 0, [](double) { return 0.0; });
    const std::lock_guard lock(mutex);
    for (auto& event : nlohmann::json::parse("[" + entries + "]")) events.push_back(std::move(event));
  });
  const Drawn seen = drawn(events, ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    const auto& spans = seen.spans[static_cast<std::size_t>(rank)];
    const int stage = rank % 3;
    EXPECT_EQ(spans.count("F2"), trained_steps) << rank;
    EXPECT_EQ(spans.count("B2"), trained_steps) << rank;
    EXPECT_EQ(spans.count("F0"), trained_steps + 1) << "an evaluation has a forward";
    EXPECT_EQ(spans.count("RECV_F1"), stage == 0 ? 0 : trained_steps) << rank;
    EXPECT_EQ(spans.count("RECV_B1"), stage == 2 ? 0 : trained_steps) << rank;
    EXPECT_EQ(spans.count("SEND_F1"), 0u) << "sends are the arrows";
  }
  // Two cuts and two data ranks: a residual and a gradient for each micro-batch, and a residual of the
  // evaluation.
  EXPECT_EQ(seen.arrows.size(), 2u * 2 * (trained_steps * 3 * 2 + 1));
  for (const auto& [id, arrow] : seen.arrows) {
    ASSERT_GE(arrow.from, 0) << id << " has a beginning";
    ASSERT_GE(arrow.to, 0) << id << " has an end";
    EXPECT_EQ(arrow.from / 3, arrow.to / 3) << "messages stay within a data rank";
    EXPECT_EQ(std::abs(arrow.from - arrow.to), 1);
    EXPECT_EQ(arrow.made, arrow.needed) << "a forward for a forward, of the same micro-batch";
    EXPECT_EQ(arrow.made.front(), arrow.to > arrow.from ? 'F' : 'B');
    EXPECT_LE(arrow.begins, arrow.ends + 0.002) << "ranks of one process have one clock";
  }
}

// If ranks have several chunks the spans name them, and no arrow connects chunks of one rank.
TEST(Pipeline, TracesChunks) {
  const std::shared_ptr<const LanguageModel> model = narrow_model(false, 4);
  Config config = pipeline_config(DataType::float32, 0, ReductionPolicy::boundary, 3);
  config.mesh = "pipeline=2";
  config.pipeline_schedule = "zb-v";
  nlohmann::json events = nlohmann::json::array();
  std::mutex mutex;
  run_thread_ranks(2, [&](int, const CommunicatorFactory& factory) {
    Config own = config;
    validate_config(own, 2);
    RuntimeOptions options = RuntimeOptions::from(own);
    options.trace = true;
    Runtime runtime(options, factory);
    Engine engine(runtime, model->spec(time_steps), own);
    train(engine, *model);
    const std::string entries = runtime.trace()->entries("rank", 0, [](double) { return 0.0; });
    const std::lock_guard lock(mutex);
    for (auto& event : nlohmann::json::parse("[" + entries + "]")) events.push_back(std::move(event));
  });
  const Drawn seen = drawn(events, 2);
  for (const char* const span : {"0F2", "0I2", "0W2", "3F1", "3I1", "3W1", "2RECV_B0"}) {
    EXPECT_EQ(seen.spans[span == std::string_view("2RECV_B0") ? 1 : 0].count(span), 1u) << span;
  }
  EXPECT_EQ(seen.spans[1].count("2RECV_F0"), 0u) << "chunk 1 lies on the same rank";
  EXPECT_EQ(seen.arrows.size(), 3u * 2 * 2) << "two cuts between ranks, a residual and a gradient each";
  for (const auto& [id, arrow] : seen.arrows) {
    EXPECT_EQ(std::abs(arrow.from - arrow.to), 1);
    EXPECT_EQ(arrow.made.substr(1), arrow.needed.substr(1)) << "the same pass of the same micro-batch";
  }
}

// The numbers in the note equal the metered traffic.
TEST(Pipeline, SaysWhatStage3GathersFromFourMicroBatchesOn) {
  const std::shared_ptr<const LanguageModel> model = narrow_model(true, 5);
  const auto plan = [&](int rank, int micro_batches, GatherFor gather_for, int stage = 3) {
    planner::PlanRequest request;
    request.model.language = model;
    request.sequence = time_steps;
    request.ranks = 6;
    request.rank = rank;
    request.config = pipeline_config(DataType::bfloat16, stage, ReductionPolicy::boundary, micro_batches);
    request.config.mesh = "pipeline=3, shard=2";
    request.config.gather_for = gather_for;
    return planner::plan_run(request);
  };
  for (const int rank : {0, 2, 4}) {
    const planner::PlanResult use = plan(rank, 4, GatherFor::use), step = plan(rank, 4, GatherFor::step);
    const std::int64_t kept = step.tier(Tier::device).category_peak[Category::gathered];
    EXPECT_THAT(use.notes, testing::Contains("ZeRO stage 3 gathers the weights of pipeline stage " +
                                             std::to_string(rank / 2) +
                                             " anew for each of 4 micro-batches: a rank sends " +
                                             format_bytes(use.data.at("all_gather").bytes) +
                                             " of parameters a step; tranche.gather_for step sends " +
                                             format_bytes(step.data.at("all_gather").bytes) + ", and keeps " +
                                             format_bytes(kept) + " gathered"))
        << rank;
    EXPECT_THAT(step.notes, testing::Not(testing::Contains(HasSubstr("anew for each"))));
    EXPECT_THAT(plan(rank, 3, GatherFor::use).notes,
                testing::Not(testing::Contains(HasSubstr("anew for each"))));
    EXPECT_THAT(plan(rank, 4, GatherFor::use, 2).notes,
                testing::Not(testing::Contains(HasSubstr("anew for each"))));
  }
}

// Cuts divide the groups of recomputed blocks: a group of one block gathers it twice; a longer one gathers
// its blocks, except the last, three times.
TEST(Pipeline, CountsTheGathersOfGroupsThatACutDivides) {
  const std::shared_ptr<const LanguageModel> model = narrow_model(true, 8);
  const auto expect_declared = [&](const char* schedule, int stages) {
    for (int stage = 0; stage < stages; ++stage) {
      planner::PlanRequest request;
      request.model.language = model;
      request.sequence = time_steps;
      request.ranks = 2 * stages;
      request.rank = 2 * stage;
      request.config = pipeline_config(DataType::bfloat16, 3, ReductionPolicy::boundary, 6);
      request.config.mesh = "pipeline=" + std::to_string(stages) + ", shard=2";
      request.config.pipeline_schedule = schedule;
      request.config.activation_checkpointing = true;
      request.config.checkpoint_every = 4;
      const planner::PlanResult plan = planner::plan_run(request);
      EXPECT_THAT(plan.notes, testing::Contains(HasSubstr(": a rank sends " +
                                                          format_bytes(plan.data.at("all_gather").bytes) +
                                                          " of parameters a step")))
          << schedule << ", stage " << stage << " of " << stages;
    }
  };
  expect_declared("1f1b", 3);
  expect_declared("interleaved", 2);
  expect_declared("zb-v", 3);
}

// Eight units in eight chunks, four on each rank. A chunk is gathered for the forward passes of a step and
// again for its backward passes; a rank's last chunk is gathered once for both.
TEST(Pipeline, GathersAChunkForAllMicroBatchesUnderBreadthFirst) {
  const std::shared_ptr<const LanguageModel> model = narrow_model(true, 6);
  const auto plan = [&](int rank, int micro_batches, const char* schedule) {
    planner::PlanRequest request;
    request.model.language = model;
    request.sequence = time_steps;
    request.ranks = 4;
    request.rank = rank;
    request.config = pipeline_config(DataType::bfloat16, 3, ReductionPolicy::boundary, micro_batches);
    request.config.mesh = "pipeline=2, shard=2";
    request.config.pipeline_schedule = schedule;
    request.config.pipeline_chunks = 4;
    return planner::plan_run(request);
  };
  for (const int rank : {0, 2}) {
    for (const int micro_batches : {8, 32}) {
      EXPECT_EQ(plan(rank, micro_batches, "breadth-first").data.at("all_gather").calls, 7)
          << "(2 - 1/4) of 4 units, on rank " << rank;
    }
    const planner::PlanResult interleaved = plan(rank, 8, "interleaved");
    EXPECT_GE(interleaved.data.at("all_gather").calls, 7 * 8);
    EXPECT_THAT(interleaved.notes,
                testing::Contains(HasSubstr("ZeRO stage 3 gathers a unit " +
                                            std::to_string(interleaved.data.at("all_gather").calls) +
                                            " times a step on pipeline stage " + std::to_string(rank / 2) +
                                            " under schedule interleaved; breadth-first gathers a chunk for "
                                            "all micro-batches at once")));
    EXPECT_THAT(plan(rank, 8, "breadth-first").notes,
                testing::Contains(HasSubstr("gathers a unit 7 times a step")));
  }
}

// The tied table is in the first and the last chunk, which are on different stages in a loop.
TEST(Pipeline, GathersATiedTableAsOftenAsTheFormulaSays) {
  LlamaConfig llama = LlamaConfig::preset("qwen3-nano");
  llama.tied = true;
  llama.layers = 6;
  llama.vocabulary = 61;
  llama.positions = 16;
  for (const int rank : {0, 2}) {
    for (const int chunks : {2, 4}) {
      planner::PlanRequest request;
      request.model.language = std::make_shared<Llama>(llama);
      request.sequence = time_steps;
      request.ranks = 4;
      request.rank = rank;
      request.config = pipeline_config(DataType::bfloat16, 3, ReductionPolicy::boundary, 8);
      request.config.mesh = "pipeline=2, shard=2";
      request.config.pipeline_schedule = "breadth-first";
      request.config.pipeline_chunks = chunks;
      const planner::AxisTraffic sent = planner::plan_run(request).axes.at(MeshAxis::shard);
      EXPECT_EQ(sent.bytes, sent.formula_bytes) << "rank " << rank << ", " << chunks << " chunks";
      EXPECT_EQ(sent.elements, sent.formula_elements) << "rank " << rank << ", " << chunks << " chunks";
    }
  }
}

}  // namespace
}  // namespace tranche::models::pipelines
