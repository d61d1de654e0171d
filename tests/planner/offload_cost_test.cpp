// Compares the model of offloading costs with formulas evaluated by hand.

#include "tranche/planner/offload_cost.h"

#include <gtest/gtest.h>

#include <cmath>

namespace tranche::planner {
namespace {

constexpr int blocks = 10;
constexpr std::int64_t block_elements = 1000;
/// Operations per token of a block's forward; backward has twice as many.
constexpr double block_operations = 100;

/// An embedding without computation, and equal blocks.
OffloadSchedule schedule(std::int64_t embedding = 1000) {
  OffloadSchedule model;
  model.units.push_back({embedding, embedding, embedding, true});
  for (int b = 0; b < blocks; ++b)
    model.units.push_back({block_elements, block_elements, block_elements, true});
  model.visits.push_back({0, 0, true, false});
  for (int b = 1; b <= blocks; ++b) model.visits.push_back({b, block_operations, true, false});
  for (int b = blocks; b > 0; --b) model.visits.push_back({b, 2 * block_operations, true, true});
  model.visits.push_back({0, 0, false, true});
  return model;
}

Config configuration(OffloadTier optimizer, OffloadTier parameters = OffloadTier::none) {
  Config config;
  config.offload.optimizer = optimizer;
  config.offload.parameters = parameters;
  config.offload.tile_elements = block_elements;
  return config;
}

/// Everything but the link is free; a byte takes a second there, and an operation takes a second.
CostModel slow_link() {
  return {1e30, 1, 1, 1e30, 1e30};
}

TEST(OffloadCost, LinkAlone) {
  // Forward: a block's weights take 2000 s, its compute 100 s per token. Backward: 4000 s of gradients, 200 s
  // per token.
  const OffloadCost cost = offload_cost(schedule(), configuration(OffloadTier::cpu), 40, slow_link());
  EXPECT_NEAR(cost.break_even_tokens, 20, 0.01);
  // The weights of the embedding and of the first block arrive exposed; the gradients of both leave exposed.
  EXPECT_NEAR(cost.least_exposed, 2 * 2000 + 2 * 4000, 1);
  EXPECT_NEAR(cost.exposed, cost.least_exposed, 1) << "40 tokens are beyond the break-even";
  EXPECT_DOUBLE_EQ(cost.compute, 40 * 3 * blocks * block_operations);
  EXPECT_EQ(cost.bytes.to_host, 4 * 11000);
  EXPECT_EQ(cost.bytes.from_host, 2 * 11000);
  // With half of the tokens the forward and backward of each of nine blocks hide only half of its transfer.
  const OffloadCost half = offload_cost(schedule(), configuration(OffloadTier::cpu), 10, slow_link());
  EXPECT_NEAR(half.exposed, cost.least_exposed + 9 * (1000 + 2000), 1);
}

TEST(OffloadCost, OfSeveralMicroBatchesTheFirstForwardAndTheLastBackwardHide) {
  Config config = configuration(OffloadTier::cpu);
  for (const int micro_batches : {2, 3, 7}) {
    config.accumulation_steps = micro_batches;
    const OffloadCost cost = offload_cost(schedule(), config, 10, slow_link());
    EXPECT_NEAR(cost.break_even_tokens, 20.0 * micro_batches, 0.01 * micro_batches);
    EXPECT_NEAR(cost.exposed, 2 * 2000 + 2 * 4000 + 9 * 3000, 1) << "as with one micro-batch of these tokens";
  }
}

TEST(OffloadCost, TheSlowestRoadDecides) {
  CostModel rates = slow_link();
  rates.host_link = 1e30;
  rates.host_update = 0.25;  // 4000 s per block
  EXPECT_NEAR(offload_cost(schedule(), configuration(OffloadTier::cpu), 1, rates).break_even_tokens, 40,
              0.01);
  rates.nvme = 2;  // 24 bytes per parameter are read and written: 12000 s per block
  EXPECT_NEAR(offload_cost(schedule(), configuration(OffloadTier::cpu), 1, rates).break_even_tokens, 40,
              0.01);
  const OffloadCost disk = offload_cost(schedule(), configuration(OffloadTier::nvme), 1, rates);
  EXPECT_NEAR(disk.break_even_tokens, 120, 0.01);
  EXPECT_DOUBLE_EQ(disk.busy.disk, 11000 * 24 / 2.0);
  EXPECT_DOUBLE_EQ(disk.busy.host_update, 11000 * 4.0);
}

TEST(OffloadCost, TheBackwardPassHidesUpdatesAsReduced) {
  // The update of a unit takes 1000 s. At 6 tokens forward hides 600 s a block, backward 1200.
  const CostModel slow_update{1e30, 1, 1e30, 1e30, 1};
  Config config = configuration(OffloadTier::cpu);
  EXPECT_NEAR(offload_cost(schedule(), config, 6, slow_update).exposed, 2000 + 9 * 400, 1);
  config.update = UpdateTime::as_reduced;
  const OffloadCost early = offload_cost(schedule(), config, 6, slow_update);
  EXPECT_NEAR(early.exposed, 2000, 1)
      << "of the embedding and the first block, complete last and wanted first";
  EXPECT_NEAR(early.least_exposed, 2000, 1);
  // With one token the passes hide 200 s for each of nine blocks. The rest of the 11 updates is exposed.
  EXPECT_NEAR(offload_cost(schedule(), config, 1, slow_update).exposed, 11000 - 200 * 9, 1);

  // The disk reads and writes 24 bytes an element, which also takes 1000 s a unit.
  const CostModel slow_disk{1e30, 1, 1e30, 24, 1e30};
  config.offload.optimizer = OffloadTier::nvme;
  EXPECT_NEAR(offload_cost(schedule(), config, 6, slow_disk).exposed, 2000, 1);
}

TEST(OffloadCost, WhatStaysOnTheDeviceWaitsForNothing) {
  OffloadSchedule model = schedule();
  model.units[0].moves = model.units[1].moves = false;
  const OffloadCost cost = offload_cost(model, configuration(OffloadTier::cpu), 1e6, slow_link());
  // The embedding and the first block stay on the device, and the passes of the first block hide the
  // transfers of the second.
  EXPECT_NEAR(cost.exposed, 0, 1e-6);
  EXPECT_EQ(cost.bytes.to_host, 4 * 9000);
}

TEST(OffloadCost, ParametersAreBroughtForEveryGather) {
  Config config = configuration(OffloadTier::none, OffloadTier::cpu);
  config.stage = 3;
  config.accumulation_steps = 3;
  OffloadSchedule model = schedule();
  for (OffloadUnit& unit : model.units) unit.moves = false;
  const OffloadCost cost = offload_cost(model, config, 1e6, slow_link());
  EXPECT_EQ(cost.bytes.from_host, 3 * 2 * (1 + 2 * blocks) * block_elements);
  EXPECT_EQ(cost.bytes.to_host, 2 * 11000) << "weights that the device updated";
  // One unit is prefetched: the embedding, which computes nothing, and the first block arrive exposed, once a
  // step.
  EXPECT_GT(cost.least_exposed, 0);
  EXPECT_LT(cost.least_exposed, 30000);
  config.depth = 1;
  const OffloadCost bare = offload_cost(model, config, 1e6, slow_link());
  EXPECT_NEAR(bare.exposed, static_cast<double>(cost.bytes.from_host), 30000) << "nothing comes ahead";
}

TEST(OffloadCost, TheNextUnitComesAheadHoweverLargeAndTheKeysBoundTheRest) {
  Config config = configuration(OffloadTier::none, OffloadTier::cpu);
  config.stage = 3;
  OffloadSchedule model = schedule();
  for (OffloadUnit& unit : model.units) unit.moves = false;
  model.visits[3].operations *= 20;  // long enough for the transfer of two units
  const auto exposed = [&](int depth, std::int64_t prefetch, std::int64_t live) {
    config.depth = depth;
    config.prefetch_elements = prefetch;
    config.max_live_elements = live;
    return offload_cost(model, config, 10, slow_link()).exposed;
  };
  const double alone = exposed(1, 50'000'000, 1'000'000'000);
  const double next = exposed(2, 50'000'000, 1'000'000'000);
  const double third = exposed(3, 50'000'000, 1'000'000'000);
  EXPECT_LT(next, alone - 1000);
  EXPECT_LT(third, next - 1000);
  EXPECT_EQ(exposed(2, 0, 0), next);
  EXPECT_EQ(exposed(3, 0, 1'000'000'000), next);
  EXPECT_EQ(exposed(3, block_elements - 1, 1'000'000'000), next);
  EXPECT_EQ(exposed(3, block_elements, 3 * block_elements - 1), next);
  EXPECT_EQ(exposed(3, block_elements, 3 * block_elements), third);
  EXPECT_EQ(exposed(4, block_elements, 1'000'000'000), third);
}

TEST(OffloadCost, NothingToHideAndNothingToHideBehind) {
  const OffloadCost none = offload_cost(schedule(), Config{}, 10, slow_link());
  EXPECT_EQ(none.break_even_tokens, 0);
  EXPECT_EQ(none.exposed, 0);
  OffloadSchedule idle = schedule();
  for (UnitVisit& visit : idle.visits) visit.operations = 0;
  const OffloadCost cost = offload_cost(idle, configuration(OffloadTier::cpu), 10, slow_link());
  EXPECT_TRUE(std::isinf(cost.break_even_tokens));
  EXPECT_NEAR(cost.exposed, 6 * 11000, 1);
}

TEST(OffloadCost, KeptInputsGrowAsComputeDoes) {
  OffloadSchedule model = schedule();
  for (OffloadUnit& unit : model.units) unit.moves = false;
  model.kept_inputs = blocks;
  model.input_bytes = 64;
  Config config = configuration(OffloadTier::none);
  config.offload.activations = true;
  // 64 s per token and block in each direction, behind 100 s of forward: nothing is exposed, for any number
  // of tokens.
  const OffloadCost hidden = offload_cost(model, config, 40, slow_link());
  EXPECT_EQ(hidden.bytes.to_host, 64 * 40 * blocks);
  EXPECT_EQ(hidden.bytes.from_host, 64 * 40 * blocks);
  EXPECT_EQ(hidden.exposed, 0);
  EXPECT_EQ(hidden.break_even_tokens, 0);
  // 150 s is half again as long as the forward, but still hidden by the backward.
  model.input_bytes = 150;
  EXPECT_NEAR(offload_cost(model, config, 1024, slow_link()).exposed, 50.0 * 1024 * blocks, 1);
}

TEST(OffloadCost, WithoutOverlapEverythingIsExposed) {
  Config config = configuration(OffloadTier::cpu);
  config.overlap = false;
  const OffloadCost cost = offload_cost(schedule(), config, 1e6, slow_link());
  EXPECT_NEAR(cost.exposed, 6 * 11000, 1);
}

}  // namespace
}  // namespace tranche::planner
