// Notes at the start about settings that reduce overlap or need more memory.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "on_ranks.h"

namespace tranche::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// The table at the start of rank 0 of two in stage 3, bf16, on the meta device.
std::string start(const std::function<void(Config&)>& change, int ranks = 2) {
  OddRun run;
  run.ranks = ranks;
  run.stage = 3;
  run.dtype = DataType::bfloat16;
  Config config = odd_config(run);
  change(config);
  RuntimeOptions options;
  options.device = DeviceKind::meta;
  options.staging_bytes = config.staging_bytes;
  Runtime runtime(options, [&](const CommunicatorOptions& communicator) {
    return make_meta_communicator(0, ranks, ranks, communicator);
  });
  return Engine(runtime, odd_model(), config).summary();
}

TEST(StartNotes, NothingIsSaidOfWhatCostsNothing) {
  const std::string text = start([](Config&) {});
  EXPECT_THAT(text, AllOf(Not(HasSubstr("is prefetched")), Not(HasSubstr("stage3_max_live_parameters")),
                          Not(HasSubstr("bucket_size")), Not(HasSubstr("tranche.device_memory"))));
  EXPECT_THAT(start([](Config& c) { c.prefetch_elements = 0; }), Not(HasSubstr("bucket_size")));
  // One rank keeps everything; other stages gather once a step.
  const auto all = [](Config& c) {
    c.overlap = false;
    c.max_live_elements = 0;
  };
  EXPECT_THAT(start(all, 1), Not(HasSubstr("is prefetched")));
  EXPECT_THAT(start([&](Config& c) { all(c), c.stage = 2; }), Not(HasSubstr("is prefetched")));
}

TEST(StartNotes, GathersThatAreWaitedFor) {
  EXPECT_THAT(start([](Config& c) { c.overlap = false; }),
              HasSubstr("note                   zero_optimization.overlap_comm false: no unit is "
                        "prefetched, and every gather is waited for"));
  EXPECT_THAT(start([](Config& c) { c.depth = 1; }),
              HasSubstr("tranche.depth 1: no unit is prefetched, and every gather is waited for; 2 "
                        "gathers the next while one is in use"));
}

TEST(StartNotes, UpdatesBeforeTheNormAreNamedWhereTheyAreAllowed) {
  const auto offloaded = [](Config& c) {
    c.gradient_clipping = 0;
    c.offload.optimizer = OffloadTier::cpu;
    c.activation_checkpointing = true;
  };
  const auto says = HasSubstr("if every token of every sample is learned, and every sample has its full");
  EXPECT_THAT(start(offloaded), says);
  EXPECT_THAT(start([&](Config& c) { offloaded(c), c.offload.activations = true; }), Not(says));
}

TEST(StartNotes, MemoryThatTwoUnitsNeed) {
  // The largest neighbours: prime with 1536 elements, and tied before it or tiny after it with 512.
  EXPECT_THAT(
      start([](Config& c) { c.max_live_elements = 2047; }),
      HasSubstr("zero_optimization.stage3_max_live_parameters 2047 is less than the 2048 elements of the "
                "unit in use and the next (tied and prime), which are gathered all the same; tranche.depth "
                "1 gathers one at a time, without overlap"));
  EXPECT_THAT(start([](Config& c) { c.max_live_elements = 2048; }), Not(HasSubstr("max_live")));
  EXPECT_THAT(start([](Config& c) { c.device_memory_limit = 1 << 20; }), Not(HasSubstr("leaves")));
  EXPECT_THAT(
      start([](Config& c) { c.device_memory_limit = 64 << 10; }),
      HasSubstr(
          "tranche.device_memory 64.00 KiB leaves 0 B for the steps, less than the 4.00 KiB of the unit in "
          "use and the next (tied and prime): the run will end out of memory; tranche.depth 1 gathers "
          "one at a time, without overlap"));
}

TEST(StartNotes, BucketsAndTilesThatCutShort) {
  EXPECT_THAT(
      start([](Config& c) { c.reduce_bucket_elements = 700; }),
      HasSubstr("zero_optimization.reduce_bucket_size 700: a rank's shard of up to 768 elements travels in "
                "messages of at most 350"));
  EXPECT_THAT(
      start([](Config& c) { c.allgather_bucket_elements = 1534; }),
      HasSubstr("zero_optimization.allgather_bucket_size 1534: a rank's shard of up to 768 elements travels "
                "in messages of at most 767"));
  EXPECT_THAT(start([](Config& c) { c.allgather_bucket_elements = 1536; }),
              Not(HasSubstr("allgather_bucket")));
  EXPECT_THAT(start([](Config& c) { c.reduce_bucket_elements = 700; }, 1), Not(HasSubstr("reduce_bucket")));
}

TEST(StartNotes, SmallTilesOfOffloadedState) {
  ModelSpec model;
  model.add_unit({"one", {{"w", Shape{20000}, Initializer::zeros()}}, 1});
  Config config;
  config.offload.optimizer = OffloadTier::cpu;
  const auto start_with_tile = [&](std::int64_t elements) {
    config.offload.tile_elements = elements;
    RuntimeOptions options;
    options.device = DeviceKind::meta;
    Runtime runtime(options, [](const CommunicatorOptions& communicator) {
      return make_meta_communicator(0, 1, 1, communicator);
    });
    return Engine(runtime, model, config).summary();
  };
  EXPECT_THAT(
      start_with_tile(4096),
      HasSubstr("zero_optimization.sub_group_size or tranche.offload_tile: offloaded state of up to 20224 "
                "elements a unit is updated in tiles of 4096"));
  EXPECT_THAT(start_with_tile(65536), Not(HasSubstr("sub_group_size")));
}

}  // namespace
}  // namespace tranche::test
