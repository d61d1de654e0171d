// The stages of a pipeline have the bits of one rank, with every schedule and every feature.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "pipeline/schedule/run_order.h"
#include "tests/core/error_text.h"
#include "tests/core/rounds.h"
#include "tests/core/sweep.h"
#include "tests/pipeline/pipeline_fixture.h"
#include "tranche/core/error.h"
#include "tranche/models/key_value_cache.h"
#include "tranche/models/llama.h"

namespace tranche::models::pipelines {
namespace {

using testing::HasSubstr;

/// A training on a pipeline. It must have the bits of the same training on `shards` ranks without one.
struct BitPoint {
  bool llama = false;
  DataType dtype = DataType::float32;
  ReductionPolicy policy = ReductionPolicy::boundary;
  int stages = 2, shards = 1, zero = 0;
  const char* schedule = "";
};

constexpr std::array dtypes{DataType::float32, DataType::bfloat16};
constexpr std::array policies{ReductionPolicy::boundary, ReductionPolicy::micro_batch};

/// The whole sweep. Consecutive points differ in most of their axes.
std::vector<BitPoint> bit_points() {
  std::vector<BitPoint> points;
  for (const bool llama : {false, true}) {
    for (const DataType dtype : dtypes) {
      for (const ReductionPolicy policy : policies) {
        for (const auto& [stages, shards] :
             {std::pair(2, 1), std::pair(4, 1), std::pair(8, 1), std::pair(2, 2), std::pair(4, 2)}) {
          for (int zero = 0; zero <= 3; ++zero) {
            for (const char* const schedule : schedules) {
              points.push_back({llama, dtype, policy, stages, shards, zero, schedule});
            }
          }
        }
      }
    }
  }
  constexpr std::size_t stride = 389;  // has no divisor in common with the number of points
  std::vector<BitPoint> mixed;
  for (std::size_t i = 0; i < points.size(); ++i) mixed.push_back(points[i * stride % points.size()]);
  return mixed;
}

/// Compares 2, 4 and 8 stages with one; the model has units for two chunks on each of eight.
void expect_bits_of_one_rank(const test::Sweep& cases) {
  constexpr int layers = 14, micro_batches = 8;
  const std::vector<BitPoint> points = bit_points();
  const std::array models{narrow_model(false, layers), narrow_model(true, layers)};
  std::map<std::tuple<bool, DataType, ReductionPolicy, int>, Bits> without;
  test::AxesMet axes;
  for (std::uint64_t number = cases.first; number < cases.end(); ++number) {
    const BitPoint& point = points.at(number % points.size());
    axes.meet("schedule", std::string(point.schedule));
    axes.meet("stages", point.stages);
    axes.meet("shards", point.shards);
    axes.meet("ZeRO", point.zero);
    axes.meet("dtype", point.dtype);
    axes.meet("policy", point.policy);
    axes.meet("llama", point.llama);
  }
  axes.expect("schedule", {std::string("1f1b"), std::string("afab"), std::string("interleaved"),
                           std::string("breadth-first"), std::string("zb-h1"), std::string("zb-v")});
  axes.expect("stages", {2, 4, 8});
  axes.expect("shards", {1, 2});
  axes.expect("ZeRO", {0, 1, 2, 3});
  axes.expect("dtype", {DataType::float32, DataType::bfloat16});
  axes.expect("policy", {ReductionPolicy::boundary, ReductionPolicy::micro_batch});
  axes.expect("llama", {false, true});
  for (const std::uint64_t number : test::rounds(cases)) {
    const BitPoint& point = points.at(number % points.size());
    const LanguageModel& model = *models[point.llama ? 1 : 0];
    const auto config = [&](int zero) {
      return pipeline_config(point.dtype, zero, point.policy, micro_batches);
    };
    const auto [one, is_new] = without.try_emplace({point.llama, point.dtype, point.policy, point.shards});
    if (is_new) one->second = trained(model, config(0), "", point.shards);
    EXPECT_LT(one->second.losses.back(), one->second.losses.front() + 0.1);
    const std::string mesh = "pipeline=" + std::to_string(point.stages) + ", shard=*";
    EXPECT_TRUE(trained(model, config(point.zero), mesh, point.stages * point.shards, point.schedule) ==
                one->second)
        << "case " << number << ": " << model.architecture() << " " << mesh << " of "
        << point.stages * point.shards << " ranks, ZeRO stage " << point.zero << ", " << point.schedule
        << ", " << name_of(point.dtype) << ", " << name_of(point.policy);
  }
}

TEST(Pipeline, HasTheBitsOfOneRankOnUpToEightStages) {
  expect_bits_of_one_rank(test::sweep({0, 30}));
}

TEST(PipelineSlow, HasTheBitsOfOneRankOnUpToEightStages) {
  expect_bits_of_one_rank(test::sweep({0, bit_points().size()}));
}

// Every schedule on 2 and on 4 stages, with the tied table and without, in its most demanding form.
TEST(Pipeline, HasTheBitsOfOneRankUnderEverySchedule) {
  for (const bool llama : {false, true}) {
    const std::shared_ptr<const LanguageModel> model = narrow_model(llama, 6);
    const Config config = pipeline_config(DataType::bfloat16, 3, ReductionPolicy::micro_batch);
    const std::array one{trained(*model, config, "", 1), trained(*model, config, "", 2)};
    for (const char* const schedule : schedules) {
      EXPECT_TRUE(trained(*model, config, "pipeline=4", 4, schedule) == one[0])
          << model->architecture() << " on 4 stages, " << schedule;
      EXPECT_TRUE(trained(*model, config, "pipeline=2, shard=2", 4, schedule) == one[1])
          << model->architecture() << " on 2 stages, " << schedule;
    }
  }
}

// A user's schedule without a name: two stages, forward in pairs.
TEST(Pipeline, HasTheBitsOfOneRankUnderAScheduleFromAFile) {
  const std::shared_ptr<const LanguageModel> model = narrow_model(false, 4);
  const Config config = pipeline_config(DataType::bfloat16, 2, ReductionPolicy::micro_batch);
  const Bits one = trained(*model, config, "", 1);
  const std::filesystem::path file =
      std::filesystem::temp_directory_path() / ("tranche-pairs-" + std::to_string(::getpid()) + ".csv");
  for (const char* const text : {
           "0F0,0F1,,0B0,0B1,0F2,0F3,0B2,0B3\n1F0,1F1,1B0,1B1,1F2,1F3,1B2,1B3\n",
           "0F1,0F0,0F2,0F3,0I0,0W0,0B1,0I2,0W2,0B3\n1F1,1F0,1I0,1F2,1I1,1W0,1W1,1B2,1F3,1B3\n",
           "0F0,0F1,3F0,3B0,3F1,3B1,0B0,0B1,0F2,0F3,3F2,3B2,3F3,3B3,0B2,0B3\n"
           "1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1,1F2,2F2,1F3,2F3,2B2,1B2,2B3,1B3\n",
       }) {
    std::ofstream(file) << text;
    EXPECT_TRUE(trained(*model, config, "pipeline=2", 2, file.string()) == one) << text;
  }
  std::filesystem::remove(file);
}

// Features on two stages, each compared with the same on one rank.
TEST(Pipeline, HasTheBitsOfOneRankWithEachFeature) {
  const std::shared_ptr<const LanguageModel> model = narrow_model(false, 4);
  const auto expect_same = [&](const char* what, const std::function<void(Config&)>& change) {
    Config config = pipeline_config(DataType::bfloat16, 1, ReductionPolicy::boundary);
    change(config);
    const Bits one = trained(*model, config, "", 1);
    for (const auto& [stages, schedule] :
         {std::pair(2, "1f1b"), std::pair(3, "1f1b"), std::pair(3, "afab"), std::pair(2, "interleaved"),
          std::pair(3, "breadth-first"), std::pair(3, "zb-h1"), std::pair(2, "zb-v")}) {
      const bool cuts_fit = stages == 2 && std::string_view(schedule) == "1f1b";
      if (config.pipeline_cuts == PipelineCuts::listed && !cuts_fit) continue;
      if (std::string_view(schedule) == "interleaved" && config.accumulation_steps % stages != 0) continue;
      EXPECT_TRUE(trained(*model, config, "pipeline=" + std::to_string(stages), stages, schedule) == one)
          << what << " on " << stages << " stages, " << schedule;
    }
  };
  expect_same("activation checkpointing in groups that a cut divides", [](Config& config) {
    config.activation_checkpointing = true;
    config.checkpoint_every = 3;
    config.depth = 4;
  });
  expect_same("optimizer state in host memory",
              [](Config& config) { config.offload.optimizer = OffloadTier::cpu; });
  expect_same("optimizer state on nvme", [](Config& config) {
    config.offload.optimizer = OffloadTier::nvme;
    config.offload.nvme_path = std::filesystem::temp_directory_path().string();
  });
  expect_same("moments in blocks of 8 bits",
              [](Config& config) { config.precision.moments = DataType::block8; });
  expect_same("fp16 with loss scaling", [](Config& config) {
    config.precision.compute = config.precision.communication = DataType::float16;
    config.loss_scaling = true;
  });
  expect_same("a vocabulary in chunks", [](Config& config) { config.vocabulary_chunk = 20; });
  expect_same("half of the optimizer state in host memory", [](Config& config) {
    config.offload.optimizer = OffloadTier::cpu;
    config.offload.ratio = 0.5;
  });
  expect_same("Muon", [](Config& config) { config.optimizer.type = "Muon"; });
  expect_same("LAMB", [](Config& config) { config.optimizer.type = "Lamb"; });
  expect_same("a frozen token table", [](Config& config) { config.frozen = {"transformer.wte.weight"}; });
  expect_same("low-rank adapters", [](Config& config) {
    config.lora = {.rank = 2, .alpha = 4};
    config.lora.targets = {"c_attn", "c_fc", "lm_head"};
  });
  expect_same("no overlap", [](Config& config) { config.overlap = false; });
  expect_same("one micro-batch", [](Config& config) { config.accumulation_steps = 1; });
  expect_same("cuts of the user's", [](Config& config) {
    config.pipeline_cuts = PipelineCuts::listed;
    config.pipeline_begins = {1};
  });
  expect_same("the head alone on a stage", [](Config& config) {
    config.pipeline_cuts = PipelineCuts::listed;
    config.pipeline_begins = {5};
  });
}

TEST(Pipeline, HasTheBitsOfOneRankWithReplicas) {
  const std::shared_ptr<const LanguageModel> model = narrow_model(false, 4);
  struct Case {
    int stage;
    Replicate replicate = Replicate::all;
    ReplicaSum sum = ReplicaSum::micro_batch;
    const char* optimizer = "AdamW";
  };
  std::size_t number = 0;
  for (const Case& c : {Case{0}, Case{3, Replicate::all, ReplicaSum::step}, Case{1, Replicate::parameters},
                        Case{2, Replicate::parameters, ReplicaSum::micro_batch, "Muon"},
                        Case{3, Replicate::parameters, ReplicaSum::step}}) {
    Config config = pipeline_config(DataType::float32, c.stage, ReductionPolicy::micro_batch);
    config.replicate = c.replicate;
    config.replica_sum = c.sum;
    config.optimizer.type = c.optimizer;
    const char* const schedule = schedules[++number];  // 1f1b is covered by the sweeps
    EXPECT_TRUE(trained(*model, config, "replicate=2, pipeline=2, shard=2", 8, schedule) ==
                trained(*model, config, "replicate=2, shard=2", 4))
        << "stage " << c.stage << (c.replicate == Replicate::parameters ? ", parameters" : ", all") << ", "
        << c.optimizer << ", " << schedule;
  }
}

// Units are updated while the backward pass goes on, on every mesh and under every schedule: with the bits of
// updates at the boundary of the same mesh.
TEST(Pipeline, HasTheSameBitsWithUpdatesAsGradientsAreReduced) {
  struct Case {
    const char* mesh;
    int ranks, stage;
    const char* schedule = "1f1b";
    bool llama = false;
    OffloadTier optimizer = OffloadTier::nvme, parameters = OffloadTier::none;
  };
  for (const Case& c :
       {Case{"pipeline=2", 2, 0}, Case{"pipeline=3", 3, 1, "afab", false, OffloadTier::cpu},
        Case{"pipeline=2, shard=2", 4, 2, "interleaved"},
        Case{"pipeline=2, shard=2", 4, 3, "breadth-first", false, OffloadTier::cpu},
        Case{"pipeline=3", 3, 3, "zb-h1"}, Case{"pipeline=2", 2, 1, "zb-v", false, OffloadTier::none},
        Case{"replicate=2, pipeline=2", 4, 3},
        Case{"pipeline=2, tensor=2", 4, 1, "1f1b", true, OffloadTier::cpu},
        Case{"shard=2, tensor=2", 4, 3, "1f1b", true, OffloadTier::nvme, OffloadTier::nvme}}) {
    const std::shared_ptr<const LanguageModel> model = narrow_model(c.llama, 4);
    for (const ReductionPolicy policy : policies) {
      Config config = pipeline_config(DataType::bfloat16, c.stage, policy);
      config.gradient_clipping = 0;
      config.gather_for = c.stage == 3 && c.optimizer == OffloadTier::nvme ? GatherFor::step : GatherFor::use;
      const auto trains = [&] {
        return trained(*model, config, c.mesh, c.ranks, c.schedule, /*ignored=*/false);
      };
      const Bits expected = trains();
      config.update = UpdateTime::as_reduced;
      config.offload.optimizer = c.optimizer;
      config.offload.parameters = c.parameters;
      config.offload.nvme_path = std::filesystem::temp_directory_path().string();
      EXPECT_TRUE(trains() == expected)
          << c.mesh << ", stage " << c.stage << ", " << c.schedule << ", " << name_of(policy);
    }
  }
}

// Gradients of tied tensors, which are added by use, are sent in the communication dtype on every mesh.
TEST(Pipeline, HasTheBitsOfOneStageWithInt8Blocks) {
  for (const bool llama : {false, true}) {
    const std::shared_ptr<const LanguageModel> model = narrow_model(llama, 4);
    int number = llama ? 3 : 0;  // all six schedules
    for (const int stage : {0, 2, 3}) {
      Config config = pipeline_config(DataType::bfloat16, stage, ReductionPolicy::micro_batch);
      config.quantized_gradients = true;
      config.quantized_weights = stage != 2;
      const Bits without = trained(*model, config, "", 2);
      const char* const schedule = schedules[static_cast<std::size_t>(number++)];
      EXPECT_TRUE(trained(*model, config, "pipeline=2, shard=2", 4, schedule) == without)
          << model->architecture() << ", stage " << stage << ", " << schedule;
    }
  }
}

TEST(Pipeline, SaysWhichGradientsAreNotInt8Blocks) {
  const auto summary = [](bool llama) {
    Config config = pipeline_config(DataType::bfloat16, 1, ReductionPolicy::automatic);
    config.mesh = "pipeline=2";
    config.quantized_gradients = true;
    std::string text;
    on_ranks(2, narrow_model(llama, 4)->spec(time_steps), config, [&](Engine& engine) {
      if (engine.stage().first()) text = engine.summary();
    });
    return text;
  };
  EXPECT_THAT(summary(false), HasSubstr("zero_optimization.zero_quantized_gradients: gradients of "
                                        "transformer.wte.weight and of other tied tensors travel in bf16"));
  EXPECT_THAT(summary(true), testing::Not(HasSubstr("other tied tensors")));
}

// Without by_use the uses of a tied table are added before rounding, which gives other bits on purpose.
TEST(Pipeline, IsNotTheSumOfUsesTogether) {
  const std::shared_ptr<const LanguageModel> model = narrow_model(false, 4);
  Config config = pipeline_config(DataType::bfloat16, 0, ReductionPolicy::micro_batch);
  const Bits by_use = trained(*model, config, "", 1);
  config.tie_sum = TieSum::together;
  const Bits together = trained(*model, config, "", 1);
  EXPECT_EQ(by_use.losses.front(), together.losses.front());
  EXPECT_FALSE(by_use.state == together.state);
}

// With world_size_invariant the uses on a data rank are added first, then the data ranks one by one.
TEST(Pipeline, SumsByUseAreThoseOfAnyNumberOfRanks) {
  const std::shared_ptr<const LanguageModel> model = narrow_model(false, 4);
  // In fp32, because few sums of bf16 values depend on the order.
  Config config = pipeline_config(DataType::float32, 1, ReductionPolicy::automatic);
  config.world_size_invariant = true;
  config.train_batch_size = 12;
  config.accumulation_steps = 0;
  const Bits one = trained(*model, config, "", 1);
  for (const int data_ranks : {1, 2, 3}) {
    EXPECT_TRUE(trained(*model, config, "", data_ranks) == one) << data_ranks << " data ranks on one stage";
    config.stage = data_ranks;
    const char* const schedule =
        std::array{"1f1b", "zb-v", "breadth-first"}[static_cast<std::size_t>(data_ranks) - 1];
    EXPECT_TRUE(trained(*model, config, "pipeline=2, shard=*", 2 * data_ranks, schedule) == one)
        << data_ranks << " data ranks, " << schedule;
  }
  // Rows on two nodes: the sum of a data rank's uses crosses between them as one value.
  config.debug.ranks_per_host = 2;
  EXPECT_TRUE(trained(*model, config, "shard=*, pipeline=2", 6) == one) << "several nodes";
}

// A checkpoint of one schedule continues under another with the same bits and without a note.
TEST(Pipeline, GoesOnUnderAnotherSchedule) {
  const std::shared_ptr<const LanguageModel> model = narrow_model(false, 6);
  Config config = pipeline_config(DataType::bfloat16, 1, ReductionPolicy::micro_batch);
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("tranche-schedules-" + std::to_string(::getpid()));
  config.mesh = "pipeline=2";
  std::mutex mutex;
  std::map<std::string, kernels::Digest> digests;
  const std::array pairs{std::pair("1f1b", "zb-v"), std::pair("zb-v", "interleaved"),
                         std::pair("breadth-first", "zb-h1"), std::pair("zb-h1", "afab")};
  for (const auto& [first, second] : pairs) {
    std::string path;
    config.pipeline_schedule = first;
    on_ranks(2, model->spec(time_steps), config, [&](Engine& engine) {
      (void)train(engine, *model);
      const std::string written = engine.save(folder.string(), {});
      const std::lock_guard lock(mutex);
      path = written;
    });
    config.pipeline_schedule = second;
    on_ranks(2, model->spec(time_steps), config, [&](Engine& engine) {
      const LoadResult loaded = engine.load(path, {});
      EXPECT_THAT(loaded.notes, testing::IsEmpty()) << first << " to " << second;
      (void)train(engine, *model);
      const kernels::Digest digest = engine.state_digest();
      const std::lock_guard lock(mutex);
      digests[second] = digest;
    });
    std::filesystem::remove_all(folder);
  }
  for (const auto& [name, digest] : digests) EXPECT_TRUE(digest == digests.begin()->second) << name;
}

// The order of a rank's actions is computed once for a schedule and applies to all steps with the same batch.
TEST(Pipeline, KeepsItsOrderUntilTheBatchChanges) {
  const std::shared_ptr<const LanguageModel> model = narrow_model(false, 4);
  const auto digest_of = [&](const std::string& mesh, int ranks, const char* schedule) {
    Config config = pipeline_config(DataType::bfloat16, 1, ReductionPolicy::boundary, 2);
    config.mesh = mesh;
    config.pipeline_schedule = schedule;
    kernels::Digest digest;
    std::mutex mutex;
    on_ranks(ranks, model->spec(time_steps), config, [&](Engine& engine) {
      (void)train(engine, *model);
      if (ranks > 1) {
        const pipeline::RankSchedule* const kept = &engine.rank_schedule(true);
        (void)train(engine, *model);
        EXPECT_EQ(&engine.rank_schedule(true), kept);
        EXPECT_EQ(engine.rank_schedule(true).schedule.get(), &engine.pipeline_schedule());
      } else {
        (void)train(engine, *model);
      }
      if (ranks > 1 && std::string_view(schedule) == "interleaved") {
        EXPECT_THAT(test::message_of<InvalidArgument>([&] { engine.set_batch(1, 5); }),
                    testing::AllOf(testing::HasSubstr("set_batch() to 5 x 1 samples a step: "),
                                   testing::HasSubstr("4 or 6 micro-batches work")));
      }
      engine.set_batch(1, 6);
      (void)train(engine, *model);
      if (ranks > 1) {
        EXPECT_EQ(engine.rank_schedule(true).schedule->micro_batches, 6);
        const pipeline::RankSchedule* const forward = &engine.rank_schedule(false);
        EXPECT_EQ(forward->schedule->micro_batches, 1);
        EXPECT_EQ(&engine.rank_schedule(false), forward);
      }
      const kernels::Digest mine = engine.state_digest();
      const std::lock_guard lock(mutex);
      digest = mine;
    });
    return digest;
  };
  const kernels::Digest one = digest_of("", 1, "1f1b");
  for (const char* const schedule : {"1f1b", "interleaved", "zb-v"}) {
    EXPECT_TRUE(digest_of("pipeline=2", 2, schedule) == one) << schedule;
  }
}

// A generation runs its forward passes through all chunks.
TEST(Pipeline, GeneratesOverAllChunks) {
  const std::shared_ptr<const LanguageModel> model = narrow_model(true, 6);
  const std::vector<std::int32_t> prompt{5, 3, 1};
  const auto generated = [&](const std::string& mesh, int ranks, const std::string& schedule) {
    Config config = pipeline_config(DataType::float32, 0, ReductionPolicy::boundary);
    config.mesh = mesh;
    config.pipeline_schedule = schedule;
    std::vector<float> logits;
    std::mutex mutex;
    on_ranks(ranks, model->spec(time_steps), config, [&](Engine& engine) {
      KeyValueCache cache(engine, *model, 1, 8);
      std::vector<float> mine = model->prefill(engine, cache, 0, prompt);
      const std::vector<float> next = model->decode(engine, cache, std::vector<std::int32_t>{7});
      mine.insert(mine.end(), next.begin(), next.end());
      const std::lock_guard lock(mutex);
      logits = std::move(mine);
    });
    return logits;
  };
  const std::vector<float> one = generated("", 1, "1f1b");
  for (const char* const schedule : {"interleaved", "zb-v", "breadth-first"}) {
    EXPECT_EQ(generated("pipeline=2", 2, schedule), one) << schedule;
    EXPECT_EQ(generated("pipeline=4", 4, schedule), one) << schedule;
  }
}

}  // namespace
}  // namespace tranche::models::pipelines
