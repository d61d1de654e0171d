// Refusals on a pipeline, and its ranks that fail or hang.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/core/rounds.h"
#include "tests/pipeline/pipeline_fixture.h"
#include "tranche/core/error.h"
#include "tranche/engine/check_gradients.h"

namespace tranche::models::pipelines {
namespace {

using testing::HasSubstr;

TEST(Pipeline, SaysWhichSettingsHaveNoEffectOrAreNone) {
  const auto problem = [](const std::string& keys, int ranks = 1) {
    try {
      const Config config = parse_config("{\"tranche\": {" + keys + "}}", ranks);
      std::string notes;
      for (const std::string& note : config.notes) notes += note + "\n";
      return notes;
    } catch (const ConfigurationError& error) {
      return error.message();
    }
  };
  EXPECT_THAT(problem(R"("pipeline_cuts": [3])"),
              HasSubstr("tranche.pipeline_cuts has no effect: the mesh has no axis pipeline"));
  EXPECT_THAT(problem(R"("pipeline_schedule": "afab")"),
              HasSubstr("tranche.pipeline_schedule has no effect"));
  EXPECT_THAT(problem(R"("mesh": "pipeline=2")", 2),
              HasSubstr("1 micro-batch on 2 stages of a pipeline: at most 1 of 2 stages can work at once"));
  EXPECT_THAT(problem(R"("tie_sum": "apart")"),
              HasSubstr("tranche.tie_sum: 'apart' is not one of together, by_use"));
  EXPECT_THAT(problem(R"("pipeline_chunks": 2)"), HasSubstr("tranche.pipeline_chunks has no effect"));
  EXPECT_THAT(problem(R"("pipeline_chunks": -1)"), HasSubstr("tranche.pipeline_chunks"));
  EXPECT_THAT(
      problem(R"("pipeline_cuts": "best")"),
      HasSubstr("tranche.pipeline_cuts: expected balanced, equal, parameters, or a list with the number of "
                "the first unit of every stage (or chunk) except the first one, not \"best\""));
  const Config read = parse_config(
      R"({"tranche": {"mesh": "pipeline=2", "pipeline_cuts": [3], "pipeline_schedule": "afab", "pipeline_chunks": 1}})",
      2);
  const Config again = parse_config(read.to_json(), 2);
  EXPECT_EQ(again.pipeline_begins, std::vector<int>{3});
  EXPECT_EQ(again.pipeline_schedule, "afab");
  EXPECT_EQ(again.pipeline_chunks, 1);
  EXPECT_EQ(again.tie_sum, TieSum::by_use);
}

TEST(Pipeline, RefusesSchedulesBeforeTheFirstStep) {
  const std::shared_ptr<const LanguageModel> model = narrow_model(false, 4);
  const auto with = [&](const std::string& schedule, int chunks = 0, int micro_batches = 4) {
    Config config = pipeline_config(DataType::float32, 0, ReductionPolicy::automatic, micro_batches);
    config.mesh = "pipeline=2";
    config.pipeline_schedule = schedule;
    config.pipeline_chunks = chunks;
    return refusal(config, 2, *model);
  };
  EXPECT_THAT(with("zb-h"), HasSubstr("tranche.pipeline_schedule: 'zb-h' is no schedule"));
  EXPECT_THAT(with("interleaved", 0, 5), HasSubstr("4 or 6 micro-batches work, and breadth-first takes any"));
  EXPECT_THAT(with("1f1b", 2), HasSubstr("schedule 1f1b has one chunk on a rank, not 2"));
  EXPECT_THAT(with("zb-v", 3), HasSubstr("tranche.pipeline_schedule: "));
  EXPECT_THAT(with("breadth-first", 4),
              HasSubstr("tranche.pipeline_schedule \"breadth-first\" with 4 chunks on each of 2 stages has 8 "
                        "chunks: the model has 6 units to cut, so 6 chunks at most"));
  EXPECT_THAT(with("no/such/file.csv"), HasSubstr("no/such/file.csv"));
  const std::filesystem::path file =
      std::filesystem::temp_directory_path() / ("tranche-schedule-" + std::to_string(::getpid()) + ".csv");
  const auto with_file = [&](const std::string& text, int micro_batches) {
    std::ofstream(file) << text;
    return with(file.string(), 0, micro_batches);
  };
  EXPECT_THAT(with_file("0F0,0F0,0B0\n1F0,1B0\n", 1), HasSubstr("0F0 of rank 0 is there twice"));
  EXPECT_THAT(with_file("0F0,0B0\n1F0\n", 1), HasSubstr("lacks 1B0"));
  EXPECT_THAT(with_file("0F0,0B0\n1F0,1B0\n", 3), HasSubstr("was made for 1 micro-batch"));
  EXPECT_THAT(with_file("1F0,1B0\n0F0,0B0\n", 1), HasSubstr("chunk 0 is on rank 1; the first stage has to"));
  EXPECT_THAT(with_file("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", 2), HasSubstr("tranche.pipeline_schedule: "));
  EXPECT_THAT(
      with_file("0F0,0F1,0I1,0I0,0W0,0W1\n1F0,1F1,1I1,1I0,1W0,1W1\n", 2),
      HasSubstr("0I0 of rank 0 stands behind 0I1: the input gradients of a chunk have to be computed in "
                "ascending"));
  std::filesystem::remove(file);
}

TEST(Pipeline, RefusesWhatItDoesNotHave) {
  const std::shared_ptr<const LanguageModel> model = narrow_model(false, 4);
  const auto with = [&](const std::function<void(Config&)>& change, int ranks = 2) {
    Config config = pipeline_config(DataType::bfloat16, 3, ReductionPolicy::automatic);
    config.mesh = "pipeline=2, shard=*";
    change(config);
    return refusal(config, ranks, *model);
  };
  EXPECT_THAT(with([](Config& c) { c.mesh = "pipeline=8"; }, 8),
              HasSubstr("tranche.mesh \"pipeline=8\": the model has 6 units to cut, so 6 stages at most"));
  EXPECT_THAT(with([](Config& c) {
                c.pipeline_cuts = PipelineCuts::listed;
                c.pipeline_begins = {6};
              }),
              HasSubstr("tranche.pipeline_cuts [6]: 6 leaves a stage without a unit"));
  EXPECT_THAT(with([](Config& c) { c.offload.parameters = OffloadTier::cpu; }),
              HasSubstr("zero_optimization.offload_param: not with tranche.mesh \"pipeline=2, shard=*\""));
  EXPECT_THAT(with([](Config& c) {
                c.activation_checkpointing = true;
                c.offload.activations = true;
              }),
              HasSubstr("activation_checkpointing.cpu_checkpointing: not with tranche.mesh"));
  EXPECT_THAT(with([](Config& c) { c.gradient_noise_scale = true; }),
              HasSubstr("tranche.gradient_noise_scale: not with tranche.mesh"));
}

TEST(Pipeline, NamesARankThatWasStartedWithAnotherCut) {
  const std::shared_ptr<const LanguageModel> model = narrow_model(false, 4);
  const auto told = [&](const std::function<void(Config&)>& change) {
    std::string text = "nothing was thrown";
    std::mutex mutex;
    run_thread_ranks(4, [&](int rank, const CommunicatorFactory& factory) {
      Config config = pipeline_config(DataType::float32, 0, ReductionPolicy::automatic);
      config.mesh = "pipeline=2, shard=2";
      if (rank == 3) change(config);
      validate_config(config, 4);
      Runtime runtime(RuntimeOptions::from(config), factory);
      try {
        const Engine engine(runtime, model->spec(time_steps), config);
      } catch (const ConfigurationError& error) {
        const std::lock_guard lock(mutex);
        text = error.message();
      }
    });
    return text;
  };
  EXPECT_THAT(told([](Config& config) {
                config.pipeline_cuts = PipelineCuts::listed;
                config.pipeline_begins = {1};
              }),
              HasSubstr("rank 3 (pipeline 1, shard 1) was started with another cut than rank 0"));
  EXPECT_THAT(told([](Config& config) { config.pipeline_schedule = "afab"; }),
              HasSubstr("rank 3 (pipeline 1, shard 1) was started with another schedule of the pipeline than "
                        "rank 0"));
}

TEST(Pipeline, RefusesToCheckGradients) {
  const std::shared_ptr<const LanguageModel> model = narrow_model(false, 4);
  Config config = pipeline_config(DataType::float32, 0, ReductionPolicy::automatic);
  config.mesh = "pipeline=2";
  EXPECT_THAT(refusal(config, 2, *model, [](Engine& engine) { (void)check_gradients(engine, [] {}); }),
              HasSubstr("check_gradients() on a mesh with a pipeline (pipeline=2), whose micro-batches "
                        "are a schedule's: check on one rank"));
}

TEST(Pipeline, SaysWhereAWholeModelIsNeeded) {
  const std::shared_ptr<const LanguageModel> model = narrow_model(false, 4);
  Config config = pipeline_config(DataType::bfloat16, 0, ReductionPolicy::automatic);
  config.mesh = "pipeline=2";
  EXPECT_THAT(
      refusal(config, 2, *model,
              [&](Engine& engine) {
                TokenData data(time_steps, 61, false);
                data.draw(0, 1);
                model->forward_backward(engine, data.batch());
              }),
      HasSubstr("forward_backward() on a mesh with a pipeline (pipeline=2), whose stages compute a part of "
                "the model each; use models::train_step()"));
}

/// The lines that the ranks of "pipeline=3, shard=2" log, by rank, if one of them fails in micro-batch 2 in
/// the way of `failing`, which receives a function that waits until all other ranks have ended.
std::vector<std::string> texts_of_a_failure(
    int failing_rank, double timeout, const std::function<void(const std::function<void()>&)>& failing) {
  constexpr int ranks = 6;
  const std::shared_ptr<const LanguageModel> model = narrow_model(false, 4);
  Config config = pipeline_config(DataType::float32, 1, ReductionPolicy::automatic);
  config.mesh = "pipeline=3, shard=2";
  config.communication_timeout = timeout;
  std::atomic<int> ended = 0;
  testing::internal::CaptureStderr();
  on_ranks(ranks, model->spec(time_steps), config, [&](Engine& engine) {
    StepData data(engine, model->shape().vocabulary);
    try {
      train_step(*model, engine, [&](std::int64_t m) {
        if (engine.runtime().rank() == failing_rank && m == 2) {
          failing([&] {
            while (ended < ranks - 1) std::this_thread::sleep_for(std::chrono::milliseconds(5));
          });
        }
        return data.draw(engine, m);
      });
      (void)engine.step();
      ADD_FAILURE() << "rank " << engine.runtime().rank() << " did not end";
    } catch (...) {
      (void)engine.fail(std::current_exception());
    }
    ++ended;
  });
  std::istringstream logged(testing::internal::GetCapturedStderr());
  std::vector<std::string> texts(ranks);
  for (std::string line; std::getline(logged, line);) {
    for (int rank = 0; rank < ranks; ++rank) {
      if (line.find("[rank " + std::to_string(rank) + "]") != std::string::npos) {
        texts[static_cast<std::size_t>(rank)] += line;
      }
    }
  }
  return texts;
}

std::string name_of_rank(int rank) {
  return "rank " + std::to_string(rank) + " (pipeline " + std::to_string(rank / 2) + ", shard " +
         std::to_string(rank % 2) + ")";
}

TEST(Pipeline, OutOfMemoryTellsWhatThisStageHolds) {
  Config config = pipeline_config(DataType::float32, 0, ReductionPolicy::boundary, 1);
  config.mesh = "pipeline=2";
  config.device_memory_limit = (1 << 20) + 10'000;  // the staging buffer and little more
  try {
    on_ranks(2, narrow_model(false, 4)->spec(time_steps), config, [](Engine&) {});
    FAIL() << "the stages fit";
  } catch (const OutOfMemory& error) {
    EXPECT_THAT(error.what(), HasSubstr("model state and the units that a step holds take, on this rank, "));
  }
}

// The failing rank and all others report the coordinates, the action and the micro-batch.
TEST(Pipeline, ARankOfAnyStageThatThrowsEndsAllRanks) {
  for (const int failing : {1, 2, 5}) {
    const std::vector<std::string> texts =
        texts_of_a_failure(failing, 60, [](const auto&) { throw std::runtime_error("the disk is full"); });
    const std::string place = failing < 2
                                  ? "forward of micro-batch 2"
                                  : "forward of micro-batch 2, receive from " + name_of_rank(failing - 2);
    for (int rank = 0; rank < 6; ++rank) {
      const std::string& text = texts[static_cast<std::size_t>(rank)];
      if (rank == failing) {
        EXPECT_THAT(text, HasSubstr(name_of_rank(rank) + ", " + place + ": the disk is full"));
      } else {
        EXPECT_THAT(text, HasSubstr(name_of_rank(failing) + " failed: " + place + ": the disk is full"));
      }
    }
  }
}

TEST(Pipeline, ARankOfAnyStageThatHangsEndsAllRanks) {
  constexpr int seconds = test::sanitized ? 10 : 4;
  const std::string after = " after " + std::to_string(seconds) + ".0 s";
  for (const int round : test::rounds(3)) {
    const int hanging = std::array{0, 3, 4}[static_cast<std::size_t>(round)];
    const auto begin = std::chrono::steady_clock::now();
    const std::vector<std::string> texts =
        texts_of_a_failure(hanging, seconds, [](const auto& until_others_end) { until_others_end(); });
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
    bool received = false;
    for (int rank = 0; rank < 6; ++rank) {
      if (rank == hanging) continue;
      const std::string& text = texts[static_cast<std::size_t>(rank)];
      EXPECT_THAT(text, testing::AnyOf(HasSubstr("no data from " + name_of_rank(hanging) + after),
                                       HasSubstr(name_of_rank(hanging) +
                                                 " has not taken the data of this rank" + after)))
          << rank;
      received = received || text.find(", receive from " + name_of_rank(hanging) + ": ") != std::string::npos;
    }
    EXPECT_TRUE(received) << "a neighbour says which message it waits for";
  }
}

}  // namespace
}  // namespace tranche::models::pipelines
