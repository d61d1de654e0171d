// Pipelines and the axis `tensor` on GPUs, or on emulated ones: the bits or losses of one GPU, the memory and
// waits of a step, and failures. Ranks are threads. If each has a GPU of its own, messages use NCCL;
// otherwise the ranks share a GPU and read each other's memory. In both cases they are also tested through
// host memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <vector>

#include "core/clock.h"
#include "device/cuda_probe.h"
#include "tests/core/rounds.h"
#include "tests/models/training_fixture.h"
#include "tranche/core/error.h"
#include "tranche/device/ledger.h"
#include "tranche/kernels/matmul.h"
#include "tranche/planner/planner.h"

namespace tranche::models {
namespace {

using testing::ContainsRegex;
using testing::Each;
using testing::HasSubstr;

constexpr std::int64_t time_steps = 7;

class GpuPipeline : public ::testing::Test {
 protected:
  void SetUp() override {
    const detail::CudaProbe probe = detail::probe_cuda();
    if (probe.devices.empty()) GTEST_SKIP() << probe.problem;
  }

 public:
  /// True if the transport "auto" is NCCL for this number of ranks.
  static bool by_nccl(int ranks) {
    return nccl_version() != "not compiled" && ranks <= static_cast<int>(detail::probe_cuda().devices.size());
  }
};

Gpt narrow_gpt_of(int layers) {
  GptConfig config = tiny_gpt();
  config.layers = layers;
  config.heads = 2;  // for two ranks of the axis `tensor`
  config.width = 8;
  config.vocabulary = 29;
  config.positions = 8;
  config.residual_dropout = 0.1f;
  return Gpt(config);
}
/// With embedding and head it has five units, for up to five stages.
const Gpt& narrow_gpt() {
  static const Gpt model = narrow_gpt_of(3);
  return model;
}
/// Eight units: two chunks on each of four stages.
const Gpt& deep_gpt() {
  static const Gpt model = narrow_gpt_of(6);
  return model;
}

Config base_config(int stage, int micro_batches = 4) {
  Config config = plain_config(1);
  config.train_batch_size = 0;
  config.accumulation_steps = micro_batches;
  config.stage = stage;
  // Reductions over both ends of the pipeline run together with the messages in each micro-batch.
  config.reduction = ReductionPolicy::micro_batch;
  config.precision.compute = config.precision.communication = DataType::bfloat16;
  config.gradient_clipping = 0.5;
  config.tie_sum = TieSum::by_use;
  config.communication_timeout = 60;
  config.staging_bytes = 64 << 10;
  return config;
}

/// Runs steps of the engine; each micro-batch has its own memory, because several are active at once.
class Trainer {
 public:
  explicit Trainer(Engine& engine, const Gpt& model = narrow_gpt()) : engine_(engine), model_(model) {
    for (std::int64_t m = 0; m < engine.config().accumulation_steps; ++m) places_.emplace_back(engine);
  }
  StepResult step(const std::function<void(std::int64_t)>& before = {}) {
    train_step(model_, engine_, [&](std::int64_t m) {
      if (before) before(m);
      const Mesh& mesh = engine_.runtime().mesh();
      return draw(static_cast<std::size_t>(m), engine_.samples() + m * mesh.data_ranks());
    });
    return engine_.step();
  }
  double evaluate() {
    engine_.begin_evaluation();
    for (std::int64_t pass = 0; pass < 2; ++pass) {
      model_.evaluate(engine_, draw(static_cast<std::size_t>(pass), 1000 + 2 * pass));
    }
    return engine_.end_evaluation().loss;
  }

 private:
  struct Place {
    explicit Place(Engine& engine)
        : data(time_steps, narrow_gpt().shape().vocabulary, true), on_device(engine) {}
    TokenData data;
    DeviceBatch on_device;
  };
  TokenBatch draw(std::size_t place, std::int64_t first) {
    Place& at = places_[place % places_.size()];
    at.data.draw(first + engine_.runtime().mesh().data_rank(engine_.runtime().rank()), 1);
    return at.on_device.of(at.data);
  }
  Engine& engine_;
  const Gpt& model_;
  std::deque<Place> places_;
};

struct Bits {
  kernels::Digest state;
  std::vector<double> losses, norms;
  double evaluated = 0;
  friend bool operator==(const Bits&, const Bits&) = default;
};

/// The results of all ranks.
std::vector<Bits> trained(Config config, const std::string& mesh, int ranks, int steps = 2,
                          const Gpt& model = narrow_gpt()) {
  config.mesh = mesh;
  std::vector<Bits> all;
  std::mutex mutex;
  on_ranks(
      ranks, model.spec(time_steps), config,
      [&](Engine& engine) {
        Trainer trainer(engine, model);
        Bits mine;
        for (int step = 0; step < steps; ++step) {
          const StepResult result = trainer.step();
          mine.losses.push_back(result.loss);
          mine.norms.push_back(result.gradient_norm);
        }
        mine.evaluated = trainer.evaluate();
        mine.state = engine.state_digest();
        const std::lock_guard lock(mutex);
        all.push_back(std::move(mine));
      },
      DeviceKind::cuda);
  return all;
}

// 2, 3 and 4 stages, both schedules, ZeRO stages 0 and 3, each transport. In each micro-batch the tied table
// is reduced over the first and the last stage, so that these reductions and the messages interact.
TEST_F(GpuPipeline, HasTheBitsOfOneGpuAndDoesNotHang) {
  const Bits one = trained(base_config(0), "", 1).front();
  int number = 0;
  for (const char* transport : {"auto", "staged"}) {
    for (int stages = 2; stages <= 4; ++stages) {
      for (const char* const schedule : {"1f1b", "afab"}) {
        for (const int zero : {0, 3}) {
          if (test::sanitized && number++ % 3 != 0) continue;
          Config config = base_config(zero);
          config.device_transport = transport;
          config.pipeline_schedule = schedule;
          for (const Bits& rank : trained(config, "pipeline=" + std::to_string(stages), stages)) {
            EXPECT_TRUE(rank == one) << stages << " stages, " << schedule << ", ZeRO stage " << zero
                                     << ", transport " << transport;
          }
        }
      }
    }
  }
}

// Two chunks per rank in a loop: the last stage sends residuals to the first one, which sends gradients back.
// With ZeRO stage 3 breadth-first gathers a chunk at once. zb-v, which is not a loop, is compared with its
// planned memory below.
TEST_F(GpuPipeline, HasTheBitsOfOneGpuWithSeveralChunks) {
  for (const int stages : {3, 4}) {
    const int micro_batches = test::sanitized ? stages : 2 * stages;
    const Bits one = trained(base_config(0, micro_batches), "", 1, 2, deep_gpt()).front();
    int number = stages;
    for (const char* transport : {"auto", "staged"}) {
      for (const char* const schedule : {"interleaved", "breadth-first"}) {
        for (const int zero : {0, 3}) {
          if (test::sanitized && number++ % 3 != 0) continue;
          Config config = base_config(zero, micro_batches);
          config.device_transport = transport;
          config.pipeline_schedule = schedule;
          for (const Bits& rank :
               trained(config, "pipeline=" + std::to_string(stages), stages, 2, deep_gpt())) {
            EXPECT_TRUE(rank == one) << stages << " stages, " << schedule << ", ZeRO stage " << zero
                                     << ", transport " << transport;
          }
        }
      }
    }
  }
}

TEST_F(GpuPipeline, HasTheBitsOfTwoGpusWithTwoShards) {
  Config config = base_config(3);
  const Bits two = trained(config, "", 2).front();
  for (const char* transport : {"auto", "staged"}) {
    config.device_transport = transport;
    EXPECT_THAT(trained(config, "pipeline=2, shard=2", 4), Each(two)) << transport;
  }
}

TEST_F(GpuPipeline, WaitsOnceAStepForTheGpu) {
  for (const char* transport : {"auto", "staged"}) {
    Config config = base_config(0, 6);
    config.mesh = "pipeline=2";
    config.device_transport = transport;
    on_ranks(
        2, narrow_gpt().spec(time_steps), config,
        [&](Engine& engine) {
          Trainer trainer(engine);
          DeviceCounters before;
          for (int step = 0; step < 4; ++step) {
            if (step == 2) before = engine.device().counters();
            EXPECT_TRUE(trainer.step().applied);
          }
          EXPECT_LE(engine.device().counters().host_waits - before.host_waits, 2) << transport << ", 2 steps";
        },
        DeviceKind::cuda);
  }
}

/// Trains four steps and compares the memory of each rank with its plan, including messages.
void expect_memory_of_plan(const Config& config, int ranks, const std::string& what,
                           const Gpt& model = narrow_gpt()) {
  on_ranks(
      ranks, model.spec(time_steps), config,
      [&](Engine& engine) {
        Trainer trainer(engine, model);
        const int rank = engine.runtime().rank();
        for (int step = 0; step < 4; ++step) {
          const std::int64_t calls = engine.runtime().memory_calls();
          (void)trainer.step();
          if (step == 3) {
            EXPECT_EQ(engine.runtime().memory_calls(), calls) << "rank " << rank << ", " << what;
          }
        }
        planner::PlanRequest request;
        request.model.name = "narrow";
        request.model.language = std::shared_ptr<const LanguageModel>(
            std::shared_ptr<void>(), static_cast<const LanguageModel*>(&model));
        request.config = config;
        request.sequence = time_steps;
        request.ranks = ranks;
        request.rank = rank;
        request.device = DeviceKind::cuda;
        const planner::PlanResult plan = planner::plan_run(request);
        const TierAccount& account = engine.runtime().ledger().account(Tier::device);
        const bool by_nccl = GpuPipeline::by_nccl(ranks) && config.device_transport == "auto";
        for (const Category category : all_categories) {
          // The plan includes the program's batches and NCCL's staging buffers.
          if (category == Category::other) continue;
          if (category == Category::communication && !by_nccl) continue;
          EXPECT_EQ(account.category_peak[category], plan.tier(Tier::device).category_peak[category])
              << name_of(category) << ", rank " << rank << ", " << what;
        }
      },
      DeviceKind::cuda);
}

TEST_F(GpuPipeline, TakesTheMemoryOfItsPlan) {
  for (const char* const schedule : {"1f1b", "afab"}) {
    for (const char* transport : {"auto", "staged"}) {
      Config config = base_config(3, 5);
      config.mesh = "pipeline=3";
      config.pipeline_schedule = schedule;
      config.device_transport = transport;
      expect_memory_of_plan(config, 3, std::string(schedule) + ", " + transport);
    }
  }
  for (const char* const schedule : {"interleaved", "zb-v", "breadth-first", "zb-h1"}) {
    if (test::sanitized && std::string_view(schedule) == "breadth-first") break;
    Config config = base_config(3, 6);
    config.mesh = "pipeline=3";
    config.pipeline_schedule = schedule;
    expect_memory_of_plan(config, 3, schedule, deep_gpt());
  }
}

using GpuTensor = GpuPipeline;

TEST_F(GpuTensor, HasTheLossesOfOneGpuAndOneSetOfBits) {
  Config config = base_config(0, 2);
  config.precision.compute = config.precision.communication = DataType::float32;
  const Bits one = trained(config, "", 1, 3).front();
  std::vector<Bits> first;
  for (const char* transport : {"auto", "staged"}) {
    for (const int zero : {0, 3}) {
      config.device_transport = transport;
      config.stage = zero;
      for (const Bits& rank : trained(config, "tensor=2", 2, 3)) {
        if (first.empty()) first.push_back(rank);
        EXPECT_TRUE(rank == first.front()) << "ZeRO stage " << zero << ", transport " << transport;
      }
    }
  }
  for (std::size_t step = 0; step < one.losses.size(); ++step) {
    EXPECT_NEAR(first.front().losses[step], one.losses[step], 1e-5 * one.losses[step]);
    EXPECT_NEAR(first.front().norms[step], one.norms[step], 1e-5 * one.norms[step]);
  }
  EXPECT_NEAR(first.front().evaluated, one.evaluated, 1e-5 * one.evaluated);
}

// Only the transport "auto", because with "staged" four ranks on one GPU have more streams than it has
// queues.
TEST_F(GpuTensor, DoesNotHangBesideShardsAndStages) {
  for (const char* mesh : {"shard=2, tensor=2", "pipeline=2, tensor=2"}) {
    const std::vector<Bits> ranks = trained(base_config(3, 2), mesh, 4);
    EXPECT_THAT(ranks, Each(ranks.front())) << mesh;
  }
}

TEST_F(GpuTensor, TakesTheMemoryOfItsPlan) {
  for (const auto& [ranks, mesh, transport] :
       {std::tuple(2, "tensor=2", "auto"), std::tuple(2, "tensor=2", "staged"),
        std::tuple(4, "shard=2, tensor=2", "auto")}) {
    Config config = base_config(3, 2);
    config.mesh = mesh;
    config.device_transport = transport;
    expect_memory_of_plan(config, ranks, std::string(mesh) + ", " + transport);
  }
}

TEST_F(GpuTensor, RefusesChains) {
  Config config = base_config(0, 2);
  config.mesh = "tensor=2";
  config.tensor_sums = TensorSums::chain;
  try {
    on_ranks(
        2, narrow_gpt().spec(time_steps), config, [](Engine&) {}, DeviceKind::cuda);
  } catch (const ConfigurationError& error) {
    EXPECT_EQ(error.message(),
              "tranche.tensor_sums: chain: products of bf16 run by \"" +
                  std::string(kernels::matmul_path(DeviceKind::cuda, DataType::bfloat16)) +
                  "\" here, which does not add up in ascending order, so that no chain has the bits of one "
                  "rank; write rank_order");
    return;
  }
  FAIL() << "accepted";
}

/// The error of each rank when rank 1 of three stages does `what` before its third micro-batch. `what`
/// receives the number of other ranks that have ended.
std::vector<std::string> ends(const char* transport, double timeout,
                              const std::function<void(const std::atomic<int>&)>& what,
                              const char* schedule = "1f1b") {
  const Gpt& model = deep_gpt();
  Config config = base_config(0, 6);
  config.mesh = "pipeline=3";
  config.pipeline_schedule = schedule;
  config.device_transport = transport;
  config.communication_timeout = timeout;
  std::vector<std::string> texts(3);
  std::atomic<int> ended{0};
  try {
    on_ranks(
        3, model.spec(time_steps), config,
        [&](Engine& engine) {
          const int rank = engine.runtime().rank();
          try {
            Trainer trainer(engine, model);
            for (int step = 0; step < 2; ++step) {
              (void)trainer.step([&](std::int64_t m) {
                if (rank == 1 && step == 1 && m == 2) what(ended);
              });
            }
            texts[static_cast<std::size_t>(rank)] = "nothing was thrown";
          } catch (...) {
            const std::exception_ptr error = std::current_exception();
            texts[static_cast<std::size_t>(rank)] = message_of(error);
            ++ended;
            (void)engine.runtime().fail(error);
            throw;
          }
        },
        DeviceKind::cuda);
  } catch (const Error&) {
  }
  return texts;
}

TEST_F(GpuPipeline, AStageThatThrowsEndsAll) {
  for (const char* transport : {"auto", "staged"}) {
    const std::vector<std::string> texts = ends(
        transport, 60, [](const std::atomic<int>&) { throw NumericalError("a planted failure of a stage"); });
    for (const std::size_t rank : {0, 2}) {
      EXPECT_THAT(
          texts[rank],
          HasSubstr(
              "rank 1 failed: forward of micro-batch 2, receive from rank 0: a planted failure of a stage"))
          << transport << ", rank " << rank;
    }
  }
}

/// The time-out where a stage hangs. The steps before have to pass within it on a busy machine as well.
constexpr double hang_timeout = test::sanitized ? 6 : 3;
const std::string after_hang_timeout = test::sanitized ? " after 6.0 s" : " after 3.0 s";

TEST_F(GpuPipeline, AStageThatHangsIsNamedWithTheMessage) {
  for (const char* transport : {"auto", "staged"}) {
    const detail::Stopwatch watch;
    const std::vector<std::string> texts = ends(transport, hang_timeout, [&](const std::atomic<int>& ended) {
      while (ended < 2 && watch.seconds() < 60) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      throw NumericalError("woken");
    });
    for (const std::size_t rank : {0, 2}) {
      EXPECT_THAT(texts[rank],
                  ContainsRegex(
                      "of micro-batch [0-9] in .*: (rank 1 has not taken the data of this rank|no data from "
                      "rank 1)" +
                      after_hang_timeout))
          << transport << ", rank " << rank;
    }
    EXPECT_LT(watch.seconds(), 40) << transport;
  }
}

TEST_F(GpuPipeline, AStageOfALoopThatThrowsOrHangsEndsAll) {
  const auto at_rank_1 = ContainsRegex("rank 1 failed: forward of micro-batch 2 on chunk 1, .*: planted");
  std::vector<std::string> texts = ends(
      "auto", 60, [](const std::atomic<int>&) { throw NumericalError("planted"); }, "interleaved");
  for (const std::size_t rank : {0, 2}) EXPECT_THAT(texts[rank], at_rank_1) << rank;
  const detail::Stopwatch watch;
  texts = ends(
      "auto", hang_timeout,
      [&](const std::atomic<int>& ended) {
        while (ended < 2 && watch.seconds() < 60) std::this_thread::sleep_for(std::chrono::milliseconds(5));
        throw NumericalError("woken");
      },
      "interleaved");
  for (const std::size_t rank : {0, 2}) {
    EXPECT_THAT(
        texts[rank],
        ContainsRegex("of micro-batch [0-9] .*: (rank [0-2] has not taken the data of this rank|no data "
                      "from rank [0-2])" +
                      after_hang_timeout))
        << rank;
  }
  EXPECT_LT(watch.seconds(), 40);
}

}  // namespace
}  // namespace tranche::models
