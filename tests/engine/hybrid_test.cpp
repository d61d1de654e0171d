// Hybrid sharding: replicas of a model, each sharded over some of the ranks.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <optional>
#include <random>
#include <tuple>
#include <type_traits>
#include <utility>

#include "checkpoint/reader.h"
#include "on_ranks.h"
#include "same_bits.h"
#include "tests/core/rounds.h"
#include "tests/offload/test_folder.h"

namespace tranche::test {
namespace {

using ::testing::HasSubstr;

/// The shard sizes of all meshes (replicate, shard) of `ranks` with more than one replica.
std::vector<int> shard_sizes(int ranks) {
  std::vector<int> sizes;
  for (int shards = 1; shards < ranks; ++shards) {
    if (ranks % shards == 0) sizes.push_back(shards);
  }
  return sizes;
}

std::string hybrid(int shards) {
  return "replicate=*, shard=" + std::to_string(shards);
}

class Meshes : public ::testing::TestWithParam<int> {};

TEST_P(Meshes, HaveTheBitsOfOneShardedModel) {
  int point = 0;
  for (const int shards : shard_sizes(GetParam())) {
    for (const ReductionPolicy policy : {ReductionPolicy::boundary, ReductionPolicy::micro_batch}) {
      OddRun run;
      run.ranks = GetParam();
      run.dtype = shards % 2 == 0 ? DataType::bfloat16 : DataType::float32;
      run.accumulation_dtype = shards == 2 ? DataType::bfloat16 : DataType::float32;
      run.accumulation = 3;
      run.steps = 3;
      run.policy = policy;
      run.reduction_group = shards;
      run.clipping = 0.1;
      const OddResult expected = train_odd(run);
      run.mesh = hybrid(shards);
      for (run.stage = 0; run.stage <= 3; ++run.stage) {
        if (!sampled(point++, 3)) continue;
        const OddResult result = train_odd(run);
        expect_same(expected, result, run);
        EXPECT_EQ(result.wire_elements, result.formula_elements) << run.to_string();
        EXPECT_EQ(result.wire_bytes, result.formula_bytes) << run.to_string();
      }
    }
  }
}

// The replicas share gradients and optimizer state, so the parts of a shard are those of plain ZeRO over all
// ranks.
TEST_P(Meshes, HaveTheBitsOfOneShardedModelWithStateOverAllRanks) {
  int point = 0;
  for (const int shards : shard_sizes(GetParam())) {
    for (const ReductionPolicy policy : {ReductionPolicy::boundary, ReductionPolicy::micro_batch}) {
      OddRun run;
      run.ranks = GetParam();
      run.dtype = shards % 2 == 0 ? DataType::float32 : DataType::bfloat16;
      run.accumulation_dtype = shards == 2 ? DataType::bfloat16 : DataType::float32;
      run.accumulation = 2;
      run.steps = 3;
      run.policy = policy;
      run.reduction_group = shards;
      run.clipping = 0.1;
      run.stage = 3;
      const OddResult expected = train_odd(run);
      run.mesh = hybrid(shards);
      run.replicate = Replicate::parameters;
      for (run.stage = 1; run.stage <= 3; ++run.stage) {
        if (!sampled(point++, 2)) continue;
        const OddResult result = train_odd(run);
        expect_same(expected, result, run);
        EXPECT_EQ(result.wire_elements, result.formula_elements) << run.to_string();
        EXPECT_EQ(result.wire_bytes, result.formula_bytes) << run.to_string();
        for (std::size_t r = 0; r < static_cast<std::size_t>(run.ranks); ++r) {
          EXPECT_EQ(result.state_bytes[r].optimizer, expected.state_bytes[r].optimizer) << run.to_string();
        }
      }
    }
  }
}

// Sums over replicas once a step have other bits than sums in each micro-batch, but the same at every stage.
TEST_P(Meshes, MayAddUpTheReplicasOnceAStep) {
  int point = 0;
  for (const int shards : shard_sizes(GetParam())) {
    OddRun run;
    run.ranks = GetParam();
    run.dtype = DataType::bfloat16;
    run.accumulation = 3;
    run.policy = ReductionPolicy::micro_batch;
    run.mesh = hybrid(shards);
    run.replica_sum = ReplicaSum::step;
    run.stage = 1;
    const OddResult expected = train_odd(run);
    for (const Replicate replicate : {Replicate::all, Replicate::parameters}) {
      run.replicate = replicate;
      for (run.stage = replicate == Replicate::all ? 0 : 1; run.stage <= 3; ++run.stage) {
        if (!sampled(point++, 3)) continue;
        const OddResult result = train_odd(run);
        expect_same(expected, result, run);
        EXPECT_EQ(result.wire_elements, result.formula_elements) << run.to_string();
        EXPECT_EQ(result.wire_bytes, result.formula_bytes) << run.to_string();
      }
    }
    // With one micro-batch a step there is no difference.
    run.accumulation = 1;
    run.stage = 3;
    const OddResult once = train_odd(run);
    run.replica_sum = ReplicaSum::micro_batch;
    expect_same(train_odd(run), once, run);
  }
}

TEST_P(Meshes, ArePlannedToTheByte) {
  int point = 0;
  for (const int shards : shard_sizes(GetParam())) {
    OddRun run;
    run.ranks = GetParam();
    run.dtype = DataType::bfloat16;
    run.accumulation = 2;
    run.steps = 3;
    run.mesh = hybrid(shards);
    for (const Replicate replicate : {Replicate::all, Replicate::parameters}) {
      for (const ReplicaSum sum : {ReplicaSum::micro_batch, ReplicaSum::step}) {
        run.replicate = replicate;
        run.replica_sum = sum;
        run.stage = sum == ReplicaSum::step ? 3 : replicate == Replicate::all ? 0 : 1;
        for (; run.stage <= 3; ++run.stage) {
          if (!sampled(point++, 5)) continue;
          run.device = DeviceKind::cpu;
          const OddResult real = train_odd(run);
          run.device = DeviceKind::meta;
          const OddResult planned = train_odd(run);
          EXPECT_EQ(planned.accounts[0].peak, real.accounts[0].peak) << run.to_string();
          const Engine::StateBytes& state = real.state_bytes[0];
          const TierAccount& account = real.accounts[0];
          EXPECT_EQ(account.persistent[Category::parameters], state.parameters) << run.to_string();
          EXPECT_EQ(account.persistent[Category::gradients], state.gradients) << run.to_string();
          EXPECT_EQ(account.persistent[Category::optimizer], state.optimizer) << run.to_string();
          EXPECT_EQ(planned.wire_elements[0], real.wire_elements[0]) << run.to_string();
          EXPECT_EQ(planned.wire_bytes[0], real.wire_bytes[0]) << run.to_string();
          EXPECT_EQ(planned.formula_elements[0], real.formula_elements[0]) << run.to_string();
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, Meshes, ::testing::ValuesIn(swept_values({2, 3, 4, 5, 6, 7, 8}, {3, 6})),
                         ::testing::PrintToStringParamName());

TEST(Hybrid, TheOrderOfTheAxesIsTheUsers) {
  OddRun run;
  run.ranks = 6;
  run.stage = 3;
  run.mesh = "shard=3, replicate=2";
  const OddResult strided = train_odd(run);
  EXPECT_EQ(strided.wire_elements, strided.formula_elements);
  run.stage = 1;
  run.policy = ReductionPolicy::micro_batch;
  const OddResult first = train_odd(run);
  EXPECT_EQ(first.state.lanes[0], strided.state.lanes[0]) << "stages of a mesh and policy have equal bits";
}

TEST(Hybrid, OffloadedStateHasTheSameBits) {
  const testing::TestFolder folder;
  OddRun run;
  run.ranks = 4;
  run.dtype = DataType::bfloat16;
  run.mesh = hybrid(2);
  int point = 0;
  for (const Replicate replicate : {Replicate::all, Replicate::parameters}) {
    run.replicate = replicate;
    for (run.stage = 1; run.stage <= 3; ++run.stage) {
      for (const std::int64_t accumulation : {2, 1}) {  // with one, gradients need memory during the step
                                                        // only
        if (!swept(point++, 5)) continue;
        run.accumulation = accumulation;
        run.offload = {};
        const OddResult expected = train_odd(run);
        for (const OffloadTier tier : {OffloadTier::cpu, OffloadTier::nvme}) {
          run.offload.optimizer = tier;
          run.offload.nvme_path = folder.path();
          run.offload.ratio = run.stage == 2 ? 0.5 : 1;
          expect_same(expected, train_odd(run), run);
        }
      }
    }
  }
  run.replicate = Replicate::all;
  run.stage = 3;
  run.accumulation = 1;
  run.offload = {};
  const OddResult expected = train_odd(run);
  for (const OffloadTier tier : {OffloadTier::cpu, OffloadTier::nvme}) {
    run.offload.optimizer = run.offload.parameters = tier;
    run.offload.nvme_path = folder.path();
    expect_same(expected, train_odd(run), run);
  }
}

// Reads, writes and hooks of single tensors have the same values and skips for every partition of the state.
TEST(Hybrid, TensorsGradientsHookAndSkipsAreThoseOfOneShardedModel) {
  struct Seen {
    std::vector<float> gradient, state, weight;
    std::vector<bool> applied;
  };
  std::vector<Seen> all;
  for (const auto& [mesh, replicate] :
       {std::pair(std::string(), Replicate::all), std::pair(hybrid(2), Replicate::all),
        std::pair(hybrid(2), Replicate::parameters)}) {
    OddRun run;
    run.ranks = 4;
    run.stage = 3;
    run.dtype = DataType::float16;
    run.reduction_group = 2;
    run.accumulation = 2;
    run.policy = ReductionPolicy::micro_batch;
    run.mesh = mesh;
    run.replicate = replicate;
    Seen& seen = all.emplace_back();
    on_ranks(run, [&](Engine& engine, Runtime& runtime) {
      Seen mine;
      int asked = 0;
      engine.set_gradient_hook([&](const StepResult&) -> std::string {
        mine.gradient = engine.read_gradient("mixed.g");
        std::vector<float> halved = engine.read_gradient("prime.c");
        for (float& value : halved) value /= 2;
        engine.write_gradient("prime.c", halved);
        return ++asked == 2 ? "enough" : "";
      });
      for (int step = 0; step < 4; ++step) {
        whole_step(engine, runtime, step, step == 2 ? "prime.c" : "");
        mine.applied.push_back(engine.step().applied);
      }
      mine.state = engine.read_optimizer_state("tied.b", "exp_avg");
      mine.weight = engine.read_weight("mixed.g");
      const std::vector<float> frozen = engine.read_weight(odd_frozen_tensor);
      mine.weight.insert(mine.weight.end(), frozen.begin(), frozen.end());
      std::vector<float> values(mine.weight.size() - frozen.size(), 0.25f);
      engine.write_weight("mixed.g", values);
      EXPECT_EQ(engine.read_weight("mixed.g"), values);
      (void)engine.state_digest();  // throws if replicas differ
      if (runtime.rank() == 0) seen = mine;
    });
    EXPECT_EQ(seen.applied, (std::vector<bool>{true, false, false, true}));
    EXPECT_EQ(seen.gradient, all[0].gradient) << mesh;
    EXPECT_EQ(seen.state, all[0].state) << mesh;
    EXPECT_EQ(seen.weight, all[0].weight) << mesh;
  }
}

/// One of many combinations of mesh, stage, policy, dtype and tier.
OddRun drawn_run(std::mt19937& draw, const std::string& nvme_folder) {
  const auto one_of = [&draw](auto... values) {
    const std::common_type_t<decltype(values)...> list[] = {values...};
    return list[draw() % sizeof...(values)];
  };
  OddRun run;
  run.ranks = one_of(2, 3, 4, 6, 8);
  const std::vector<int> shards = shard_sizes(run.ranks);
  const std::size_t which = draw() % (shards.size() + 1);
  if (which < shards.size()) run.mesh = hybrid(shards[which]);
  run.stage = one_of(0, 1, 2, 3);
  run.policy = one_of(ReductionPolicy::boundary, ReductionPolicy::micro_batch);
  if (run.stage > 0) run.replicate = one_of(Replicate::all, Replicate::parameters);
  run.replica_sum = one_of(ReplicaSum::micro_batch, ReplicaSum::step);
  run.dtype = one_of(DataType::float32, DataType::bfloat16);
  if (run.replica_sum == ReplicaSum::micro_batch) {
    run.accumulation_dtype = one_of(DataType::float32, DataType::bfloat16);
  }
  run.accumulation = one_of(1, 2);
  run.gather_for = one_of(GatherFor::use, GatherFor::step);
  run.persistent = one_of(0, 300);
  run.steps = 3;
  run.offload.optimizer = one_of(OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme);
  run.offload.ratio = one_of(0.5, 1.0);
  if (run.stage == 3 && run.replicate == Replicate::all) {
    run.offload.parameters = one_of(OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme);
  }
  run.offload.nvme_path = nvme_folder;
  run.offload.tile_elements = 4096;
  return run;
}

TEST(Hybrid, DrawnConfigurationsArePlannedToTheByte) {
  const testing::TestFolder folder;
  std::mt19937 draw(21);
  for (int i = 0; i < 60; ++i) {
    OddRun run = drawn_run(draw, folder.path());
    if (!swept(i, 5)) continue;
    const OddResult real = train_odd(run);
    run.device = DeviceKind::meta;
    const OddResult planned = train_odd(run);
    for (const auto accounts : {&OddResult::accounts, &OddResult::host_accounts, &OddResult::nvme_accounts}) {
      const TierAccount &is = (real.*accounts)[0], &was = (planned.*accounts)[0];
      EXPECT_EQ(was.peak, is.peak) << run.to_string();
      for (const Category category : all_categories) {
        EXPECT_EQ(was.category_peak[category], is.category_peak[category])
            << name_of(category) << " " << run.to_string();
        EXPECT_EQ(was.persistent[category], is.persistent[category])
            << name_of(category) << " " << run.to_string();
      }
    }
    const Engine::StateBytes& state = real.state_bytes[0];
    const Engine::StateBytes::OnTier& on_device = state.tiers[static_cast<std::size_t>(Tier::device)];
    const Engine::StateBytes::OnTier& on_host = state.tiers[static_cast<std::size_t>(Tier::host)];
    EXPECT_EQ(real.accounts[0].persistent[Category::optimizer], on_device.optimizer) << run.to_string();
    EXPECT_EQ(real.accounts[0].persistent[Category::gradients], on_device.gradients) << run.to_string();
    EXPECT_EQ(real.host_accounts[0].persistent[Category::gradients], on_host.gradients) << run.to_string();
    EXPECT_EQ(planned.wire_elements[0], real.wire_elements[0]) << run.to_string();
    EXPECT_EQ(planned.wire_bytes[0], real.wire_bytes[0]) << run.to_string();
    EXPECT_EQ(real.wire_elements, real.formula_elements) << run.to_string();
    EXPECT_EQ(real.wire_bytes, real.formula_bytes) << run.to_string();
    EXPECT_EQ(planned.steps.back().offload_traffic.nvme_written,
              real.steps.back().offload_traffic.nvme_written)
        << run.to_string();
  }
}

TEST(Hybrid, BucketsOverlapDelaysAndNodesChangeNoBit) {
  int point = 0;
  for (const Replicate replicate : {Replicate::all, Replicate::parameters}) {
    for (const ReplicaSum sum : {ReplicaSum::micro_batch, ReplicaSum::step}) {
      for (const int stage : {2, 3}) {
        OddRun plain;
        plain.ranks = 6;
        plain.stage = stage;
        plain.dtype = DataType::bfloat16;
        plain.accumulation = 2;
        plain.mesh = hybrid(2);
        plain.replicate = replicate;
        plain.replica_sum = sum;
        const OddResult expected = train_odd(plain);
        std::vector<OddRun> runs(8, plain);
        runs[0].overlap = false;
        runs[1].reduce_bucket = runs[1].gather_bucket = 600;
        runs[2].depth = 3;
        runs[2].poison = true;
        runs[3].faults = {0.0005, 3};
        runs[4].plan_memory = false;
        runs[4].faults = {0.0005, 4};
        runs[5].ranks_per_host = 2;
        runs[6].gather_for = GatherFor::step;
        runs[7].persistent = 300;
        for (const OddRun& run : runs) {
          if (!swept(point++, 7)) continue;
          const OddResult result = train_odd(run);
          expect_same(expected, result, run);
          EXPECT_EQ(result.wire_elements, result.formula_elements) << run.to_string();
          EXPECT_EQ(result.wire_bytes, result.formula_bytes) << run.to_string();
        }
      }
    }
  }
}

// Evaluation, inference, a step in which no unit is gathered, and background saves.
TEST(Hybrid, WhatGoesOnBetweenStepsChangesNoBit) {
  const testing::TestFolder folder;
  std::optional<kernels::Digest> expected;
  int point = 0;
  for (const auto& [mesh, replicate] :
       {std::pair(std::string(), Replicate::all), std::pair(hybrid(2), Replicate::all),
        std::pair(hybrid(2), Replicate::parameters)}) {
    for (const OffloadTier tier : {OffloadTier::none, OffloadTier::nvme}) {
      OddRun run;
      run.ranks = 4;
      run.reduction_group = 2;
      run.policy = ReductionPolicy::micro_batch;
      run.mesh = mesh;
      run.replicate = replicate;
      run.offload.optimizer = tier;
      run.offload.nvme_path = folder.path();
      for (run.stage = 1; run.stage <= 3; ++run.stage) {
        if (!swept(point++, 5) && expected) continue;
        const std::string saves = folder.path() + "/" + std::to_string(run.stage) + mesh.substr(0, 2) +
                                  std::to_string(static_cast<int>(replicate) * 3 + static_cast<int>(tier));
        on_ranks(run, [&](Engine& engine, Runtime& runtime) {
          kernels::Digest saved;
          for (int step = 0; step < 4; ++step) {
            whole_step(engine, runtime, step);
            EXPECT_TRUE(engine.step().applied);
            engine.begin_evaluation();
            engine.begin_micro_batch();
            for (int unit = 0; unit < 4; ++unit) static_cast<void>(engine.gather({unit}));
            end_with(engine, 1, 1);
            EXPECT_EQ(engine.end_evaluation().tokens, 4);
            {
              const InferenceScope scope(engine);
              static_cast<void>(engine.gather({3}));
            }
            if (step == 1) {
              saved = engine.state_digest();
              (void)engine.save(saves);
            }
            if (step != 2) continue;
            engine.begin_micro_batch();
            for (int unit = 0; unit < 4; ++unit) engine.skip_gradients({unit});
            end_with(engine, 0, 1);
            EXPECT_TRUE(engine.step().applied);
          }
          (void)engine.finish_saving();
          const kernels::Digest digest = engine.state_digest();
          if (runtime.rank() == 0 && !expected) expected = digest;
          runtime.all().barrier({"test", "digest", Traffic::control}).wait();
          EXPECT_EQ(digest, *expected) << run.to_string();
          EXPECT_EQ(engine.load(saves).step, 2);
          EXPECT_EQ(engine.state_digest(), saved) << run.to_string();
        });
      }
    }
  }
}

TEST(Hybrid, ANormCountsEachElementOnce) {
  double norms[2];
  for (const bool replicas : {false, true}) {
    OddRun run;
    run.ranks = 4;
    run.reduction_group = 2;
    if (replicas) run.mesh = hybrid(2);
    on_ranks(run, [&](Engine& engine, Runtime& runtime) {
      whole_step(engine, runtime, 0);
      const StepResult result = engine.step();
      if (runtime.rank() == 0) norms[replicas ? 1 : 0] = result.gradient_norm;
    });
  }
  EXPECT_EQ(norms[0], norms[1]);
}

TEST(Hybrid, CheckpointsGoFromMeshToMesh) {
  int point = 0;
  for (const Replicate from : {Replicate::all, Replicate::parameters}) {
    const testing::TestFolder folder;
    OddRun run;
    run.ranks = 6;
    run.stage = 3;
    run.mesh = from == Replicate::all ? "shard=3, replicate=2" : hybrid(3);
    run.replicate = from;
    std::string path;
    kernels::Digest saved;
    on_ranks(run, [&](Engine& engine, Runtime& runtime) {
      whole_step(engine, runtime, 0);
      (void)engine.step();
      const std::string written = engine.save(folder.path());
      const kernels::Digest digest = engine.state_digest();
      if (runtime.rank() == 0) path = written, saved = digest;
    });
    for (const auto& [ranks, mesh, replicate] :
         {std::tuple(6, hybrid(3), Replicate::all), std::tuple(6, hybrid(1), Replicate::parameters),
          std::tuple(6, hybrid(2), Replicate::parameters), std::tuple(4, hybrid(2), Replicate::all),
          std::tuple(3, std::string(), Replicate::all), std::tuple(1, std::string(), Replicate::all)}) {
      run.ranks = ranks;
      run.mesh = mesh;
      run.replicate = replicate;
      for (const int stage : {1, 2, 3}) {
        if (!swept(point++, 5)) continue;
        run.stage = stage;
        on_ranks(run, [&](Engine& engine, Runtime& runtime) {
          EXPECT_EQ(engine.load(path).step, 1);
          EXPECT_EQ(engine.state_digest(), saved) << run.to_string();
          whole_step(engine, runtime, 1);  // also allocates the weights that models read
          EXPECT_TRUE(engine.step().applied);
        });
      }
    }
  }
}

/// Pairs of ranks and mesh; the user chooses the order of the axes.
const std::vector<std::pair<int, std::string>> twelve_meshes = {{1, ""},
                                                                {2, ""},
                                                                {2, hybrid(1)},
                                                                {3, ""},
                                                                {4, ""},
                                                                {4, hybrid(2)},
                                                                {4, "shard=2, replicate=2"},
                                                                {5, hybrid(1)},
                                                                {6, hybrid(3)},
                                                                {6, "shard=2, replicate=3"},
                                                                {8, hybrid(4)},
                                                                {8, ""}};

TEST(Hybrid, TwelveMeshesReadEachOthersCheckpoints) {
  const testing::TestFolder folder;
  int stage = 0;
  const auto replicate = [](const OddRun& run) {
    return !run.mesh.empty() && run.stage % 2 == 1 ? Replicate::parameters : Replicate::all;
  };
  for (std::size_t from = 0; from < twelve_meshes.size(); ++from) {
    OddRun run;
    std::tie(run.ranks, run.mesh) = twelve_meshes[from];
    run.stage = stage++ % 4;
    run.replicate = replicate(run);
    std::string path;
    kernels::Digest saved, weights;
    on_ranks(run, [&](Engine& engine, Runtime& runtime) {
      whole_step(engine, runtime, 0);
      (void)engine.step();
      const std::string written = engine.save(folder / std::to_string(from), {.wait = true});
      const kernels::Digest digest = engine.state_digest(), of_weights = engine.weights_digest();
      if (runtime.rank() == 0) path = written, saved = digest, weights = of_weights;
    });
    for (int rank = 0; rank < run.ranks; ++rank) {
      EXPECT_GT(std::filesystem::file_size(path + "/" + checkpoint::shard_name(rank, run.ranks)), 4096u);
    }
    for (std::size_t to = 0; to < twelve_meshes.size(); ++to) {
      if (to == from || !swept(static_cast<int>(12 * from + to), 11)) continue;
      std::tie(run.ranks, run.mesh) = twelve_meshes[to];
      run.stage = stage++ % 4;
      run.replicate = replicate(run);
      on_ranks(run, [&](Engine& engine, Runtime&) {
        EXPECT_EQ(engine.load(path).step, 1);
        EXPECT_EQ(engine.state_digest(), saved) << from << " to " << run.to_string();
        EXPECT_EQ(engine.weights_digest(), weights) << from << " to " << run.to_string();
      });
    }
  }
}

/// A checkpoint of the first format version, written by three ranks.
TEST(Hybrid, TheFirstFormatIsLoadedOnAnyMesh) {
  const std::string folder = TRANCHE_FIXTURES "/version-1";
  const checkpoint::LocalStorage local;
  std::vector<std::string> notes;
  const std::string path = checkpoint::newest_checkpoint(detail::posix_file_system(), folder, notes).path;
  checkpoint::Reader reader(local, path);
  ModelSpec model;
  std::vector<std::string> frozen;
  for (const checkpoint::UnitRecord& unit : reader.layout().units) {
    UnitSpec spec{unit.name, {}, unit.uses_per_micro_batch};
    for (const checkpoint::TensorRecord& tensor : unit.tensors) {
      spec.tensors.push_back({tensor.name, tensor.shape, Initializer::zeros(), tensor.aliases});
      if (tensor.frozen) frozen.push_back(tensor.name);
    }
    model.add_unit(std::move(spec));
  }
  std::vector<kernels::Digest> digests;
  for (const auto& [ranks, mesh] :
       {std::pair(1, std::string()), std::pair(4, hybrid(2)), std::pair(3, hybrid(1)),
        std::pair(6, std::string("shard=3, replicate=2"))}) {
    OddRun run;
    run.ranks = ranks;
    run.mesh = mesh;
    run.stage = ranks % 4;
    run_thread_ranks(ranks, [&](int rank, const CommunicatorFactory& factory) {
      Config config = odd_config(run);
      config.frozen = frozen;
      RuntimeOptions options = RuntimeOptions::from(config);
      options.log_level = LogLevel::off;
      Runtime runtime(options, factory);
      Engine engine(runtime, model, config);
      EXPECT_EQ(engine.load(folder, {.convert_state = true}).step, 7);
      for (const UnitSpec& unit : model.units()) {
        for (const TensorSpec& tensor : unit.tensors) {
          const std::vector<float> values = engine.read_weight(tensor.name);
          if (rank != 0) continue;
          std::vector<float> expected(values.size());
          reader.read_tensor(tensor.name, "weight", {0, tensor.shape.elements()}, DataType::float32,
                             expected.data());
          EXPECT_EQ(values, expected) << tensor.name << " on " << mesh;
        }
      }
      const kernels::Digest digest = engine.state_digest();
      if (rank == 0) digests.push_back(digest);
    });
  }
  for (const kernels::Digest& digest : digests) EXPECT_EQ(digest, digests[0]);
}

ConstTensorView doubles_of(const std::vector<double>& values) {
  return {values.data(), DataType::float64, Shape{static_cast<std::int64_t>(values.size())}};
}

TEST(Hybrid, ArraysAreSavedOnceAndGivenToAnyMesh) {
  const testing::TestFolder folder;
  constexpr std::int64_t elements = 10'007;
  for (const std::string& mesh : {hybrid(2), std::string("shard=3, replicate=2"), hybrid(1)}) {
    OddRun run;
    run.ranks = 6;
    run.mesh = mesh;
    std::string path;
    on_ranks(run, [&](Engine& engine, Runtime& runtime) {
      // A part of `table` determined by the coordinate on `shard`, equal on all replicas, and an array of
      // each rank's own.
      const int shards = runtime.mesh().size(MeshAxis::shard);
      const std::int64_t shard = runtime.mesh().coordinate(MeshAxis::shard, runtime.rank());
      const std::int64_t begin = elements * shard / shards, end = elements * (shard + 1) / shards;
      std::vector<double> whole(301, 2.5), part(static_cast<std::size_t>(end - begin)),
          own(3, runtime.rank());
      std::iota(part.begin(), part.end(), static_cast<double>(begin));
      const std::string written = engine.save(
          folder / mesh, {.arrays = {SavedArray::whole("mean", doubles_of(whole)),
                                     SavedArray::part("table", Shape{elements}, begin, doubles_of(part)),
                                     SavedArray::of_rank("own", doubles_of(own))}});
      if (runtime.rank() == 0) path = written;
      engine.finish_saving();
      if (shards < 6) {
        if (runtime.rank() == 5) part.back() = -1;
        EXPECT_THAT(
            message_of<InvalidArgument>([&] {
              (void)engine.save(
                  folder / "no",
                  {.arrays = {SavedArray::part("table", Shape{elements}, begin, doubles_of(part))}});
            }),
            HasSubstr(
                "rank 5 gives other values of its part of 'table' (a part of, fp64 [10007]) than rank "));
      }
    });
    const checkpoint::LocalStorage local;
    checkpoint::Reader reader(local, path);
    std::vector<bool> stores(6, false);
    for (const checkpoint::StoredRange& range : reader.array("table").ranges) {
      stores[static_cast<std::size_t>(range.rank)] = true;
    }
    EXPECT_EQ(std::count(stores.begin(), stores.end(), true), 6) << "replicas share the load";
    for (const auto& [ranks, other] : {std::pair(6, hybrid(3)), std::pair(2, std::string())}) {
      run.ranks = ranks;
      run.mesh = other;
      on_ranks(run, [&, ranks = ranks](Engine& engine, Runtime& runtime) {
        std::vector<double> table(elements), mean(301), own(3), counted(elements);
        std::iota(counted.begin(), counted.end(), 0.0);
        const auto target = [](std::vector<double>& values) {
          return TensorView{values.data(), DataType::float64,
                            Shape{static_cast<std::int64_t>(values.size())}};
        };
        engine.load_arrays(path, {{"table", target(table)}, {"mean", target(mean)}});
        EXPECT_EQ(table, counted);
        EXPECT_EQ(mean, std::vector<double>(301, 2.5));
        if (ranks != 6) return;
        engine.load_arrays(path, {{"own", target(own)}});
        EXPECT_EQ(own, std::vector<double>(3, runtime.rank()));
      });
    }
    run.ranks = 6;
  }
}

TEST(Hybrid, WhatIsRefused) {
  OddRun run;
  run.ranks = 4;
  run.mesh = "replicate=3, shard=*";
  const auto message = [&] { return message_of<Error>([&] { on_ranks(run, [](Engine&, Runtime&) {}); }); };
  EXPECT_THAT(message(), HasSubstr("mesh \"replicate=3, shard=*\": replicate 3 does not divide the 4 ranks"));
  run.mesh = hybrid(2);
  run.replicate = Replicate::parameters;
  EXPECT_THAT(
      message(),
      HasSubstr("tranche.replicate: parameters shards gradients and optimizer state over all ranks, but "
                "stage 0 shards nothing; write stage 1, 2 or 3, or all here"));
  run.stage = 3;
  run.offload.parameters = OffloadTier::cpu;
  EXPECT_THAT(message(), HasSubstr("tranche.replicate: parameters with offload_param.device cpu"));
  run = {};
  run.ranks = 4;
  run.mesh = hybrid(2);
  run.replica_sum = ReplicaSum::step;
  run.accumulation_dtype = DataType::bfloat16;
  EXPECT_THAT(message(), HasSubstr("tranche.replica_sum: step accumulates in fp32, but "
                                   "data_types.grad_accum_dtype is bf16; write fp32 there, or micro_batch "
                                   "here"));
  run = {};
  run.ranks = 4;
  run.mesh = hybrid(2);
  run.reduction_group = 4;
  EXPECT_THAT(
      message(),
      HasSubstr("tranche.reduction_group: 4 with tranche.mesh \"replicate=*, shard=2\", where gradients are "
                "added within the 2 ranks of shard first; leave it out"));
  run.reduction_group = 0;
  run.accumulation = 2;
  run.policy = ReductionPolicy::micro_batch;
  on_ranks(run, [](Engine& engine, Runtime& runtime) {
    odd_micro_batch(engine, runtime.rank(), 1);
    EXPECT_THAT(message_of<Error>([&] { (void)engine.read_gradient("prime.c"); }),
                HasSubstr("replicas' sums"));
  });
}

TEST(Hybrid, ARuntimesMeshIsTheConfigurations) {
  OddRun run;
  run.ranks = 4;
  on_ranks(
      run, [](Engine& engine, Runtime&) { EXPECT_EQ(engine.config().mesh, "replicate=2, shard=2"); },
      [](Config&, RuntimeOptions& options) { options.mesh = hybrid(2); });
}

}  // namespace
}  // namespace tranche::test
