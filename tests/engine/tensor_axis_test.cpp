// The axes `tensor` and `context`: ranks with parts of tensors or of samples hold, train, count and save what
// one rank does.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cut_model.h"
#include "saving_fixture.h"
#include "tests/core/error_text.h"
#include "tests/core/sweep.h"
#include "tranche/core/error.h"
#include "tranche/core/random.h"
#include "tranche/engine/check_gradients.h"
#include "tranche/kernels/matmul.h"

namespace tranche::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// All results that must be equal on every mesh.
struct Outcome {
  kernels::Digest initial, weights, state;
  std::vector<double> losses, norms;
  std::vector<std::int64_t> tokens;
  std::map<std::string, std::vector<float>> values;  ///< weights, and a state of the trainable tensors
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

/// Loads (unless `from` is empty), trains up to step `last`, and saves (unless `to` is empty).
Outcome train(const CutRun& run, std::int64_t last = 3, const std::string& from = {},
              const std::string& to = {}) {
  Outcome outcome;
  std::mutex mutex;
  on_cut_ranks(run, [&](Engine& engine, Runtime& runtime) {
    if (!from.empty()) (void)engine.load(from);
    Outcome mine;
    mine.initial = engine.state_digest();
    while (engine.steps() < last) {
      cut_step(engine, runtime, engine.steps());
      const StepResult result = engine.step();
      EXPECT_TRUE(result.applied) << result.skipped_because;
      mine.losses.push_back(result.loss);
      mine.norms.push_back(result.gradient_norm);
      mine.tokens.push_back(result.tokens);
    }
    mine.weights = engine.weights_digest();
    mine.state = engine.state_digest();
    for (const UnitSpec& unit : engine.model().units()) {
      for (const TensorSpec& tensor : unit.tensors) {
        mine.values[tensor.name] = engine.read_weight(tensor.name);
        if (!tensor.frozen && run.optimizer == "AdamW") {
          mine.values[tensor.name + " exp_avg"] = engine.read_optimizer_state(tensor.name, "exp_avg");
        }
      }
    }
    if (!to.empty()) engine.save(to, {.wait = true});
    const std::lock_guard lock(mutex);
    if (runtime.rank() == 0) outcome = mine;
    EXPECT_EQ(outcome.values.empty() || outcome == mine, true) << "rank " << runtime.rank();
  });
  return outcome;
}

void expect_same(const Outcome& expected, const Outcome& actual, const std::string& where) {
  EXPECT_EQ(expected.initial, actual.initial) << where;
  EXPECT_EQ(expected.losses, actual.losses) << where;
  EXPECT_EQ(expected.norms, actual.norms) << where;
  EXPECT_EQ(expected.tokens, actual.tokens) << where;
  EXPECT_EQ(expected.weights, actual.weights) << where;
  EXPECT_EQ(expected.state, actual.state) << where;
  for (const auto& [name, values] : expected.values) {
    EXPECT_EQ(values, actual.values.at(name)) << where << ", " << name;
  }
}

const std::vector<std::pair<int, std::string>> meshes = {{2, "tensor=2"},
                                                         {4, "shard=2, tensor=2"},
                                                         {4, "tensor=2, shard=2"},
                                                         {4, "replicate=2, tensor=2"},
                                                         {4, "tensor=4"},
                                                         {8, "replicate=2, shard=2, tensor=2"},
                                                         {4, "pipeline=2, tensor=2"},
                                                         {8, "pipeline=2, shard=2, tensor=2"},
                                                         {8, "tensor=2, pipeline=4"},
                                                         {2, "context=2"},
                                                         {4, "context=4"},
                                                         {4, "shard=2, context=2"},
                                                         {4, "context=2, shard=2"},
                                                         {4, "replicate=2, context=2"},
                                                         {4, "pipeline=2, context=2"},
                                                         {4, "context=2, tensor=2"},
                                                         {8, "context=2, pipeline=2, tensor=2"},
                                                         {8, "tensor=4, context=2"}};

TEST(TensorAxis, EveryMeshAndStageHasTheBitsOfOneRank) {
  const Outcome expected = train({});
  EXPECT_NE(expected.initial, expected.state);
  for (const auto& [ranks, mesh] : meshes) {
    for (int stage = 0; stage <= (ranks > 4 ? 0 : 3); ++stage) {
      expect_same(expected, train({ranks, mesh, stage}), mesh + " at stage " + std::to_string(stage));
    }
  }
}

TEST(TensorAxis, OtherRulesPrecisionsAndTiersHaveTheBitsOfOneRank) {
  const auto compare = [](CutRun run) {
    const Outcome expected = train(run);
    run.ranks = 4;
    for (const char* mesh : {"shard=2, tensor=2", "tensor=4", "context=2, tensor=2"}) {
      run.mesh = mesh;
      for (const int stage : {0, 2, 3}) {
        run.stage = stage;
        expect_same(expected, train(run),
                    run.optimizer + " on " + mesh + " at stage " + std::to_string(stage));
      }
    }
  };
  compare({.optimizer = "Lamb"});  // needs sums over whole tensors
  compare({.dtype = DataType::bfloat16});
  compare({.dtype = DataType::bfloat16, .stochastic_rounding = true});  // each draw depends on the element's
                                                                        // index in the whole tensor
  compare({.moments = DataType::block8});
  CutRun away;
  away.offload.optimizer = OffloadTier::cpu;
  compare(away);
}

CutRun muon(int ranks, const std::string& mesh, int stage = 0) {
  return {ranks, mesh, stage, "Muon"};
}

// Row and column cuts, fused and shared heads, uneven parts, and a matrix that every rank has: the owner
// assembles the matrix of one rank.
TEST(TensorAxis, WholeMatricesHaveTheBitsOfOneRank) {
  const Outcome expected = train(muon(1, ""));
  EXPECT_NE(expected.weights, train({}).weights) << "Muon moves them otherwise";
  for (const auto& [ranks, mesh] : meshes) {
    for (int stage = 0; stage <= 3; ++stage) {
      if (ranks > 4 && stage % 2 == 1) continue;
      expect_same(expected, train(muon(ranks, mesh, stage)), mesh + " at stage " + std::to_string(stage));
    }
  }
  const std::vector<std::pair<int, std::string>> over_replicas = {{4, "replicate=2, tensor=2"},
                                                                  {8, "replicate=2, pipeline=2, tensor=2"},
                                                                  {8, "tensor=2, replicate=2, shard=2"},
                                                                  {8, "replicate=2, context=2, tensor=2"}};
  for (const auto& [ranks, mesh] : over_replicas) {
    CutRun run = muon(ranks, mesh, ranks == 4 ? 3 : 1);
    run.replicate = Replicate::parameters;
    expect_same(expected, train(run), mesh + ", copies of parameters alone");
  }
  for (const OffloadTier tier : {OffloadTier::cpu, OffloadTier::nvme}) {
    CutRun run = muon(4, "shard=2, tensor=2", 2);
    run.offload.optimizer = tier;
    run.offload.tile_elements = 4096;
    run.offload.nvme_path = std::filesystem::temp_directory_path().string();
    expect_same(expected, train(run), std::string(name_of(tier)));
  }
}

TEST(TensorAxis, ALayoutThatLeavesTensorsWholeHasTheBitsOfOneRank) {
  CutRun run;
  const Outcome expected = train(run);
  for (const auto& [ranks, mesh] : {std::pair(2, "tensor=2"), std::pair(4, "shard=2, tensor=2")}) {
    run.ranks = ranks;
    run.mesh = mesh;
    run.whole = {"vocabulary", "inner"};
    for (const int stage : {0, 2, 3}) {
      run.stage = stage;
      expect_same(expected, train(run), run.mesh + " at stage " + std::to_string(stage));
    }
  }
}

TEST(TensorAxis, AShareOfTheStateOffTheDeviceHasTheBitsOfOneRank) {
  CutRun run;
  const Outcome expected = train(run);
  // With parts of unequal sizes, and tensors that both ends of a pipeline share, ranks decide separately
  // which units move, and each stage has other units.
  for (const auto& [ranks, mesh] : {std::pair(2, "tensor=2"), std::pair(4, "tensor=4"),
                                    std::pair(2, "pipeline=2"), std::pair(4, "pipeline=2, tensor=2")}) {
    for (const auto& [ratio, stage] : {std::pair(0.2, 1), std::pair(0.5, 3), std::pair(0.8, 2)}) {
      run.ranks = ranks;
      run.mesh = mesh;
      run.stage = stage;
      run.offload.optimizer = OffloadTier::cpu;
      run.offload.ratio = ratio;
      expect_same(expected, train(run), run.mesh + " with ratio " + std::to_string(ratio));
    }
  }
}

TEST(TensorAxis, GradientsAreNotCheckedOnIt) {
  on_cut_ranks({2, "tensor=2"}, [](Engine& engine, Runtime&) {
    EXPECT_THAT(
        message_of<ConfigurationError>([&] { (void)check_gradients(engine, [] {}); }),
        HasSubstr("check_gradients() on a mesh with the axis tensor (tensor=2), whose ranks have parts of "
                  "each tensor: check on one rank"));
  });
}

TEST(ContextAxis, GradientsAreNotCheckedOnIt) {
  on_cut_ranks({2, "context=2"}, [](Engine& engine, Runtime&) {
    EXPECT_THAT(
        message_of<ConfigurationError>([&] { (void)check_gradients(engine, [] {}); }),
        HasSubstr("check_gradients() on a mesh with the axis context (context=2), whose ranks have parts "
                  "of each sample: check on one rank"));
  });
}

TEST(TensorAxis, AnInfinityIsToldByItsPlaceInTheWholeTensor) {
  for (const auto& [ranks, mesh] : {std::pair(1, ""), std::pair(2, "tensor=2"), std::pair(4, "tensor=4"),
                                    std::pair(4, "context=2, tensor=2")}) {
    on_cut_ranks({ranks, mesh}, [&](Engine& engine, Runtime& runtime) {
      cut_step(engine, runtime, 0, "qkv");
      const StepResult result = engine.step();
      EXPECT_FALSE(result.applied);
      EXPECT_THAT(result.skipped_because, HasSubstr("qkv at element 143")) << runtime.mesh().to_string();
    });
  }
}

TEST(TensorAxis, EvaluationsCountEachSampleOnce) {
  for (const auto& [ranks, mesh] :
       {std::pair(1, ""), std::pair(4, "shard=2, tensor=2"), std::pair(8, "shard=2, context=2, tensor=2")}) {
    on_cut_ranks({ranks, mesh}, [&](Engine& engine, Runtime& runtime) {
      const int parts = runtime.context() == nullptr ? 1 : runtime.context()->size();
      engine.begin_evaluation();
      for (int m = 0; m < 4 / runtime.mesh().data_ranks(); ++m) {
        engine.begin_micro_batch();
        const std::int64_t data_rank = runtime.mesh().data_rank(runtime.rank());
        StepBuffer scalars = engine.acquire(16, Category::activations, "scalars");
        const double loss =
            (1.0 + static_cast<double>(data_rank * (4 / runtime.mesh().data_ranks()) + m)) / parts;
        const std::int64_t tokens = 2 / parts;
        auto* sum = static_cast<double*>(scalars.data());
        engine.device().copy_from_host(engine.compute_stream(), sum, &loss, 8);
        engine.device().copy_from_host(engine.compute_stream(), sum + 1, &tokens, 8);
        engine.end_micro_batch({sum, DataType::float64, Shape{1}},
                               {reinterpret_cast<std::int64_t*>(sum + 1), DataType::int64, Shape{1}});
      }
      const EvaluationResult result = engine.end_evaluation();
      EXPECT_EQ(result.tokens, 8);
      EXPECT_EQ(result.loss, 10.0 / 8);
    });
  }
}

TEST(TensorAxis, WrittenTensorsAreReadBackWhole) {
  on_cut_ranks({4, "shard=2, tensor=2", 2}, [&](Engine& engine, Runtime&) {
    cut_step(engine, engine.runtime(), 0);
    (void)engine.step();
    for (const char* name : {"qkv", "key", "up", "wte", "table", "norm"}) {
      std::vector<float> values = engine.read_weight(name);
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = 0.25f * static_cast<float>(i);
      engine.write_weight(name, values);
      EXPECT_EQ(engine.read_weight(name), values) << name;
      if (engine.frozen(name)) continue;
      engine.write_optimizer_state(name, "exp_avg", values);
      EXPECT_EQ(engine.read_optimizer_state(name, "exp_avg"), values) << name;
    }
  });
}

/// The noise that is reported in three steps.
std::vector<GradientNoise> noise_of(const CutRun& run, ReductionPolicy policy) {
  std::vector<GradientNoise> noise;
  std::mutex mutex;
  on_cut_ranks(
      run,
      [&](Engine& engine, Runtime& runtime) {
        std::vector<GradientNoise> mine;
        for (int step = 0; step < 3; ++step) {
          cut_step(engine, runtime, step);
          mine.push_back(engine.step().noise);
        }
        const std::lock_guard lock(mutex);
        if (noise.empty()) noise = mine;
        for (std::size_t step = 0; step < mine.size(); ++step) {
          EXPECT_EQ(mine[step].scale, noise[step].scale) << "rank " << runtime.rank();
        }
      },
      [&](Config& config) {
        config.reduction = policy;
        config.gradient_noise_scale = true;
        config.gradient_noise_smoothing = 0.5;
      });
  return noise;
}

/// False for pipelines and the axis `context`, which refuse it.
bool may_measure_noise(const std::string& mesh) {
  return mesh.find("pipeline") == std::string::npos && mesh.find("context") == std::string::npos;
}

TEST(TensorAxis, TheNoiseOfGradientsHasTheBitsOfAMeshWithoutTheAxis) {
  for (const ReductionPolicy policy : {ReductionPolicy::micro_batch, ReductionPolicy::boundary}) {
    for (const auto& [ranks, mesh] : meshes) {
      if (!may_measure_noise(mesh)) continue;
      // Micro-batches are equal for any number of data ranks that share them; the sums of ranks are not.
      const int data_ranks = ranks / (mesh == "tensor=4" ? 4 : 2);
      if (policy == ReductionPolicy::boundary && data_ranks == 1) continue;
      CutRun without;
      if (policy == ReductionPolicy::boundary) without.ranks = data_ranks;
      const std::vector<GradientNoise> wanted = noise_of(without, policy);
      for (int stage = 0; stage <= 3; ++stage) {
        for (const bool whole : {false, true}) {
          CutRun run{ranks, mesh, stage};
          if (whole) run.whole = {"vocabulary", "inner"};
          const std::vector<GradientNoise> noise = noise_of(run, policy);
          const std::string where = mesh + " at stage " + std::to_string(stage) + (whole ? ", whole" : "");
          for (std::size_t step = 0; step < wanted.size(); ++step) {
            EXPECT_TRUE(noise[step].measured) << where;
            EXPECT_EQ(noise[step].variance, wanted[step].variance) << where;
            EXPECT_EQ(noise[step].squares, wanted[step].squares) << where;
            EXPECT_EQ(noise[step].scale, wanted[step].scale) << where;
          }
        }
      }
    }
  }
}

void expect_traffic_by_formula(const std::string& optimizer) {
  int point = 0;
  for (const auto& [ranks, mesh] : meshes) {
    for (int stage = 0; stage <= 3; ++stage) {
      if (!swept(point++, 5)) continue;
      const auto measures = [&, &mesh = mesh](Config& config) {
        config.gradient_noise_scale = may_measure_noise(mesh) && stage != 1;
        // In these cases the gradients of one data rank's micro-batches are measured separately.
        const bool each = stage != 2 || mesh == "tensor=2" || mesh == "tensor=4";
        if (config.gradient_noise_scale) {
          config.reduction = each ? ReductionPolicy::micro_batch : ReductionPolicy::boundary;
        }
      };
      const auto check = [&, &ranks = ranks, &mesh = mesh](Engine& engine, Runtime& runtime) {
        for (int step = 0; step < 2; ++step) {
          cut_step(engine, runtime, step);
          (void)engine.step();
        }
        bool found = false;
        const auto report = nlohmann::json::parse(engine.traffic_report());
        for (const auto& each : report["by_axis"]) {
          EXPECT_EQ(each["elements"], each["formula_elements"]) << mesh << " stage " << stage << " " << each;
          EXPECT_EQ(each["bytes"], each["formula_bytes"]) << mesh << " stage " << stage << " " << each;
          found = found || each["axis"] == "tensor";
        }
        EXPECT_EQ(found, runtime.tensor() != nullptr) << mesh << " of " << ranks;
      };
      on_cut_ranks({ranks, mesh, stage, optimizer}, check, measures);
    }
  }
}

TEST(TensorAxis, TrafficOfWholeTensorsIsTheFormulaOfItsAxis) {
  expect_traffic_by_formula("AdamW");
}

TEST(TensorAxis, TrafficOfWholeMatricesIsTheFormulaOfItsAxis) {
  expect_traffic_by_formula("Muon");
}

/// Values of drawn magnitudes, whose sums and sums of squares are not exact in any order.
std::vector<float> drawn_gradient(const std::string& name, std::int64_t elements) {
  const RandomKey key{.seed = std::hash<std::string>()(name)};
  std::vector<float> values;
  for (std::int64_t i = 0; i < elements; ++i) {
    const auto counter = static_cast<std::uint64_t>(3 * i);
    const float size = std::exp2(static_cast<float>(random_bits(key, counter) % 24) - 18);
    values.push_back((random_uniform(key, counter + 1) - 0.5f) * size);
  }
  return values;
}

/// A layout of at most eight ranks with its axes in any order.
CutRun draw_layout(std::uint64_t number) {
  const RandomKey key{97, RandomPurpose::test, 14};
  std::uint64_t counter = number * 64;
  const auto pick = [&](std::size_t n) -> std::size_t { return random_bits(key, counter++) % n; };
  int sizes[mesh_axes] = {}, ranks = 1;
  do {
    sizes[0] = ranks = 1 << (number == 0 ? 0 : pick(3));
    for (int axis = 1; axis < mesh_axes; ++axis) ranks *= sizes[axis] = 1 << pick(2);
  } while (ranks > 8);
  const char* const names[] = {"tensor=", "shard=", "replicate=", "pipeline=", "context="};
  std::vector<std::string> axes;
  for (int axis = 0; axis < mesh_axes; ++axis) {
    axes.insert(axes.begin() + static_cast<std::ptrdiff_t>(pick(axes.size() + 1)),
                names[axis] + std::to_string(sizes[axis]));
  }
  CutRun run{ranks, axes[0] + ", " + axes[1] + ", " + axes[2] + ", " + axes[3] + ", " + axes[4],
             static_cast<int>(pick(4))};
  if (pick(3) == 0) run.offload.optimizer = OffloadTier::cpu;
  run.clipping = 0.5;
  return run;
}

// Sliced, shared, whole, tied and frozen tensors: each element must count once, and the sum must be exact.
TEST(TensorAxis, OneNormOnDrawnLayouts) {
  const auto outcome = [](const CutRun& run, std::size_t bucket) {
    StepResult result;
    kernels::Digest digest;
    std::mutex mutex;
    on_cut_ranks(
        run,
        [&](Engine& engine, Runtime& runtime) {
          cut_step(engine, runtime, 0);
          for (const UnitSpec& unit : engine.model().units()) {
            for (const TensorSpec& tensor : unit.tensors) {
              if (engine.frozen(tensor.name)) continue;
              engine.write_gradient(tensor.name, drawn_gradient(tensor.name, tensor.shape.elements()));
            }
          }
          const StepResult mine = engine.step();
          const kernels::Digest state = engine.state_digest();
          const std::lock_guard lock(mutex);
          if (runtime.rank() == 0) result = mine, digest = state;
        },
        [&](Config& config) {
          config.frozen = {"projection.bias", "up"};
          config.reduce_bucket_elements = static_cast<std::int64_t>(bucket);
        });
    return std::tuple(result.gradient_norm, result.clip_coefficient, digest);
  };
  const auto expected = outcome({.clipping = 0.5}, 1'000'000);
  EXPECT_GT(std::get<0>(expected), 0.5) << "it is clipped";
  const Sweep cases = sweep({0, 20});
  AxesMet axes;
  for (std::uint64_t number = cases.first; number < cases.end(); ++number) {
    const CutRun run = draw_layout(number);
    axes.meet("parts", Mesh::parse(run.mesh, run.ranks).size(MeshAxis::tensor));
    axes.meet("stages", Mesh::parse(run.mesh, run.ranks).size(MeshAxis::pipeline));
    axes.meet("shards", Mesh::parse(run.mesh, run.ranks).size(MeshAxis::shard));
    axes.meet("replicas", Mesh::parse(run.mesh, run.ranks).size(MeshAxis::replicate));
    axes.meet("contexts", Mesh::parse(run.mesh, run.ranks).size(MeshAxis::context));
    axes.meet("stage", run.stage);
  }
  axes.expect("parts", {1, 2, 4});
  for (const char* axis : {"stages", "shards", "replicas", "contexts"}) axes.expect(axis, {1, 2});
  axes.expect("stage", {0, 1, 2, 3});
  for (const std::uint64_t number : rounds(cases)) {
    const CutRun run = draw_layout(number);
    EXPECT_TRUE(outcome(run, number % 2 == 0 ? 40 : 1'000'000) == expected)
        << "draw " << number << ": " << run.mesh << " at stage " << run.stage;
  }
}

/// The error of all ranks after `write` has changed weights on some of them.
std::string told_of_copies(const CutRun& run, const std::function<void(Engine&, Runtime&)>& write) {
  std::vector<std::string> told(static_cast<std::size_t>(run.ranks));
  on_cut_ranks(run, [&](Engine& engine, Runtime& runtime) {
    write(engine, runtime);
    told[static_cast<std::size_t>(runtime.rank())] =
        message_of<CommunicationError>([&] { (void)engine.weights_digest(); });
  });
  EXPECT_THAT(told, ::testing::Each(told[0])) << run.mesh;
  return told[0];
}

TEST(TensorAxis, TheRankWhoseCopyDiffersIsNamed) {
  // Each rank writes different values, although all must hold the same.
  const auto writes = [](const char* tensor, int first) {
    return [tensor, first](Engine& engine, Runtime& runtime) {
      std::vector<float> values = engine.read_weight(tensor);
      if (runtime.rank() >= first) values.back() += 1;
      engine.write_weight(tensor, values);
    };
  };
  for (const int stage : {0, 1, 3}) {
    EXPECT_THAT(told_of_copies({2, "tensor=2", stage}, writes("norm", 1)),
                HasSubstr("replicas differ: rank 1 holds other weights than rank 0"))
        << stage;
    // Two heads of keys and values on four ranks: ranks 2 and 3 share the second.
    EXPECT_THAT(told_of_copies({4, "tensor=4", stage}, writes("key", 3)),
                HasSubstr("replicas differ: rank 3 holds other weights than rank 2"))
        << stage;
    EXPECT_THAT(told_of_copies({8, "replicate=2, tensor=4", stage}, writes("key", 7)),
                HasSubstr("replicas differ: rank 7 (replicate 1, tensor 3) holds other weights than rank "))
        << stage;
  }
  // Slices of different ranks differ as they should.
  on_cut_ranks({4, "tensor=4"}, [&](Engine& engine, Runtime&) { (void)engine.weights_digest(); });
}

using TensorAxisSaving = Saving;

TEST_F(TensorAxisSaving, AnyMeshGoesOnFromAnyOther) {
  const Outcome expected = train({}, 4);
  const std::vector<std::pair<int, std::string>> pairs = {{1, ""},
                                                          {2, "tensor=2"},
                                                          {4, "shard=2, tensor=2"},
                                                          {4, "tensor=4"},
                                                          {4, "replicate=2, tensor=2"},
                                                          {2, "context=2"},
                                                          {4, "context=2, tensor=2"}};
  int folder = 0;
  for (std::size_t a = 0; a < pairs.size(); ++a) {
    const std::string to = path(std::to_string(folder++));
    const int stage = static_cast<int>(a) % 4;
    const Outcome saved = train({pairs[a].first, pairs[a].second, stage}, 2, {}, to);
    for (std::size_t b = 0; b < pairs.size(); ++b) {
      if (!swept(static_cast<int>(pairs.size() * a + b), 5)) continue;
      const std::string where = pairs[a].second + " to " + pairs[b].second;
      const CutRun run{pairs[b].first, pairs[b].second, (stage + static_cast<int>(b)) % 4};
      const Outcome loaded = train(run, 4, to);
      EXPECT_EQ(loaded.initial, saved.state) << where;
      EXPECT_EQ(loaded.state, expected.state) << where;
    }
  }
}

TEST_F(TensorAxisSaving, MatricesGoOnOnAnyOtherMesh) {
  const Outcome expected = train(muon(1, ""), 4);
  const std::vector<std::pair<int, std::string>> pairs = {{1, ""}, {4, "shard=2, tensor=2"}, {4, "tensor=4"}};
  for (std::size_t a = 0; a < pairs.size(); ++a) {
    const auto& [from_ranks, from_mesh] = pairs[a];
    const auto& [to_ranks, to_mesh] = pairs[(a + 1) % pairs.size()];
    const Outcome saved = train(muon(from_ranks, from_mesh, static_cast<int>(a)), 2, {}, path(from_mesh));
    const Outcome loaded = train(muon(to_ranks, to_mesh, 3 - static_cast<int>(a)), 4, path(from_mesh));
    EXPECT_EQ(loaded.initial, saved.state) << from_mesh << " to " << to_mesh;
    EXPECT_EQ(loaded.state, expected.state) << from_mesh << " to " << to_mesh;
  }
}

TEST_F(TensorAxisSaving, ANoteSaysThatOtherPartsRoundDifferently) {
  on_cut_ranks({2, "shard=2"}, [&](Engine& engine, Runtime&) { engine.save(path(), {.wait = true}); });
  for (const auto& [ranks, mesh, told] :
       {std::tuple(2, "shard=2", ""),
        std::tuple(2, "context=2",
                   "saved by 2 ranks, loaded by 2 (context=2): state is equal to the bit, sums over ranks "
                   "round differently from here on"),
        std::tuple(2, "tensor=2",
                   "saved by 2 ranks, loaded by 2 (tensor=2): state is equal to the bit, sums over ranks "
                   "round differently from here on"),
        std::tuple(4, "shard=2, context=2",
                   "saved by 2 ranks, loaded by 4 (shard=2, context=2): state is equal to the bit, sums over "
                   "ranks round differently from here on")}) {
    on_cut_ranks({ranks, mesh}, [&, told = told](Engine& engine, Runtime&) {
      const LoadResult result = engine.load(path());
      if (*told != 0) {
        EXPECT_THAT(result.notes, ElementsAre(told));
      } else {
        EXPECT_THAT(result.notes, IsEmpty());
      }
    });
  }
}

TEST_F(TensorAxisSaving, NotesSayWhatAnotherSizeOfTheAxisChanges) {
  ModelSpec model;
  model.chain_sums = true;
  model.tensor_dimensions = {"inner"};
  model.add_unit(
      {"u", {{.name = "w", .shape = {4, 8}, .initializer = {}, .dimensions = {{"width"}, {"inner"}}}}, 1});
  const auto notes_of = [&](const CutRun& run, const std::function<void(Config&)>& adjust) {
    std::vector<std::string> notes;
    std::mutex mutex;
    std::filesystem::remove_all(path());
    on_cut_ranks(
        {1}, [&](Engine& engine, Runtime&) { engine.save(path(), {.wait = true}); }, adjust, model);
    on_cut_ranks(
        run,
        [&](Engine& engine, Runtime& runtime) {
          const LoadResult result = engine.load(path());
          const std::lock_guard lock(mutex);
          if (runtime.rank() == 0) notes = result.notes;
        },
        adjust, model);
    return notes;
  };
  const auto invariant = [](Config& config) {
    config.world_size_invariant = true;
    config.accumulation_steps = 0;
  };
  EXPECT_THAT(
      notes_of({2, "tensor=2"}, invariant),
      ElementsAre("saved by tensor=1, loaded by tensor=2: with tranche.world_size_invariant the number "
                  "of data ranks changes no bit, but sums over the ranks of tensor round differently "
                  "from here on"));
  EXPECT_THAT(notes_of({2, "shard=2"}, invariant), IsEmpty());
  EXPECT_THAT(notes_of({2, "tensor=2"}, {}),
              ElementsAre(HasSubstr("state is equal to the bit, sums over ranks round differently")));
  for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
    if (!kernels::matmul_sum_order(DeviceKind::cpu, dtype).ascending) continue;
    const auto chain = [dtype](Config& config) {
      config.tensor_sums = TensorSums::chain;
      config.precision.compute = config.precision.communication = dtype;
    };
    EXPECT_THAT(notes_of({2, "tensor=2"}, chain),
                ElementsAre(HasSubstr("state is equal to the bit, and sums over the axis tensor are chains, "
                                      "which have one rank's bits")));
    EXPECT_THAT(notes_of({2, "tensor=2"},
                         [&](Config& config) {
                           chain(config);
                           invariant(config);
                         }),
                IsEmpty());
  }
}

}  // namespace
}  // namespace tranche::test
