// Hybrid sharding: copies of a model that is sharded over fewer ranks than there are.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

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

TEST_P(Meshes, ArePlannedToTheByte) {
  for (const int shards : shard_sizes(GetParam())) {
    OddRun run;
    run.ranks = GetParam();
    run.dtype = DataType::bfloat16;
    run.accumulation = 2;
    run.mesh = hybrid(shards);
    for (run.stage = 0; run.stage <= 3; ++run.stage) {
      run.device = DeviceKind::cpu;
      const OddResult real = train_odd(run);
      run.device = DeviceKind::meta;
      const OddResult planned = train_odd(run);
      EXPECT_EQ(planned.accounts[0].peak, real.accounts[0].peak) << run.to_string();
      EXPECT_EQ(planned.wire_elements[0], real.wire_elements[0]) << run.to_string();
      EXPECT_EQ(planned.wire_bytes[0], real.wire_bytes[0]) << run.to_string();
      EXPECT_EQ(planned.formula_elements[0], real.formula_elements[0]) << run.to_string();
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
  OddRun run;
  run.ranks = 4;
  run.dtype = DataType::bfloat16;
  run.accumulation = 2;
  run.mesh = hybrid(2);
  for (run.stage = 1; run.stage <= 3; ++run.stage) {
    run.offload = {};
    const OddResult expected = train_odd(run);
    run.offload.optimizer = OffloadTier::cpu;
    expect_same(expected, train_odd(run), run);
    run.accumulation = 1;  // gradients take memory of the step only
    run.offload = {};
    const OddResult once = train_odd(run);
    run.offload.optimizer = OffloadTier::cpu;
    expect_same(once, train_odd(run), run);
    run.accumulation = 2;
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
  const testing::TestFolder folder;
  OddRun run;
  run.ranks = 6;
  run.stage = 3;
  run.mesh = hybrid(3);
  std::string path;
  kernels::Digest saved;
  on_ranks(run, [&](Engine& engine, Runtime& runtime) {
    whole_step(engine, runtime, 0);
    (void)engine.step();
    const std::string written = engine.save(folder.path());
    const kernels::Digest digest = engine.state_digest();
    if (runtime.rank() == 0) path = written, saved = digest;
  });
  for (const auto& [ranks, mesh] :
       {std::pair(6, hybrid(3)), std::pair(6, hybrid(1)), std::pair(6, hybrid(2)), std::pair(4, hybrid(2)),
        std::pair(3, std::string()), std::pair(1, std::string())}) {
    run.ranks = ranks;
    run.mesh = mesh;
    for (const int stage : {0, 2, 3}) {
      run.stage = stage;
      on_ranks(run, [&](Engine& engine, Runtime&) {
        EXPECT_EQ(engine.load(path).step, 1);
        EXPECT_EQ(engine.state_digest(), saved) << run.to_string();
      });
    }
  }
}

TEST(Hybrid, WhatIsRefused) {
  OddRun run;
  run.ranks = 4;
  run.mesh = "replicate=3, shard=*";
  EXPECT_THAT(message_of<Error>([&] { on_ranks(run, [](Engine&, Runtime&) {}); }),
              HasSubstr("mesh \"replicate=3, shard=*\": replicate 3 does not divide the 4 ranks"));
  run.mesh = hybrid(2);
  run.reduction_group = 4;
  EXPECT_THAT(
      message_of<Error>([&] { on_ranks(run, [](Engine&, Runtime&) {}); }),
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
