// Gradients and weights that are sent as int8 blocks: the same bits for every partition of the state, exact
// traffic and memory, and the loss of accuracy.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <mutex>
#include <string>
#include <vector>

#include "on_ranks.h"
#include "same_bits.h"
#include "saving_fixture.h"
#include "tests/core/rounds.h"
#include "tranche/kernels/quantization.h"

namespace tranche::test {
namespace {

using ::testing::HasSubstr;

enum class Travels { gradients, weights, both };
constexpr Travels all_travels[] = {Travels::gradients, Travels::weights, Travels::both};

OddRun quantized(OddRun run, Travels what) {
  run.quantized_gradients = what != Travels::weights;
  run.quantized_weights = what != Travels::gradients;
  return run;
}

class QuantizedBits : public ::testing::TestWithParam<std::tuple<Travels, DataType>> {};

TEST_P(QuantizedBits, OverStagesTiersAndSettings) {
  int point = 3 * static_cast<int>(std::get<0>(GetParam())) + (std::get<1>(GetParam()) == DataType::float32);
  for (const int ranks : {1, 2, 3, 4}) {
    for (const ReductionPolicy policy : {ReductionPolicy::boundary, ReductionPolicy::micro_batch}) {
      OddRun run;
      run.dtype = std::get<1>(GetParam());
      run = quantized(run, std::get<0>(GetParam()));
      run.ranks = ranks;
      run.policy = policy;
      run.accumulation = 2;
      run.reduction_group = ranks == 4 ? 3 : 0;
      run.steps = 3;
      run.accumulation_dtype = ranks == 3 ? DataType::bfloat16 : DataType::float32;
      OddRun other = run;
      other.quantized_gradients = other.quantized_weights = false;
      OddRun plain = run;
      plain.reduction_group = ranks == 4 ? 3 : ranks;
      plain.overlap = false;
      plain.plan_memory = false;
      const OddResult expected = train_odd(plain);
      EXPECT_FALSE(expected.weights == train_odd(other).weights) << "it has an effect";
      for (run.stage = 0; run.stage <= 3; ++run.stage) {
        for (int which = 0; which < settings_without_effect; ++which) {
          // Every setting is combined with every stage, number of ranks and policy in some case.
          if (point++ % 11 != 0 || !swept(point / 11, 3)) continue;
          OddRun one = run;
          one.reduction_group = plain.reduction_group;
          apply_setting_without_effect(one, which);
          const OddResult result = train_odd(one);
          expect_same(expected, result, one);
          EXPECT_EQ(result.wire_elements, result.formula_elements) << one.to_string();
          EXPECT_EQ(result.wire_bytes, result.formula_bytes) << one.to_string();
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST_P(QuantizedBits, OptimizersWithWholeMatricesSumsAndNoState) {
  int point = 0;
  for (const char* optimizer : {"Muon", "Lamb", "SGD"}) {
    for (const int ranks : {1, 3}) {
      OddRun run;
      run.dtype = std::get<1>(GetParam());
      run = quantized(run, std::get<0>(GetParam()));
      run.ranks = ranks;
      run.optimizer = optimizer;
      run.accumulation = 2;
      run.steps = 3;
      run.frozen = ranks != 3;
      run.also_frozen = ranks == 3 ? "" : "prime.d";
      run.policy = ReductionPolicy::micro_batch;
      const OddResult expected = train_odd(run);
      for (run.stage = 1; run.stage <= 3; ++run.stage) {
        if (!sampled(point++, 5)) continue;
        const OddResult result = train_odd(run);
        expect_same(expected, result, run);
        EXPECT_EQ(result.wire_bytes, result.formula_bytes) << run.to_string();
      }
    }
  }
}

TEST_P(QuantizedBits, CopiesOfAShardedModelHaveThoseOfOne) {
  int point = 0;
  for (int stage = 0; stage <= 3; ++stage) {
    OddRun run;
    run.dtype = std::get<1>(GetParam());
    run = quantized(run, std::get<0>(GetParam()));
    run.ranks = 4;
    run.stage = stage;
    run.reduction_group = 2;
    run.policy = ReductionPolicy::micro_batch;
    run.accumulation = 2;
    run.steps = 3;
    const OddResult flat = train_odd(run);
    for (const char* mesh : {"replicate=2, shard=2", "shard=2, replicate=2"}) {
      for (const Replicate replicate : {Replicate::all, Replicate::parameters}) {
        if (stage == 0 && replicate == Replicate::parameters) continue;
        if (!sampled(point++, 3)) continue;
        OddRun copies = run;
        copies.mesh = mesh;
        copies.replicate = replicate;
        const OddResult result = train_odd(copies);
        if (mesh[0] == 'r') expect_same(flat, result, copies);
        EXPECT_EQ(result.wire_elements, result.formula_elements) << copies.to_string();
        EXPECT_EQ(result.wire_bytes, result.formula_bytes) << copies.to_string();
      }
    }
    run.reduction_group = 0;
    run.mesh = "replicate=*, shard=1";  // nothing is sent within a replica, but the values are rounded
                                        // nevertheless
    const OddResult alone = train_odd(run);
    EXPECT_EQ(alone.wire_bytes, alone.formula_bytes) << run.to_string();
  }
}

TEST_P(QuantizedBits, AnyNumberOfRanksWhereItMustNotMatter) {
  OddRun one;
  one.dtype = std::get<1>(GetParam());
  one = quantized(one, std::get<0>(GetParam()));
  one.micro_batches = 12;
  one.samples_per_micro_batch = 2;
  one.clipping = 0.5;
  const OddResult expected = train_odd(one);
  for (const int ranks : {2, 3, 4, 5, 8}) {
    OddRun run = one;
    run.ranks = ranks;
    run.stage = ranks % 4;
    apply_setting_without_effect(run, ranks);
    const OddResult result = train_odd(run);
    expect_same(expected, result, run);
    EXPECT_EQ(result.wire_elements, result.formula_elements) << run.to_string();
    EXPECT_EQ(result.wire_bytes, result.formula_bytes) << run.to_string();
  }
}

TEST_P(QuantizedBits, ASkippedStepNamesTheElementAndLeavesWeightsAsTheyWere) {
  for (const bool skips : {false, true}) {
    kernels::Digest expected;
    for (const int ranks : {1, 3}) {
      for (int stage = 0; stage <= 3; ++stage) {
        OddRun run;
        run.dtype = std::get<1>(GetParam());
        run = quantized(run, std::get<0>(GetParam()));
        run.ranks = ranks;
        run.stage = stage;
        const kernels::Digest digest = digest_after(run, [&](Engine& engine, Runtime& runtime) {
          whole_step(engine, runtime, 0);
          EXPECT_TRUE(engine.step().applied);
          if (skips) {
            const kernels::Digest before = engine.state_digest();
            whole_step(engine, runtime, 1, runtime.rank() == runtime.size() - 1 ? "mixed.g" : "");
            const StepResult skipped = engine.step();
            EXPECT_FALSE(skipped.applied);
            EXPECT_EQ(skipped.skipped_because, "gradient of mixed.g at element 2 is not finite");
            EXPECT_EQ(engine.state_digest(), before);
          }
          whole_step(engine, runtime, 2);
          EXPECT_TRUE(engine.step().applied);
        });
        if (stage == 0) expected = digest;
        EXPECT_EQ(digest, expected) << run.to_string();
      }
    }
  }
}

TEST_P(QuantizedBits, GradientsReadInAStepAreThoseThatItReduces) {
  if (std::get<0>(GetParam()) == Travels::weights) return;
  const auto gradient = [&](int stage, ReductionPolicy policy, std::int64_t bucket) {
    std::vector<float> values;
    std::mutex mutex;
    OddRun run;
    run.dtype = std::get<1>(GetParam());
    run = quantized(run, std::get<0>(GetParam()));
    run.ranks = 3;
    run.stage = stage;
    run.policy = policy;
    run.reduce_bucket = bucket;
    on_ranks(run, [&](Engine& engine, Runtime& runtime) {
      whole_step(engine, runtime, 0);
      std::vector<float> mine = engine.read_gradient("prime.c");
      (void)engine.step();
      const std::lock_guard lock(mutex);
      if (runtime.rank() == 0) values = std::move(mine);
    });
    return values;
  };
  const std::vector<float> expected = gradient(2, ReductionPolicy::micro_batch, 1 << 20);
  for (const std::int64_t bucket : {1, 1 << 20}) {
    EXPECT_EQ(gradient(1, ReductionPolicy::boundary, bucket), expected);
    EXPECT_EQ(gradient(3, ReductionPolicy::boundary, bucket), expected);
  }
}

std::string name_of_travels(const ::testing::TestParamInfo<std::tuple<Travels, DataType>>& info) {
  const char* const names[] = {"gradients", "weights", "both"};
  return std::string(names[static_cast<int>(std::get<0>(info.param))]) + "_" +
         std::string(name_of(std::get<1>(info.param)));
}
INSTANTIATE_TEST_SUITE_P(Dtypes, QuantizedBits,
                         ::testing::Combine(::testing::ValuesIn(all_travels),
                                            ::testing::ValuesIn(swept_values({DataType::float32,
                                                                              DataType::bfloat16},
                                                                             {DataType::bfloat16}))),
                         name_of_travels);

TEST(Quantized, GradientsOfFp16ComputeTravelWithALossScale) {
  OddRun run;
  run.quantized_gradients = true;
  run.dtype = DataType::float16;
  run.communication = DataType::float32;
  run.ranks = 3;
  run.accumulation = 2;
  run.policy = ReductionPolicy::micro_batch;
  const OddResult expected = train_odd(run);
  for (run.stage = 1; run.stage <= 3; ++run.stage) expect_same(expected, train_odd(run), run);
}

// A mean that lacks a rank, or decodes blocks with another rank's scale, would also have the same bits in
// every stage. So the error is checked. A code is off by at most half a step, 1 / 254 of the block's greatest
// magnitude, and by 0.29 steps in the square mean. For the gradients here, sums of three uniform numbers,
// that is some 0.006 of their square mean.
TEST(Quantized, MeansOverRanksAreThoseOfPlainGradientsButForTheRounding) {
  for (const int ranks : {2, 3, 4}) {
    for (int stage = 0; stage <= 3; ++stage) {
      std::vector<float> means[2];
      for (const bool in_blocks : {false, true}) {
        OddRun run;
        run.ranks = ranks;
        run.stage = stage;
        run.quantized_gradients = in_blocks;
        run.reduce_bucket = stage % 2 == 0 ? 1 : 1 << 20;
        on_ranks(run, [&](Engine& engine, Runtime& runtime) {
          whole_step(engine, runtime, 0);
          std::vector<float> mine = engine.read_gradient("prime.c");
          (void)engine.step();
          if (runtime.rank() == 0) means[in_blocks] = std::move(mine);
        });
      }
      double squares = 0, errors = 0;
      ASSERT_EQ(means[0].size(), means[1].size());
      for (std::size_t i = 0; i < means[0].size(); ++i) {
        squares += double{means[0][i]} * means[0][i];
        errors += std::pow(double{means[1][i]} - means[0][i], 2);
      }
      EXPECT_GT(errors, 0) << "it has an effect";
      EXPECT_LT(std::sqrt(errors / squares), 0.01) << ranks << " ranks, stage " << stage;
    }
  }
}

/// A step sends 65 bytes for 64 elements and no others, whereas the compared step sends two bytes for each
/// element.
TEST(Quantized, StagesSendSixtyFiveBytesForSixtyFourElements) {
  for (int stage = 0; stage <= 3; ++stage) {
    OddRun run;
    run.ranks = 4;
    run.stage = stage;
    run.dtype = DataType::bfloat16;
    run.frozen = false;
    run.policy = ReductionPolicy::micro_batch;
    run.accumulation = 2;
    const std::int64_t whole = train_odd(run).wire_bytes[0];
    run.quantized_gradients = true;
    const std::int64_t gradients = train_odd(run).wire_bytes[0];
    run.quantized_weights = true;
    const std::int64_t both = train_odd(run).wire_bytes[0];
    // P of the odd model on four ranks: 1024 + 1024 + 1024 + 1024, padded.
    const std::int64_t sent = 3 * (1024 + 2048 + 1024 + 1024) / 4;  // elements, each time
    const std::int64_t saved = 2 * sent - sent * 65 / 64;
    EXPECT_EQ(whole - gradients, 2 * saved) << stage;
    const std::int64_t gathers = stage == 0 ? 0 : 1;
    if (stage < 3) {
      EXPECT_EQ(gradients - both, gathers * saved) << stage;
    } else {
      EXPECT_EQ(both * 128, whole * 65) << "all that stage 3 sends";
    }
  }
}

TEST(Quantized, MemoryIsPlannedAndStepsAllocateNothing) {
  for (const Travels what : all_travels) {
    for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
      for (const int ranks : {1, 3}) {
        for (int stage = 0; stage <= 3; ++stage) {
          OddRun run;
          run.dtype = dtype;
          run = quantized(run, what);
          run.ranks = ranks;
          run.stage = stage;
          run.accumulation = 2;
          run.reduce_bucket = stage == 2 ? 900 : 500'000'000;
          run.persistent = stage == 3 ? 200 : 0;
          const OddResult measured = train_odd(run);
          OddRun plan = run;
          plan.device = DeviceKind::meta;
          const OddResult planned = train_odd(plan);
          EXPECT_EQ(planned.accounts[0].peak, measured.accounts[0].peak) << run.to_string();
          EXPECT_EQ(planned.accounts[0].category_peak.bytes, measured.accounts[0].category_peak.bytes)
              << run.to_string();
          EXPECT_EQ(planned.wire_elements[0], measured.wire_elements[0]) << run.to_string();
          EXPECT_EQ(planned.wire_bytes[0], measured.wire_bytes[0]) << run.to_string();
          EXPECT_EQ(measured.memory_calls_per_late_step[0], 0) << run.to_string();
          const auto& state = measured.state_bytes[0];
          const auto& kept = measured.accounts[0].persistent;
          EXPECT_GE(kept[Category::optimizer], state.optimizer) << run.to_string();
          EXPECT_GE(kept[Category::parameters], state.parameters) << run.to_string();
          EXPECT_LT(
              kept[Category::optimizer] + kept[Category::parameters] - state.optimizer - state.parameters,
              4096)
              << "rounding of allocations: " << run.to_string();
        }
      }
    }
  }
}

/// The weights of a tensor that a pass reads, and the loss sum of one element each.
std::vector<float> weights_in(Engine& engine, int unit, int index) {
  std::vector<float> values;
  const GatheredUnit weights = engine.gather({unit});
  const ConstTensorView view = weights.tensor(index);
  for (std::int64_t i = 0; i < view.elements(); ++i) {
    values.push_back(view.dtype == DataType::float32 ? view.as<float>()[i]
                                                     : to_float(view.as<bfloat16>()[i]));
  }
  return values;
}

std::vector<float> weights_in_evaluation(Engine& engine, int unit, int index) {
  engine.begin_evaluation();
  engine.begin_micro_batch();
  std::vector<float> values = weights_in(engine, unit, index);
  end_with(engine, 0, 1);
  engine.end_evaluation();
  return values;
}

TEST(Quantized, EvaluationReadsTheMasterWeightsAndTrainingTheBlocks) {
  for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
    for (const int ranks : {1, 2, 3}) {
      for (int stage = 0; stage <= 3; ++stage) {
        for (const OffloadTier tier : {OffloadTier::none, OffloadTier::cpu}) {
          OddRun run;
          run.dtype = dtype;
          run.ranks = ranks;
          run.stage = stage;
          run.quantized_weights = true;
          run.offload.optimizer = tier;
          run.offload.tile_elements = 4096;
          run.persistent = ranks == 3 ? 200 : 0;
          kernels::Digest undisturbed = digest_after(run, [](Engine& engine, Runtime& runtime) {
            for (int step = 0; step < 3; ++step) {
              whole_step(engine, runtime, step);
              (void)engine.step();
            }
          });
          kernels::Digest looked_at = digest_after(run, [&](Engine& engine, Runtime& runtime) {
            for (int step = 0; step < 3; ++step) {
              std::vector<float> exact = engine.read_weight("prime.c");
              if (dtype == DataType::bfloat16) {
                for (float& value : exact) value = to_float(to_bfloat16(value));
              }
              EXPECT_EQ(weights_in_evaluation(engine, 1, 0), exact) << run.to_string();
              {
                const InferenceScope scope(engine);
                EXPECT_EQ(weights_in(engine, 1, 0), exact) << run.to_string();
              }
              whole_step(engine, runtime, step);
              (void)engine.step();
            }
          });
          EXPECT_EQ(looked_at, undisturbed) << run.to_string();
          if (tier == OffloadTier::cpu) continue;
          // Training reads the weights that the blocks of the unit's buffer encode.
          on_ranks(run, [&](Engine& engine, Runtime&) {
            std::vector<float> exact = engine.read_weight("prime.c");
            engine.begin_micro_batch();
            const std::vector<float> seen = weights_in(engine, 1, 0);
            float greatest = 0, furthest = 0;
            for (std::size_t i = 0; i < 256; ++i) {  // the buffer's first block belongs to this tensor
              if (dtype == DataType::bfloat16) exact[i] = to_float(to_bfloat16(exact[i]));
              greatest = std::max(greatest, std::abs(exact[i]));
            }
            const float scale = greatest / 127.0f;
            for (std::size_t i = 0; i < 256; ++i) {
              float wanted = std::nearbyint(exact[i] * (127.0f / greatest)) * scale;
              if (dtype == DataType::bfloat16) wanted = to_float(to_bfloat16(wanted));
              EXPECT_EQ(seen[i], wanted) << run.to_string() << " element " << i;
              furthest = std::max(furthest, std::abs(seen[i] - exact[i]));
            }
            EXPECT_GT(furthest, 0.0f);
            for (int unit = 0; unit < 4; ++unit) engine.skip_gradients({unit});
            end_with(engine, 0, 1);
            (void)engine.step();
          });
        }
      }
    }
  }
}

TEST(Quantized, WeightsThatAreWrittenAreRoundedLikeOthers) {
  kernels::Digest expected;
  for (int stage = 0; stage <= 3; ++stage) {
    OddRun run;
    run.ranks = 3;
    run.stage = stage;
    run.dtype = DataType::bfloat16;
    run.quantized_weights = true;
    const kernels::Digest digest = digest_after(run, [](Engine& engine, Runtime& runtime) {
      whole_step(engine, runtime, 0);
      (void)engine.step();
      std::vector<float> values(1009);
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = 0.001f * static_cast<float>(i);
      engine.write_weight("prime.c", values);
      whole_step(engine, runtime, 1);
      (void)engine.step();
    });
    if (stage == 0) expected = digest;
    EXPECT_EQ(digest, expected) << stage;
  }
}

using QuantizedSaving = Saving;

TEST_F(QuantizedSaving, AResumedRunHasTheBitsOfOneThatWentOn) {
  int point = 0;
  for (const Travels what : all_travels) {
    for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
      for (int stage = 0; stage <= 3; ++stage) {
        if (!swept(point++)) continue;
        OddRun run;
        run.dtype = dtype;
        run.ranks = 3;
        run.stage = stage;
        run = quantized(run, what);
        const auto train = [](Engine& engine, Runtime& runtime, int from, int to) {
          for (int step = from; step < to; ++step) {
            whole_step(engine, runtime, step);
            (void)engine.step();
          }
        };
        const kernels::Digest whole =
            digest_after(run, [&](Engine& engine, Runtime& runtime) { train(engine, runtime, 0, 4); });
        const std::string at = path(std::to_string(static_cast<int>(what)) + std::to_string(stage) +
                                    std::string(name_of(dtype)));
        on_ranks(run, [&](Engine& engine, Runtime& runtime) {
          train(engine, runtime, 0, 2);
          (void)weights_in_evaluation(engine, 1, 0);
          engine.save(at, {.wait = true});
        });
        OddRun other = run;
        other.stage = (stage + 1) % 4;
        const kernels::Digest resumed = digest_after(other, [&](Engine& engine, Runtime& runtime) {
          (void)engine.load(at);
          train(engine, runtime, 2, 4);
        });
        EXPECT_EQ(resumed, whole) << run.to_string();
      }
    }
  }
}

TEST_F(QuantizedSaving, EvaluationIsThatOfARunWithoutBlocks) {
  std::vector<float> of_blocks, without;
  OddRun run;
  run.dtype = DataType::bfloat16;
  run.ranks = 2;
  run.stage = 3;
  run = quantized(run, Travels::both);
  on_ranks(run, [&](Engine& engine, Runtime& runtime) {
    whole_step(engine, runtime, 0);
    (void)engine.step();
    engine.save(path(), {.wait = true});
    const std::vector<float> values = weights_in_evaluation(engine, 3, 2);
    if (runtime.rank() == 0) of_blocks = values;
  });
  run.quantized_gradients = run.quantized_weights = false;
  run.stage = 1;
  on_ranks(run, [&](Engine& engine, Runtime& runtime) {
    (void)engine.load(path());
    const std::vector<float> values = weights_in_evaluation(engine, 3, 2);
    if (runtime.rank() == 0) without = values;
  });
  EXPECT_EQ(of_blocks, without);
}

TEST(Quantized, IsSaidAtTheStart) {
  OddRun run;
  run.ranks = 2;
  run.stage = 3;
  run.dtype = DataType::bfloat16;
  run = quantized(run, Travels::both);
  on_ranks(run, [](Engine& engine, Runtime&) {
    EXPECT_THAT(engine.summary(),
                HasSubstr("compute bf16, communication int8 blocks, weights in training int8 blocks, "));
  });
}

}  // namespace
}  // namespace tranche::test
