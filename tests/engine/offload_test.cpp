// Offloaded state: the same bits on every tier, exact bytes over the link and to the disk, exact accounting.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "core/clock.h"
#include "odd_model.h"
#include "on_ranks.h"
#include "partition/flat_layout.h"
#include "same_bits.h"
#include "tests/core/rounds.h"
#include "tranche/core/random.h"

namespace tranche::test {
namespace {

OffloadConfig offloaded(OffloadTier optimizer, OffloadTier parameters = OffloadTier::none) {
  OffloadConfig offload;
  offload.optimizer = optimizer;
  offload.parameters = parameters;
  offload.tile_elements = 4096;
  offload.nvme_path = std::filesystem::temp_directory_path().string();
  return offload;
}

class Offload : public ::testing::TestWithParam<std::tuple<int, DataType>> {};

TEST_P(Offload, GivesTheSameBitsAtEveryStageAndTier) {
  int point = std::get<0>(GetParam());
  for (const std::int64_t accumulation : {1, 3}) {
    for (const ReductionPolicy policy : {ReductionPolicy::boundary, ReductionPolicy::micro_batch}) {
      OddRun run;
      std::tie(run.ranks, run.dtype) = GetParam();
      run.accumulation = accumulation;
      run.policy = policy;
      const OddResult expected = train_odd(run);
      for (run.stage = 0; run.stage <= 3; ++run.stage) {
        for (const OffloadTier optimizer : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
          for (const OffloadTier parameters : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
            if (run.stage < 3 && parameters != OffloadTier::none) continue;
            if (!swept(point++, 5)) continue;
            run.offload = offloaded(optimizer, parameters);
            expect_same(expected, train_odd(run), run, Skips::as_expected);
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

TEST_P(Offload, GivesTheSameBitsWithAnyShareTileAndEngine) {
  OddRun base;
  std::tie(base.ranks, base.dtype) = GetParam();
  base.accumulation = 2;
  base.policy = ReductionPolicy::micro_batch;
  const OddResult expected = train_odd(base);
  const RandomKey key{21, RandomPurpose::test, static_cast<std::uint64_t>(base.ranks)};
  std::uint64_t draw = 0;
  const auto pick = [&](std::uint32_t n) { return static_cast<int>(random_bits(key, draw++) % n); };
  for (int i = 0; i < 25; ++i) {
    OddRun run = base;
    run.stage = pick(4);
    const OffloadTier tiers[] = {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme};
    run.offload = offloaded(tiers[pick(3)], run.stage == 3 ? tiers[pick(3)] : OffloadTier::none);
    run.offload.ratio = pick(5) / 4.0;
    run.offload.tile_elements = 4096 * (1 + pick(3));
    run.offload.tile_buffers = 3 + pick(4);
    run.offload.parameter_buffers = 2 + pick(3);
    run.offload.io_engine = pick(2) == 0 ? "threads" : "automatic";
    run.overlap = pick(4) != 0;
    run.depth = 1 + pick(3);
    run.poison = pick(2) == 0;
    run.plan_memory = pick(4) != 0;
    run.link_bytes_per_second = pick(3) == 0 ? 20e6 : 0;
    run.faults = {pick(2) * 0.0003, static_cast<std::uint64_t>(i)};
    if (!swept(i + base.ranks)) continue;
    expect_same(expected, train_odd(run), run, Skips::as_expected);
    if (HasFailure()) return;
  }
}

TEST(Offload, TellsHowLongTheDiskWasBusyAndIdle) {
  for (const OffloadTier tier : {OffloadTier::nvme, OffloadTier::cpu}) {
    OddRun run;
    run.stage = 3;
    run.offload = offloaded(tier, tier);
    on_ranks(
        run,
        [&](Engine& engine, Runtime& runtime) {
          double called = 0, returned = 0;
          for (int step = 0; step < 4; ++step) {
            whole_step(engine, runtime, step);
            const double calls = detail::seconds_now();
            const StepResult result = engine.step();
            const DiskIdleSeconds& idle = result.disk_idle;
            const double sum = result.offload.disk + idle.nothing_asked + idle.no_buffer + idle.norm;
            EXPECT_EQ(sum > 0, tier == OffloadTier::nvme);
            EXPECT_EQ(result.offload.disk > 0, tier == OffloadTier::nvme);
            if (tier == OffloadTier::nvme && step > 0) {
              EXPECT_GE(sum, calls - returned - 1e-9) << "every moment since the step before has a state";
              EXPECT_LE(sum, detail::seconds_now() - called + 1e-9) << "and one alone";
            }
            called = calls;
            returned = detail::seconds_now();
          }
          const std::string trace = runtime.trace()->to_json();
          for (const char* row : {"tile reads", "tile writes", "disk reads", "disk writes", "disk idle"}) {
            const auto track = ::testing::HasSubstr(R"("args":{"name":")" + std::string(row) + "\"}");
            if (tier == OffloadTier::nvme) {
              EXPECT_THAT(trace, track);
            } else {
              EXPECT_THAT(trace, ::testing::Not(track));
            }
          }
        },
        [](Config&, RuntimeOptions& options) { options.trace = true; });
  }
}

/// The bytes that one step must transfer on one rank according to the layouts, and not a byte more.
OffloadTraffic expected_traffic(const OddRun& run, int rank) {
  OffloadTraffic expected;
  const std::int64_t compute = size_of(run.dtype);
  const std::int64_t g = size_of(run.accumulation_dtype);
  const ModelSpec model = odd_model();
  const auto disk = [](std::int64_t bytes) { return (bytes + 4095) / 4096 * 4096; };
  for (const UnitSpec& unit : model.units()) {
    std::vector<std::int64_t> trainable, frozen;
    for (const TensorSpec& tensor : unit.tensors) {
      (run.frozen && tensor.name == odd_frozen_tensor ? frozen : trainable)
          .push_back(tensor.shape.elements());
    }
    const detail::FlatLayout layout(trainable, run.ranks), kept_still(frozen, run.ranks);
    const std::int64_t kept =
        run.stage == 0 || run.ranks == 1 ? layout.padded_elements() : layout.shard_elements();
    const bool away = run.offload.optimizer != OffloadTier::none;
    const bool parameters_away = run.offload.parameters != OffloadTier::none;
    if (away) expected.to_host += kept * g;                              // main gradients
    if (away && !parameters_away) expected.from_host += kept * compute;  // new weights
    if (!away && parameters_away) expected.to_host += kept * compute;
    if (run.offload.optimizer == OffloadTier::nvme) {
      // fp32 master, exp_avg and exp_avg_sq; each begins at a multiple of 4096 in every tile.
      for (std::int64_t first = 0; first < kept; first += run.offload.tile_elements) {
        const std::int64_t bytes = 3 * disk(std::min(run.offload.tile_elements, kept - first) * 4);
        expected.nvme_read += bytes;
        expected.nvme_written += bytes;
      }
    }
    if (!parameters_away) continue;
    // Each micro-batch gathers a unit in forward and in backward, and the tied one a third time, because its
    // two uses in backward are the first and the last.
    const std::int64_t gathers = run.accumulation * (unit.name == "tied" ? 3 : 2);
    for (const detail::FlatLayout* flat : {&layout, &kept_still}) {
      expected.from_host += gathers * flat->shard_elements() * compute;
      if (run.offload.parameters != OffloadTier::nvme) continue;
      expected.nvme_read += gathers * disk(flat->shard_elements() * compute);
    }
    if (run.offload.parameters == OffloadTier::nvme) {
      for (std::int64_t first = 0; first < kept; first += run.offload.tile_elements) {
        expected.nvme_written += disk(std::min(run.offload.tile_elements, kept - first) * compute);
      }
    }
  }
  (void)rank;
  return expected;
}

void expect_equal(const OffloadTraffic& expected, const OffloadTraffic& actual, const std::string& what) {
  EXPECT_EQ(expected.to_host, actual.to_host) << what;
  EXPECT_EQ(expected.from_host, actual.from_host) << what;
  EXPECT_EQ(expected.nvme_read, actual.nvme_read) << what;
  EXPECT_EQ(expected.nvme_written, actual.nvme_written) << what;
}

void expect_equal_books(const TierAccount& planned, const TierAccount& measured, const std::string& what) {
  EXPECT_EQ(planned.peak, measured.peak) << what;
  for (const Category category : all_categories) {
    EXPECT_EQ(planned.category_peak[category], measured.category_peak[category])
        << what << " " << name_of(category);
    EXPECT_EQ(planned.at_peak[category], measured.at_peak[category]) << what << " " << name_of(category);
    EXPECT_EQ(planned.persistent[category], measured.persistent[category])
        << what << " " << name_of(category);
  }
}

TEST(OffloadBooks, BytesAreTheFormulaAndThePlanIsWhatHappens) {
  int point = 0;
  for (const int ranks : {1, 3}) {
    for (const DataType dtype : {DataType::bfloat16, DataType::float32}) {
      for (const DataType accumulation : {DataType::float32, DataType::bfloat16}) {
        for (const std::int64_t micro_batches : {1, 2}) {
          for (const OffloadTier optimizer : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
            for (const OffloadTier parameters : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
              OddRun run;
              run.ranks = ranks;
              run.dtype = dtype;
              run.accumulation_dtype = accumulation;
              run.accumulation = micro_batches;
              run.stage = parameters == OffloadTier::none && optimizer == OffloadTier::cpu ? 2 : 3;
              run.offload = offloaded(optimizer, parameters);
              if (!run.offload.any() || !swept(point++, 5)) continue;
              const OddResult measured = train_odd(run);
              run.device = DeviceKind::meta;
              const OddResult planned = train_odd(run);
              const std::string what = run.to_string();
              const OffloadTraffic moved = measured.steps.back().offload_traffic;
              expect_equal(expected_traffic(run, 0), moved, what);
              expect_equal(planned.steps.back().offload_traffic, moved, what + " (planned)");
              expect_equal_books(planned.accounts[0], measured.accounts[0], what + " device");
              expect_equal_books(planned.host_accounts[0], measured.host_accounts[0], what + " host");
              expect_equal_books(planned.nvme_accounts[0], measured.nvme_accounts[0], what + " nvme");
              EXPECT_EQ(measured.memory_calls_per_late_step[0], 0) << what;
              EXPECT_EQ(measured.accounts[0].persistent[Category::optimizer] == 0,
                        optimizer != OffloadTier::none)
                  << what;
              if (HasFailure()) return;
            }
          }
        }
      }
    }
  }
}

TEST(OffloadBooks, AShareOfTheStateStaysOnTheDevice) {
  // The odd model's units have 256, 1280 (prime), 256 (tiny) and 512 padded elements, in forward order.
  OddRun run;
  run.offload = offloaded(OffloadTier::cpu);
  std::int64_t last = -1;
  for (const double ratio : {1.0, 0.6, 0.3, 0.0}) {
    run.offload.ratio = ratio;
    const OddResult result = train_odd(run);
    const std::int64_t here = result.accounts[0].persistent[Category::optimizer];
    EXPECT_GT(here, last) << ratio;
    if (ratio == 1.0) {
      EXPECT_EQ(here, 0);
    }
    if (ratio == 0.0) {
      EXPECT_EQ(result.host_accounts[0].persistent[Category::optimizer], 0);
    }
    last = here;
  }
}

TEST(Offload, ASkippedStepMovesTheSameBytesAndChangesNothing) {
  for (const OffloadTier tier : {OffloadTier::cpu, OffloadTier::nvme}) {
    for (const OffloadTier parameters : {OffloadTier::none, tier}) {
      OddRun run;
      run.stage = 3;
      run.dtype = DataType::bfloat16;
      run.offload = offloaded(tier, parameters);
      run.at_end = [&](Engine& engine, int) {
        const kernels::Digest before = engine.state_digest();
        odd_micro_batch(engine, 0, 3, "prime.c");
        const StepResult skipped = engine.step();
        EXPECT_FALSE(skipped.applied);
        EXPECT_THAT(skipped.skipped_because, ::testing::HasSubstr("prime.c at element 2"));
        expect_equal(expected_traffic(run, 0), skipped.offload_traffic, run.to_string());
        EXPECT_EQ(before, engine.state_digest()) << run.to_string();
        odd_micro_batch(engine, 0, 3);
        EXPECT_TRUE(engine.step().applied);
        EXPECT_FALSE(before == engine.state_digest());
      };
      (void)train_odd(run);
    }
  }
}

TEST(Offload, ShardsFromTheDiskAreNotOvertakenOnASlowLink) {
  // Four units are prefetched through two buffers: the third read must wait until the first has left its
  // buffer.
  OddRun run;
  run.stage = 3;
  run.dtype = DataType::bfloat16;
  run.depth = 4;
  run.policy = ReductionPolicy::micro_batch;
  const OddResult expected = train_odd(run);
  run.offload = offloaded(OffloadTier::nvme, OffloadTier::nvme);
  run.offload.parameter_buffers = 2;
  run.link_bytes_per_second = 1e6;
  expect_same(expected, train_odd(run), run, Skips::as_expected);
}

TEST(Offload, TensorsAreReadAndWrittenWhereverTheyLive) {
  for (const int ranks : {1, 3}) {
    for (const OffloadTier optimizer : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
      for (const OffloadTier parameters : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
        OddRun run;
        run.ranks = ranks;
        run.stage = 3;
        run.dtype = DataType::bfloat16;
        run.offload = offloaded(optimizer, parameters);
        run.at_end = [&](Engine& engine, int) {
          std::vector<float> values = engine.read_weight("prime.c");
          ASSERT_EQ(values.size(), 1009u);
          const std::vector<float> other = engine.read_weight("mixed.f");
          for (std::size_t i = 0; i < values.size(); ++i) values[i] = 0.5f + static_cast<float>(i);
          engine.write_weight("prime.c", values);
          EXPECT_EQ(engine.read_weight("prime.c"), values) << run.to_string();
          EXPECT_EQ(engine.read_weight("mixed.f"), other) << run.to_string();
          std::vector<float> moments = engine.read_optimizer_state("prime.c", "exp_avg");
          EXPECT_NE(moments[7], 0.0f);
          for (float& value : moments) value *= 2;
          engine.write_optimizer_state("prime.c", "exp_avg", moments);
          EXPECT_EQ(engine.read_optimizer_state("prime.c", "exp_avg"), moments) << run.to_string();
          const std::vector<float> frozen(131, 0.25f);
          engine.write_weight(odd_frozen_tensor, frozen);
          EXPECT_EQ(engine.read_weight(odd_frozen_tensor), frozen) << run.to_string();
          // Forward uses the new weights: half the squared distance to targets below one half.
          odd_micro_batch(engine, 0, 3);
          const std::vector<float> gradient = engine.read_gradient("prime.c");
          EXPECT_NEAR(gradient[100], 100.5f, 1.0f) << run.to_string();
          EXPECT_TRUE(engine.step().applied);
        };
        (void)train_odd(run);
        if (HasFailure()) return;
      }
    }
  }
}

std::string name_of_case(const ::testing::TestParamInfo<std::tuple<int, DataType>>& info) {
  return "ranks" + std::to_string(std::get<0>(info.param)) + "_" +
         std::string(name_of(std::get<1>(info.param)));
}
INSTANTIATE_TEST_SUITE_P(Laws, Offload,
                         ::testing::Combine(::testing::ValuesIn(swept_values({1, 2, 3}, {1, 3})),
                                            ::testing::ValuesIn(swept_values({DataType::float32,
                                                                              DataType::bfloat16},
                                                                             {DataType::bfloat16}))),
                         name_of_case);

}  // namespace
}  // namespace tranche::test
