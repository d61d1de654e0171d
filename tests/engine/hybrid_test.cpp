// Hybrid sharding: copies of a model that is sharded over fewer ranks than there are.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tuple>

#include "on_ranks.h"
#include "same_bits.h"
#include "tests/offload/test_folder.h"

namespace tranche::test {
namespace {

using ::testing::HasSubstr;

/// Every (replicate, shard) of `ranks` with more than one replica.
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
        const OddResult result = train_odd(run);
        expect_same(expected, result, run);
        EXPECT_EQ(result.wire_elements, result.formula_elements) << run.to_string();
        EXPECT_EQ(result.wire_bytes, result.formula_bytes) << run.to_string();
      }
    }
  }
}

// The replicas share the gradients and the optimizer's state: the parts of a shard are those of flat ZeRO.
TEST_P(Meshes, HaveTheBitsOfOneShardedModelWithStateOverAllRanks) {
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

// Once a step the sums have other bits than each micro-batch, but one set of them whatever the stage.
TEST_P(Meshes, MayAddUpTheReplicasOnceAStep) {
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
        const OddResult result = train_odd(run);
        expect_same(expected, result, run);
        EXPECT_EQ(result.wire_elements, result.formula_elements) << run.to_string();
        EXPECT_EQ(result.wire_bytes, result.formula_bytes) << run.to_string();
      }
    }
    // A step of one micro-batch knows no difference.
    run.accumulation = 1;
    run.stage = 3;
    const OddResult once = train_odd(run);
    run.replica_sum = ReplicaSum::micro_batch;
    expect_same(train_odd(run), once, run);
  }
}

TEST_P(Meshes, ArePlannedToTheByte) {
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

INSTANTIATE_TEST_SUITE_P(Ranks, Meshes, ::testing::Values(2, 3, 4, 5, 6, 7, 8));

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
  for (const Replicate replicate : {Replicate::all, Replicate::parameters}) {
    run.replicate = replicate;
    for (run.stage = 1; run.stage <= 3; ++run.stage) {
      for (const std::int64_t accumulation : {2, 1}) {  // with one, gradients take memory of the step only
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
  run.offload = {};
  const OddResult expected = train_odd(run);
  for (const OffloadTier tier : {OffloadTier::cpu, OffloadTier::nvme}) {
    run.offload.optimizer = run.offload.parameters = tier;
    run.offload.nvme_path = folder.path();
    expect_same(expected, train_odd(run), run);
  }
}

// What looks at single tensors sees the same values, and the same skips, wherever the state is cut.
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
      (void)engine.state_digest();  // which throws where copies differ
      if (runtime.rank() == 0) seen = mine;
    });
    EXPECT_EQ(seen.applied, (std::vector<bool>{true, false, false, true}));
    EXPECT_EQ(seen.gradient, all[0].gradient) << mesh;
    EXPECT_EQ(seen.state, all[0].state) << mesh;
    EXPECT_EQ(seen.weight, all[0].weight) << mesh;
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
        run.stage = stage;
        on_ranks(run, [&](Engine& engine, Runtime& runtime) {
          EXPECT_EQ(engine.load(path).step, 1);
          EXPECT_EQ(engine.state_digest(), saved) << run.to_string();
          whole_step(engine, runtime, 1);  // the weights that models read are there, too
          EXPECT_TRUE(engine.step().applied);
        });
      }
    }
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
  on_ranks(run, [](Engine& engine, Runtime&) {
    const std::int64_t number = 7;
    const ConstTensorView values{&number, DataType::int64, Shape{1}};
    EXPECT_THAT(message_of<InvalidArgument>(
                    [&] { (void)engine.save("x", {.arrays = {SavedArray::whole("order", values)}}); }),
                HasSubstr("arrays beside the model's state cannot be saved on a mesh with replicas"));
  });
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
