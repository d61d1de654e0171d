// Language models on the stages of a pipeline: the bits of one rank, whatever the mesh and the schedule.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/core/rounds.h"
#include "tests/core/sweep.h"
#include "tests/models/training_fixture.h"
#include "tranche/core/error.h"
#include "tranche/engine/check_gradients.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/models/key_value_cache.h"
#include "tranche/models/llama.h"
#include "tranche/planner/planner.h"

namespace tranche::models {
namespace {

using testing::HasSubstr;

constexpr std::int64_t time_steps = 11;
constexpr int steps = 3;

/// The bits of a training: of all state at its end, of each step, and of an evaluation.
struct Bits {
  kernels::Digest state, weights;
  std::vector<double> losses, norms, evaluated;
  friend bool operator==(const Bits&, const Bits&) = default;
};

std::shared_ptr<const LanguageModel> narrow_model(bool llama, std::int64_t layers) {
  if (llama) {
    LlamaConfig config = LlamaConfig::preset("qwen3-nano");
    config.tied = false;
    config.layers = layers;
    config.vocabulary = 61;
    config.positions = 16;
    return std::make_shared<Llama>(config);
  }
  GptConfig config = tiny_gpt();
  config.layers = layers;
  config.embedding_dropout = config.attention_dropout = config.residual_dropout = 0.1f;
  return std::make_shared<Gpt>(config);
}

Config pipeline_config(DataType dtype, int stage, ReductionPolicy policy, int micro_batches = 4) {
  Config config = plain_config(1);
  config.train_batch_size = 0;
  config.micro_batch_size = 1;
  config.accumulation_steps = micro_batches;
  config.stage = stage;
  config.reduction = policy;
  config.precision.compute = config.precision.communication = dtype;
  config.gradient_clipping = 0.5;
  config.optimizer.learning_rate = 2e-3;
  config.optimizer.parameters["weight_decay"] = 0.1;
  config.tie_sum = TieSum::by_use;
  return config;
}

/// Each micro-batch in memory of its own, as several are open at once.
struct StepData {
  std::vector<TokenData> places;
  StepData(Engine& engine, std::int64_t vocabulary)
      : places(static_cast<std::size_t>(engine.config().accumulation_steps),
               TokenData(time_steps, vocabulary, true)) {}
  TokenBatch draw(Engine& engine, std::int64_t m) {
    const Mesh& mesh = engine.runtime().mesh();
    TokenData& data = places[static_cast<std::size_t>(m)];
    data.draw(engine.samples() + m * mesh.data_ranks() + mesh.data_rank(engine.runtime().rank()), 1);
    return data.batch();
  }
};

StepResult train(Engine& engine, const LanguageModel& model) {
  StepData data(engine, model.shape().vocabulary);
  train_step(model, engine, [&](std::int64_t m) { return data.draw(engine, m); });
  return engine.step();
}

Bits bits_of(Engine& engine, const LanguageModel& model) {
  Bits mine;
  for (int step = 0; step < steps; ++step) {
    const StepResult result = train(engine, model);
    mine.losses.push_back(result.loss);
    mine.norms.push_back(result.gradient_norm);
  }
  const Mesh& mesh = engine.runtime().mesh();
  engine.begin_evaluation();
  TokenData data(time_steps, model.shape().vocabulary, true);
  for (std::int64_t first = 0; first < 6; first += mesh.data_ranks()) {
    data.draw(1000 + first + mesh.data_rank(engine.runtime().rank()), 1);
    model.evaluate(engine, data.batch());
  }
  mine.evaluated.push_back(engine.end_evaluation().loss);
  mine.state = engine.state_digest();
  mine.weights = engine.weights_digest();
  return mine;
}

/// The observations of every rank of the mesh; they have to agree.
Bits trained(const LanguageModel& model, Config config, const std::string& mesh, int ranks,
             const std::string& schedule = "1f1b") {
  config.mesh = mesh;
  config.pipeline_schedule = schedule;
  std::vector<Bits> all;
  std::mutex mutex;
  on_ranks(ranks, model.spec(time_steps), config, [&](Engine& engine) {
    Bits mine = bits_of(engine, model);
    const std::lock_guard lock(mutex);
    all.push_back(std::move(mine));
  });
  for (const Bits& other : all)
    EXPECT_TRUE(other == all.front()) << "all ranks know loss, norm and evaluation";
  return all.front();
}

constexpr std::array schedules{"1f1b", "afab", "interleaved", "breadth-first", "zb-h1", "zb-v"};

/// 2, 4 and 8 stages against one, with `shards` ranks beside. `number` says which combinations a run takes
/// that does not take all.
void expect_one_digest(bool llama, DataType dtype, ReductionPolicy policy, bool whole, int number) {
  const std::shared_ptr<const LanguageModel> model = narrow_model(llama, whole ? 16 : 6);
  const int micro_batches = whole ? 8 : 4;
  for (const int shards : {1, 2}) {
    const Bits one = trained(*model, pipeline_config(dtype, 0, policy, micro_batches), "", shards);
    EXPECT_LT(one.losses.back(), one.losses.front() + 0.1);
    for (int stages = 2; stages <= (whole ? 8 / shards : 4 / shards); stages *= 2) {
      for (int stage = 0; stage <= 3; ++stage) {
        for (std::size_t s = 0; s < schedules.size(); ++s) {
          // Each commit takes a part of the combinations; the sweep takes all.
          if (!whole && (5 * stage + stages / 2 + 2 * static_cast<int>(s) + shards + number) % 12 != 0)
            continue;
          const std::string mesh = "pipeline=" + std::to_string(stages) + ", shard=*";
          EXPECT_TRUE(trained(*model, pipeline_config(dtype, stage, policy, micro_batches), mesh,
                              stages * shards, schedules[s]) == one)
              << model->architecture() << " " << mesh << " of " << stages * shards << " ranks, ZeRO stage "
              << stage << ", " << schedules[s] << ", " << name_of(dtype) << ", " << name_of(policy);
        }
      }
    }
  }
}

constexpr std::array dtypes{DataType::float32, DataType::bfloat16};
constexpr std::array policies{ReductionPolicy::boundary, ReductionPolicy::micro_batch};

TEST(Pipeline, HasTheBitsOfOneRank) {
  int number = 0;
  for (const bool llama : {false, true}) {
    for (const DataType dtype : dtypes) {
      for (const ReductionPolicy policy : policies) expect_one_digest(llama, dtype, policy, false, number++);
    }
  }
}

TEST(PipelineSlow, HasTheBitsOfOneRankOnUpToEightStages) {
  for (const bool llama : {false, true}) {
    for (const DataType dtype : dtypes) {
      for (const ReductionPolicy policy : policies) expect_one_digest(llama, dtype, policy, true, 0);
    }
  }
}

// Every schedule on 2 and on 4 stages, with the tied table and without, in the form that needs most.
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

// Features beside two stages, each against the same on one rank.
TEST(Pipeline, HasTheBitsOfOneRankWithEachFeature) {
  const std::shared_ptr<const LanguageModel> model = narrow_model(false, 4);
  const auto expect_same = [&](const char* what, const std::function<void(Config&)>& change) {
    Config config = pipeline_config(DataType::bfloat16, 1, ReductionPolicy::boundary);
    change(config);
    const Bits one = trained(*model, config, "", 1);
    for (const auto& [stages, schedule] : {std::pair(2, "1f1b"), std::pair(3, "1f1b"), std::pair(2, "zb-v"),
                                           std::pair(3, "zb-h1"), std::pair(3, "breadth-first")}) {
      const bool cuts_fit = stages == 2 && std::string_view(schedule) == "1f1b";
      if (config.pipeline_cuts == PipelineCuts::listed && !cuts_fit) continue;
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
  for (const Case& c : {Case{0}, Case{3, Replicate::all, ReplicaSum::step}, Case{1, Replicate::parameters},
                        Case{2, Replicate::parameters, ReplicaSum::micro_batch, "Muon"},
                        Case{3, Replicate::parameters, ReplicaSum::step}}) {
    Config config = pipeline_config(DataType::float32, c.stage, ReductionPolicy::micro_batch);
    config.replicate = c.replicate;
    config.replica_sum = c.sum;
    config.optimizer.type = c.optimizer;
    EXPECT_TRUE(trained(*model, config, "replicate=2, pipeline=2, shard=2", 8) ==
                trained(*model, config, "replicate=2, shard=2", 4))
        << "stage " << c.stage << (c.replicate == Replicate::parameters ? ", parameters" : ", all") << ", "
        << c.optimizer;
  }
}

// Gradients of tied tensors, which are added by use, travel in the communication dtype on every mesh.
TEST(Pipeline, HasTheBitsOfOneStageWithInt8Blocks) {
  for (const bool llama : {false, true}) {
    const std::shared_ptr<const LanguageModel> model = narrow_model(llama, 4);
    for (const int stage : {0, 2, 3}) {
      Config config = pipeline_config(DataType::bfloat16, stage, ReductionPolicy::micro_batch);
      config.quantized_gradients = true;
      config.quantized_weights = stage != 2;
      EXPECT_TRUE(trained(*model, config, "pipeline=2, shard=2", 4) == trained(*model, config, "", 2))
          << model->architecture() << ", stage " << stage;
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
  EXPECT_THAT(
      summary(false),
      HasSubstr("zero_optimization.zero_quantized_gradients: gradients of transformer.wte.weight and of "
                "tensors tied like it travel in bf16"));
  EXPECT_THAT(summary(true), testing::Not(HasSubstr("tensors tied like it")));
}

// Without by_use the uses of a tied table are added before they are rounded: other bits, by intent.
TEST(Pipeline, IsNotTheSumOfUsesTogether) {
  const std::shared_ptr<const LanguageModel> model = narrow_model(false, 4);
  Config config = pipeline_config(DataType::bfloat16, 0, ReductionPolicy::micro_batch);
  const Bits by_use = trained(*model, config, "", 1);
  config.tie_sum = TieSum::together;
  const Bits together = trained(*model, config, "", 1);
  EXPECT_EQ(by_use.losses.front(), together.losses.front());
  EXPECT_FALSE(by_use.state == together.state);
}

// With world_size_invariant the uses of a data rank are added first, and data ranks then one by one.
TEST(Pipeline, SumsByUseAreThoseOfAnyNumberOfRanks) {
  const std::shared_ptr<const LanguageModel> model = narrow_model(false, 4);
  // In fp32, because few sums of bf16 values show an order.
  Config config = pipeline_config(DataType::float32, 1, ReductionPolicy::automatic);
  config.world_size_invariant = true;
  config.train_batch_size = 12;
  config.accumulation_steps = 0;
  const Bits one = trained(*model, config, "", 1);
  for (const int data_ranks : {1, 2, 3}) {
    EXPECT_TRUE(trained(*model, config, "", data_ranks) == one) << data_ranks << " data ranks on one stage";
    config.stage = data_ranks;
    EXPECT_TRUE(trained(*model, config, "pipeline=2, shard=*", 2 * data_ranks) == one)
        << data_ranks << " data ranks";
  }
  // Rows of two nodes: the sum of a data rank's uses crosses between them as one.
  config.debug.ranks_per_host = 2;
  EXPECT_TRUE(trained(*model, config, "shard=*, pipeline=2", 6) == one) << "several nodes";
}

TEST(Pipeline, ComparesTheCopiesOfBothEnds) {
  const std::shared_ptr<const LanguageModel> model = narrow_model(false, 4);
  Config config = pipeline_config(DataType::float32, 1, ReductionPolicy::automatic);
  config.mesh = "pipeline=2";
  on_ranks(2, model->spec(time_steps), config, [&](Engine& engine) {
    const std::string tied = "transformer.wte.weight";
    std::vector<float> values = engine.read_weight(tied);
    if (engine.stage().last()) values[3] += 1;  // each rank writes its own copy
    engine.write_weight(tied, values);
    try {
      (void)engine.weights_digest();
      ADD_FAILURE() << "the copies differ";
    } catch (const CommunicationError& error) {
      EXPECT_THAT(error.message(), HasSubstr("replicas differ: rank 1 holds other weights than rank 0"));
    }
  });
}

TEST(Pipeline, NamesTheStageThatHoldsATensor) {
  const std::shared_ptr<const LanguageModel> model = narrow_model(false, 4);
  Config config = pipeline_config(DataType::float32, 1, ReductionPolicy::automatic);
  config.mesh = "pipeline=2";
  on_ranks(2, model->spec(time_steps), config, [&](Engine& engine) {
    if (engine.stage().first()) return;
    const InferenceScope scope(engine, {1, 1, 1});
    const GatheredUnit unit = engine.gather({0});
    try {
      (void)unit.tensor("transformer.wpe.weight");
      ADD_FAILURE() << "the positions are on the first stage";
    } catch (const InvalidArgument& error) {
      EXPECT_THAT(error.message(),
                  HasSubstr("tensor transformer.wpe.weight is held by stage 0 of the pipeline"));
    }
  });
}

TEST(Pipeline, RefusesUsesThatAStageDoesNotHaveAndSumsThatAreNotThereYet) {
  const std::shared_ptr<const LanguageModel> model = narrow_model(false, 4);
  const auto message = [](const std::function<void()>& call) {
    try {
      call();
    } catch (const LogicError& error) {
      return error.message();
    }
    return std::string("nothing was thrown");
  };
  Config config = pipeline_config(DataType::float32, 0, ReductionPolicy::boundary);
  on_ranks(1, model->spec(time_steps), config, [&](Engine& engine) {
    TokenData data(time_steps, 61, false);
    data.draw(0, 1);
    model->forward_backward(engine, data.batch());
    EXPECT_THAT(
        message([&] { (void)engine.read_gradient("transformer.wte.weight"); }),
        HasSubstr("before the last micro-batch of a step: its uses' gradients are kept apart until then"));
    (void)engine.read_gradient("transformer.wpe.weight");  // which one use reads
  });
  config.mesh = "pipeline=2";
  config.accumulation_steps = 1;
  on_ranks(2, model->spec(time_steps), config, [&](Engine& engine) {
    (void)engine.begin_micro_batch({}, {});
    const UnitId table{0};  // both stages have one of its two uses
    engine.gradients(table).reduce();
    EXPECT_THAT(message([&] { (void)engine.gradients(table); }),
                HasSubstr("this stage's uses of the unit are 1"));
    const Engine::Chunk chunk = engine.stage().chunks.front();
    for (int i = chunk.begin; i < chunk.end; ++i) {
      const UnitUse& use = engine.model().forward[static_cast<std::size_t>(i)];
      if (!(use.unit == table)) engine.skip_gradients(use.unit);
    }
    Buffer totals(engine.runtime().memory(Tier::device), 16, Category::other, "totals");
    kernels::fill_zero(engine.compute_stream(), {totals.data(), DataType::int64, Shape{2}});
    engine.end_micro_batch({totals.data(), DataType::float64, {}},
                           {static_cast<std::int64_t*>(totals.data()) + 1, DataType::int64, {}});
    (void)engine.step();
  });
}

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
  EXPECT_THAT(problem(R"("pipeline_cuts": "best")"),
              HasSubstr("tranche.pipeline_cuts: expected balanced, equal, parameters, or a list with the "
                        "number of the first unit "
                        "of each stage or chunk but the first, not \"best\""));
  const Config read = parse_config(
      R"({"tranche": {"mesh": "pipeline=2", "pipeline_cuts": [3], "pipeline_schedule": "afab", "pipeline_chunks": 1}})",
      2);
  const Config again = parse_config(read.to_json(), 2);
  EXPECT_EQ(again.pipeline_begins, std::vector<int>{3});
  EXPECT_EQ(again.pipeline_schedule, "afab");
  EXPECT_EQ(again.pipeline_chunks, 1);
  EXPECT_EQ(again.tie_sum, TieSum::by_use);
}

/// A mesh of at most eight ranks, its axes in any order.
struct DrawnMesh {
  std::string text;
  int ranks = 1;
};

/// A checkpoint's way from one mesh to another, of which one has a pipeline at least.
struct CheckpointPair {
  bool llama = false;
  Config config;
  DrawnMesh from, to;
  int stage_of_reader = 0;
};

CheckpointPair draw_checkpoint_pair(std::uint64_t number) {
  const RandomKey key{97, RandomPurpose::test, 9};
  std::uint64_t counter = number * 64;
  const auto pick = [&](std::size_t n) { return random_bits(key, counter++) % n; };
  const auto mesh = [&](bool staged) {
    int stages = 0, shards = 0, replicas = 0;
    do {
      stages = (staged ? 2 : 1) + static_cast<int>(pick(4));
      shards = 1 + static_cast<int>(pick(3));
      replicas = 1 + static_cast<int>(pick(2));
    } while (stages * shards * replicas > 8);
    std::vector<std::string> axes{"pipeline=" + std::to_string(stages)};
    axes.insert(axes.begin() + static_cast<std::ptrdiff_t>(pick(2)), "shard=" + std::to_string(shards));
    axes.insert(axes.begin() + static_cast<std::ptrdiff_t>(pick(3)), "replicate=" + std::to_string(replicas));
    return DrawnMesh{axes[0] + ", " + axes[1] + ", " + axes[2], stages * shards * replicas};
  };
  CheckpointPair pair;
  pair.llama = pick(3) == 0;
  const bool staged_writer = pick(2) == 0;
  pair.from = mesh(staged_writer);
  pair.to = mesh(!staged_writer);
  pair.config = pipeline_config(pick(2) == 0 ? DataType::float32 : DataType::bfloat16,
                                static_cast<int>(pick(4)), ReductionPolicy::automatic, 2);
  pair.stage_of_reader = static_cast<int>(pick(4));
  if (pick(3) == 0) pair.config.optimizer.type = "Muon";
  if (pick(3) == 0) pair.config.offload.optimizer = OffloadTier::cpu;
  return pair;
}

// A checkpoint of one mesh is read by any other, with the state equal to the bit.
TEST(Pipeline, ReadsCheckpointsOfAnyMesh) {
  const test::Sweep cases = test::sweep({0, 40});
  test::AxesMet axes;
  for (std::uint64_t number = cases.first; number < cases.end(); ++number) {
    const CheckpointPair pair = draw_checkpoint_pair(number);
    for (const auto& [whose, drawn, stage] : {std::tuple("writer's ", pair.from, pair.config.stage),
                                              std::tuple("reader's ", pair.to, pair.stage_of_reader)}) {
      const Mesh mesh = Mesh::parse(drawn.text, drawn.ranks);
      for (const MeshAxis axis : {MeshAxis::replicate, MeshAxis::pipeline, MeshAxis::shard}) {
        axes.meet(std::string(whose) + std::string(name_of(axis)), mesh.size(axis));
      }
      axes.meet(std::string(whose) + "ZeRO", stage);
    }
  }
  for (const std::string whose : {"writer's ", "reader's "}) {
    axes.expect(whose + "pipeline", {1, 2, 3, 4, 5});
    axes.expect(whose + "replicate", {1, 2});
    axes.expect(whose + "shard", {1, 2, 3});
    axes.expect(whose + "ZeRO", {0, 1, 2, 3});
  }
  for (const std::uint64_t number : test::rounds(cases)) {
    const CheckpointPair pair = draw_checkpoint_pair(number);
    const std::shared_ptr<const LanguageModel> model = narrow_model(pair.llama, 4);
    const std::filesystem::path folder =
        std::filesystem::temp_directory_path() /
        ("tranche-pipeline-" + std::to_string(::getpid()) + "-" + std::to_string(number));
    const std::string line = "draw " + std::to_string(number) + ": from " + pair.from.text + " to " +
                             pair.to.text + ", " + model->architecture() + ", " + pair.config.to_json();
    std::pair<kernels::Digest, kernels::Digest> saved;
    std::string path;
    std::mutex mutex;
    Config config = pair.config;
    config.mesh = pair.from.text;
    on_ranks(pair.from.ranks, model->spec(time_steps), config, [&](Engine& engine) {
      (void)train(engine, *model);
      const std::string written = engine.save(folder.string(), {});
      const std::pair digests(engine.state_digest(), engine.weights_digest());
      const std::lock_guard lock(mutex);
      saved = digests;
      path = written;
    });
    config.mesh = pair.to.text;
    config.stage = pair.stage_of_reader;
    on_ranks(pair.to.ranks, model->spec(time_steps), config, [&](Engine& engine) {
      EXPECT_FALSE(engine.state_digest() == saved.first) << line;
      engine.load(path, {});
      EXPECT_TRUE(engine.state_digest() == saved.first) << line;
      EXPECT_TRUE(engine.weights_digest() == saved.second) << line;
    });
    std::filesystem::remove_all(folder);
  }
}

/// Reads every tensor's weight, gradient and optimizer state on every rank, writes others, and reads them
/// again: what each rank has seen, which is the same on all, and the digest behind a step.
std::pair<reference_training::Tensors, kernels::Digest> read_and_written(const LanguageModel& model,
                                                                         Config config,
                                                                         const std::string& mesh, int ranks) {
  config.mesh = mesh;
  std::vector<std::pair<reference_training::Tensors, kernels::Digest>> all;
  std::mutex mutex;
  on_ranks(ranks, model.spec(time_steps), config, [&](Engine& engine) {
    reference_training::Tensors found;
    const auto note = [&](const std::string& what, const std::vector<float>& values) {
      found[what].assign(values.begin(), values.end());
    };
    /// Reads with `read`, writes half of each value and a quarter, and reads again.
    const auto each = [&](const std::string& what, bool frozen_too, const auto& read, const auto& write) {
      for (const UnitSpec& unit : engine.model().units()) {
        for (const TensorSpec& tensor : unit.tensors) {
          if (engine.frozen(tensor.name) && !frozen_too) continue;
          std::vector<float> values = read(tensor.name);
          note(what + " of " + tensor.name, values);
          for (float& value : values) value = value * 0.5f + 0.25f;
          write(tensor.name, values);
          const std::vector<float> again = read(tensor.name);
          for (std::size_t i = 0; i < values.size(); ++i) {  // a gradient is stored times the step's tokens
            ASSERT_NEAR(again[i], values[i], 1e-6 * std::abs(values[i]))
                << what << " of " << tensor.name << " on " << mesh;
          }
        }
      }
    };
    each(
        "weight", true, [&](const std::string& name) { return engine.read_weight(name); },
        [&](const std::string& name, const auto& values) { engine.write_weight(name, values); });
    StepData data(engine, model.shape().vocabulary);
    train_step(model, engine, [&](std::int64_t m) { return data.draw(engine, m); });
    each(
        "gradient", false, [&](const std::string& name) { return engine.read_gradient(name); },
        [&](const std::string& name, const auto& values) { engine.write_gradient(name, values); });
    (void)engine.step();
    for (const char* state : {"exp_avg", "exp_avg_sq"}) {
      each(
          state, false, [&](const std::string& name) { return engine.read_optimizer_state(name, state); },
          [&](const std::string& name, const auto& values) {
            engine.write_optimizer_state(name, state, values);
          });
    }
    for (const UnitSpec& unit : engine.model().units()) {
      for (const TensorSpec& tensor : unit.tensors) {
        note("new weight of " + tensor.name, engine.read_weight(tensor.name));
      }
    }
    (void)train(engine, model);
    const kernels::Digest digest = engine.state_digest();
    const std::lock_guard lock(mutex);
    all.emplace_back(std::move(found), digest);
  });
  for (const auto& other : all) EXPECT_TRUE(other == all.front()) << "all ranks see the same on " << mesh;
  return all.front();
}

// Every rank reads and writes every tensor, whichever stage holds it.
TEST(Pipeline, ReadsAndWritesTensorsOfAllStagesFromEveryRank) {
  for (const bool llama : {false, true}) {
    const std::shared_ptr<const LanguageModel> model = narrow_model(llama, 4);
    for (const int stage : llama ? std::vector{0, 3} : std::vector{2}) {
      Config config = pipeline_config(DataType::float32, stage, ReductionPolicy::micro_batch);
      config.frozen = {llama ? "model.layers.1.mlp.down_proj.weight" : "transformer.h.1.mlp.c_proj.weight"};
      const auto one = read_and_written(*model, config, "", 1);
      EXPECT_TRUE(read_and_written(*model, config, "pipeline=3", 3) == one) << "ZeRO stage " << stage;
      const auto two = read_and_written(*model, config, "", 2);
      EXPECT_TRUE(read_and_written(*model, config, "pipeline=2, shard=2", 4) == two)
          << "ZeRO stage " << stage;
    }
  }
}

/// Activation bytes of the first stage at the peak of a step.
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
  // But for the residual gradient of the one in backward, and what a block's backward takes.
  EXPECT_NEAR(static_cast<double>(activations("afab", 8)) / static_cast<double>(four), 2, 0.2);
}

std::string refusal(
    const Config& config, int ranks, const LanguageModel& model,
    const std::function<void(Engine&)>& body = [](Engine&) {}) {
  std::string text = "nothing was thrown";
  try {
    on_ranks(ranks, model.spec(time_steps), config, [&](Engine& engine) { body(engine); });
  } catch (const Error& error) {
    text = error.message();
  }
  return text;
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
  EXPECT_THAT(with_file("0F0,0F1,0I1,0I0,0W0,0W1\n1F0,1F1,1I1,1I0,1W0,1W1\n", 2),
              HasSubstr("0I0 of rank 0 stands behind 0I1: the input gradients of a chunk have to be computed in "
                        "ascending"));
  std::filesystem::remove(file);
}

// A schedule of the user's, which is none of those with a name: two stages, forward in pairs.
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

/// The lines that the ranks of "pipeline=3, shard=2" log, by rank, when one of them fails in micro-batch 2 as
/// `failing` does. `failing` gets a function that waits until all other ranks have ended.
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

// On the rank itself and on all others: the coordinates, the action and the micro-batch.
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
  constexpr int seconds = test::sanitized ? 10 : 2;
  const std::string after = " after " + std::to_string(seconds) + ".0 s";
  for (const int hanging : {0, 3, 4}) {
    const auto begin = std::chrono::steady_clock::now();
    const std::vector<std::string> texts =
        texts_of_a_failure(hanging, seconds, [](const auto& until_others_end) { until_others_end(); });
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5 * seconds));
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

// Stage 1 is slow to begin, so that stage 0 waits for its gradient.
TEST(Pipeline, TellsHowLongAStageWaitedForMessages) {
  const std::shared_ptr<const LanguageModel> model = narrow_model(false, 4);
  Config config = pipeline_config(DataType::float32, 0, ReductionPolicy::boundary, 1);
  config.mesh = "pipeline=2";
  std::array<double, 2> waited{}, seconds{};
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
  EXPECT_GT(waited[0], 0.05);
  EXPECT_LT(waited[0], seconds[0]);
  EXPECT_LT(waited[1], waited[0]);
}

/// The spans and arrows of a trace, of all ranks.
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
  // Two cuts, two data ranks: a residual and a gradient for each micro-batch, and a residual of the
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

// The numbers of the note are those of the traffic that is metered.
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

// Eight units in eight chunks, four on each rank: a chunk is gathered for the forward passes of a step and
// again for its backward passes, and the last one of a rank once for both.
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

// A checkpoint of one schedule goes on under another with the same bits, and nothing to say.
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

// A generation computes its forward passes over all chunks.
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

// With several chunks on a rank the spans name them, and no arrow goes between chunks of one rank.
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

}  // namespace
}  // namespace tranche::models
