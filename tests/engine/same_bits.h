#pragma once
/// Comparisons for tests of equal bits.

#include <gtest/gtest.h>

#include <cstddef>
#include <filesystem>

#include "odd_model.h"

namespace tranche::test {

enum class Skips { none, as_expected };

/// Expects two runs of the odd model to end with the same bits and to report the same in every step. With
/// Skips::none every step of `actual` must have been applied.
inline void expect_same(const OddResult& expected, const OddResult& actual, const OddRun& run,
                        Skips skips = Skips::none) {
  EXPECT_EQ(expected.weights, actual.weights) << run.to_string();
  EXPECT_EQ(expected.state, actual.state) << run.to_string();
  ASSERT_EQ(expected.steps.size(), actual.steps.size());
  for (std::size_t s = 0; s < expected.steps.size(); ++s) {
    // These are fp64 sums in a fixed order, so the bits must be equal.
    EXPECT_EQ(expected.steps[s].loss, actual.steps[s].loss) << run.to_string() << " step " << s + 1;
    EXPECT_EQ(expected.steps[s].gradient_norm, actual.steps[s].gradient_norm) << run.to_string();
    EXPECT_EQ(expected.steps[s].clip_coefficient, actual.steps[s].clip_coefficient) << run.to_string();
    EXPECT_EQ(expected.steps[s].applied, actual.steps[s].applied) << run.to_string();
    if (skips == Skips::none) {
      EXPECT_TRUE(actual.steps[s].applied) << actual.steps[s].skipped_because;
    }
  }
}

/// Expects every stage, tier and bucket size to have the bits of stage 0, whose result it returns.
inline OddResult expect_the_same_everywhere(OddRun run) {
  OddResult expected = train_odd(run);
  EXPECT_NE(expected.steps.back().loss, expected.steps.front().loss) << run.optimizer << " does nothing";
  for (run.stage = 1; run.stage <= 3; ++run.stage) expect_same(expected, train_odd(run), run);
  run.stage = 3;
  run.reduce_bucket = 700;
  run.gather_bucket = 300;
  run.poison = true;
  expect_same(expected, train_odd(run), run);
  run.offload.tile_elements = 4096;
  run.offload.nvme_path = std::filesystem::temp_directory_path().string();
  for (const OffloadTier tier : {OffloadTier::cpu, OffloadTier::nvme}) {
    run.offload.optimizer = tier;
    for (const int stage : {0, 1 + run.ranks % 3}) {
      run.stage = stage;
      expect_same(expected, train_odd(run), run);
    }
  }
  return expected;
}

/// Expects 2 to `most` ranks to have the bits of one rank, which runs as many micro-batches.
inline void expect_the_same_on_any_ranks(OddRun run, int most) {
  run.ranks = 1;
  run.micro_batches = most;
  const OddResult expected = train_odd(run);
  for (run.ranks = 2; run.ranks <= most; ++run.ranks) {
    run.stage = run.ranks % 4;
    expect_same(expected, train_odd(run), run);
  }
}

/// Expects two copies on two ranks each to have the bits of one sharded model.
inline void expect_the_same_on_meshes(OddRun run) {
  run.ranks = 4;
  run.stage = 2;
  run.reduction_group = 2;
  const OddResult expected = train_odd(run);
  run.mesh = "replicate=*, shard=2";
  for (const Replicate replicate : {Replicate::all, Replicate::parameters}) {
    run.replicate = replicate;
    expect_same(expected, train_odd(run), run);
  }
}

}  // namespace tranche::test
