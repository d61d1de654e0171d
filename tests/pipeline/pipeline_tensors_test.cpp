// Tensors and checkpoints of a model that is cut into stages: which rank holds, reads, writes and saves each.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/core/rounds.h"
#include "tests/core/sweep.h"
#include "tests/pipeline/pipeline_fixture.h"
#include "tranche/core/error.h"
#include "tranche/kernels/elementwise.h"

namespace tranche::models::pipelines {
namespace {

using testing::HasSubstr;

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
    (void)engine.read_gradient("transformer.wpe.weight");  // only one use reads it
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

/// A mesh of at most eight ranks with its axes in any order.
struct DrawnMesh {
  std::string text;
  int ranks = 1;
};

/// A checkpoint that is saved on one mesh and loaded on another; at least one has a pipeline.
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

// Every other mesh loads a checkpoint with state equal in every bit.
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

/// Reads every tensor's weight, gradient and optimizer state on every rank, writes other values, and reads
/// them again. Returns the values, which are equal on all ranks, and the digest after a step.
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
    /// Reads with `read`, writes half of each value plus a quarter, and reads again.
    const auto each = [&](const std::string& what, bool frozen_too, const auto& read, const auto& write) {
      for (const UnitSpec& unit : engine.model().units()) {
        for (const TensorSpec& tensor : unit.tensors) {
          if (engine.frozen(tensor.name) && !frozen_too) continue;
          std::vector<float> values = read(tensor.name);
          note(what + " of " + tensor.name, values);
          for (float& value : values) value = value * 0.5f + 0.25f;
          write(tensor.name, values);
          const std::vector<float> again = read(tensor.name);
          for (std::size_t i = 0; i < values.size(); ++i) {  // a gradient is stored multiplied by the step's
                                                             // tokens
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

}  // namespace
}  // namespace tranche::models::pipelines
