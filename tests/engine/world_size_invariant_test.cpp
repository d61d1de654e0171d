// The same result for every number of ranks: tranche.world_size_invariant.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <mutex>
#include <string>
#include <vector>

#include "on_ranks.h"
#include "same_bits.h"
#include "saving_fixture.h"
#include "tests/core/rounds.h"
#include "tranche/kernels/matmul.h"

namespace tranche::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// Twelve micro-batches a step, some one sample short. Ranks without samples compute infinities.
OddRun invariant(int ranks, DataType dtype) {
  OddRun run;
  run.ranks = ranks;
  run.dtype = dtype;
  run.micro_batches = 12;
  run.samples_per_micro_batch = 2;
  run.clipping = 0.5;
  return run;
}

class InvariantBits : public ::testing::TestWithParam<DataType> {};

TEST_P(InvariantBits, EveryNumberOfRanksHasTheBitsOfOne) {
  const OddResult expected = train_odd(invariant(1, GetParam()));
  EXPECT_LT(expected.steps[1].clip_coefficient, 1.0) << "clipping has an effect";
  int point = static_cast<int>(GetParam());
  for (const int ranks : {1, 2, 3, 4, 5, 6, 8}) {
    for (int stage = 0; stage <= 3; ++stage) {
      for (int which = 0; which < settings_without_effect; ++which) {
        // Each setting is combined with every number of ranks and every stage.
        if ((which + stage + ranks) % 4 != 0 || !swept(point++, 5)) continue;
        OddRun run = invariant(ranks, GetParam());
        run.stage = stage;
        apply_setting_without_effect(run, which);
        const OddResult result = train_odd(run);
        expect_same(expected, result, run);
        EXPECT_EQ(result.wire_elements, result.formula_elements) << run.to_string();
        EXPECT_EQ(result.wire_bytes, result.formula_bytes) << run.to_string();
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(InvariantBits, OptimizersWithSumsAndWithoutFrozenTensorsToo) {
  for (const char* optimizer : {"Lamb", "SGD", "Lion"}) {
    OddRun one = invariant(1, GetParam());
    one.optimizer = optimizer;
    one.frozen = false;
    const OddResult expected = train_odd(one);
    for (const int ranks : {3, 5, 8}) {
      OddRun run = one;
      run.ranks = ranks;
      run.stage = ranks % 4;
      expect_same(expected, train_odd(run), run);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, InvariantBits,
                         ::testing::ValuesIn(swept_values({DataType::float32, DataType::bfloat16,
                                                           DataType::float16},
                                                          {DataType::float16})),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST(WorldSizeInvariant, TakesTheMemoryOfMicroBatchReductionAndIsPlanned) {
  for (const int ranks : {1, 3, 5}) {
    for (int stage = 0; stage <= 3; ++stage) {
      OddRun run = invariant(ranks, DataType::bfloat16);
      run.stage = stage;
      const OddResult result = train_odd(run);
      OddRun plan = run;
      plan.device = DeviceKind::meta;
      const OddResult planned = train_odd(plan);
      EXPECT_EQ(planned.accounts[0].peak, result.accounts[0].peak) << run.to_string();
      EXPECT_EQ(planned.wire_elements[0], result.wire_elements[0]) << run.to_string();
      EXPECT_EQ(planned.wire_bytes[0], result.wire_bytes[0]) << run.to_string();
      OddRun other = run;
      other.micro_batches = 0;
      other.accumulation = (12 + ranks - 1) / ranks;
      other.policy = ReductionPolicy::micro_batch;
      const OddResult of_micro_batches = train_odd(other);
      EXPECT_EQ(result.accounts[0].peak, of_micro_batches.accounts[0].peak) << run.to_string();
      EXPECT_EQ(result.accounts[0].category_peak.bytes, of_micro_batches.accounts[0].category_peak.bytes)
          << run.to_string();
      EXPECT_EQ(result.wire_elements[0], of_micro_batches.wire_elements[0])
          << "rank 0 has samples in every round: " << run.to_string();
      if (ranks < 5 || stage == 3) continue;
      // On five ranks the last of three rounds has samples for two ranks; the others only gather.
      EXPECT_EQ(result.wire_elements[4] * 4, of_micro_batches.wire_elements[4] * 3) << run.to_string();
    }
  }
}

TEST(WorldSizeInvariant, GradientsReadInAStepAreThoseOfOneRank) {
  const auto gradient = [](int ranks) {
    std::vector<float> values;
    std::mutex mutex;
    OddRun run = invariant(ranks, DataType::bfloat16);
    run.stage = 2;
    on_ranks(run, [&](Engine& engine, Runtime& runtime) {
      for (std::int64_t m = 0; m < engine.config().accumulation_steps; ++m) {
        odd_micro_batch(engine, (m * ranks + runtime.rank()) * 2, 2);
      }
      std::vector<float> mine = engine.read_gradient("prime.c");
      (void)engine.step();
      const std::lock_guard lock(mutex);
      if (runtime.rank() == 0) values = std::move(mine);
    });
    return values;
  };
  const std::vector<float> one = gradient(1);
  for (const int ranks : {4, 5}) EXPECT_EQ(gradient(ranks), one) << ranks;
}

using InvariantSaving = Saving;

/// The next step, with samples that the run has not used yet.
StepResult next_step(Engine& engine, Runtime& runtime) {
  const std::int64_t first = engine.samples(), size = engine.config().micro_batch_size;
  for (std::int64_t m = 0; m < engine.config().accumulation_steps; ++m) {
    odd_micro_batch(engine, first + (m * runtime.size() + runtime.rank()) * size, size);
  }
  return engine.step();
}

TEST_F(InvariantSaving, GoesOnWithAnyNumberOfRanks) {
  for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
    kernels::Digest expected, found;
    on_ranks(invariant(1, dtype), [&](Engine& engine, Runtime& runtime) {
      for (int step = 0; step < 6; ++step) (void)next_step(engine, runtime);
      expected = engine.state_digest();
    });
    std::string from;
    for (const int ranks : {4, 3, 8}) {
      OddRun run = invariant(ranks, dtype);
      run.stage = ranks % 4;
      const std::string to = path(std::string(name_of(dtype)) + std::to_string(ranks));
      on_ranks(run, [&](Engine& engine, Runtime& runtime) {
        if (!from.empty()) {
          EXPECT_THAT(engine.load(from).notes, IsEmpty()) << "nothing differs from here on";
        }
        for (int step = 0; step < 2; ++step) (void)next_step(engine, runtime);
        engine.save(to, {.wait = true});
        const kernels::Digest mine = engine.state_digest();
        if (runtime.rank() == 0) found = mine;
      });
      from = to;
    }
    EXPECT_EQ(found, expected);
  }
}

TEST_F(InvariantSaving, ARunWithAnotherSumIsTold) {
  const auto notes_of = [&](const OddRun& saved, const OddRun& loaded) {
    std::vector<std::string> notes;
    std::filesystem::remove_all(path());
    on_ranks(saved, [&](Engine& engine, Runtime&) { engine.save(path(), {.wait = true}); });
    on_ranks(loaded, [&](Engine& engine, Runtime& runtime) {
      const LoadResult result = engine.load(path());
      if (runtime.rank() == 0) notes = result.notes;
    });
    return notes;
  };
  const char* const text =
      "saved by a run without tranche.world_size_invariant, or with another train_batch_size";
  const OddRun run = invariant(2, DataType::float32);
  OddRun plain = run, other = run;
  plain.micro_batches = 0;
  other.micro_batches = 11;
  EXPECT_THAT(notes_of(plain, run), ElementsAre(HasSubstr(text)));
  EXPECT_THAT(notes_of(other, run), ElementsAre(HasSubstr(text)));
  EXPECT_THAT(notes_of(run, plain),
              ElementsAre(HasSubstr("saved by a run with tranche.world_size_invariant, which this one is "
                                    "without: sums over ranks round differently from here on")));
}

TEST(WorldSizeInvariant, WhatIsRefused) {
  on_ranks(invariant(1, DataType::float32), [](Engine& engine, Runtime&) {
    EXPECT_THAT(message_of<LogicError>([&] { engine.set_batch(1, 1); }),
                HasSubstr("set_batch() with tranche.world_size_invariant, where train_batch_size and "
                          "train_micro_batch_size_per_gpu stay as they are"));
  });
  // The number of threads is not required only on CPUs on which oneDNN never computes bf16 GEMMs.
  const bool asks = !kernels::matmul_path(DeviceKind::cpu, DataType::bfloat16).starts_with("widened");
  const auto start = [](DataType dtype) {
    return message_of<ConfigurationError>([&] {
      on_ranks(
          invariant(2, dtype), [](Engine&, Runtime&) {},
          [](Config& config, RuntimeOptions&) { config.threads = 0; });
    });
  };
  EXPECT_EQ(start(DataType::float32), nothing_thrown);
  EXPECT_THAT(
      start(DataType::bfloat16),
      asks ? HasSubstr("oneDNN may multiply bf16, with bits that depend on the number of threads, which "
                       "is the node's cores over its ranks; give tranche.threads (--threads), the "
                       "same for every number of ranks")
           : HasSubstr(nothing_thrown));
}

}  // namespace
}  // namespace tranche::test
