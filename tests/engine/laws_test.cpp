// Law 1 (the same bits for all stages, bucket sizes, depths, overlap settings, delays and poison), exact
// memory and exact traffic.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "odd_model.h"
#include "partition/flat_layout.h"
#include "same_bits.h"
#include "tests/core/rounds.h"
#include "tests/core/sweep.h"
#include "tranche/core/random.h"

namespace tranche::test {
namespace {

using ::testing::Each;

class SameBits : public ::testing::TestWithParam<std::tuple<int, DataType>> {};

TEST_P(SameBits, OverStages) {
  int point = std::get<0>(GetParam());
  for (const ReductionPolicy policy : {ReductionPolicy::boundary, ReductionPolicy::micro_batch}) {
    for (const std::int64_t accumulation : {1, 4}) {
      OddRun run;
      std::tie(run.ranks, run.dtype) = GetParam();
      run.steps = 3;  // memory is dynamic in the first step, recorded in the second, planned in the third
      run.policy = policy;
      run.accumulation = accumulation;
      const OddResult expected = train_odd(run);
      ASSERT_LT(expected.steps.back().loss, expected.steps.front().loss) << "the odd model does not learn";
      for (run.stage = 1; run.stage <= 3; ++run.stage) {
        if (swept(point++)) expect_same(expected, train_odd(run), run);
      }
    }
  }
}

/// fp32 (no second copy of weights, no rounding in communication) and bf16. fp16 behaves like bf16 and is
/// among the draws.
class SameBitsOverSettings : public SameBits {};

TEST_P(SameBitsOverSettings, OfEachStage) {
  OddRun base;
  std::tie(base.ranks, base.dtype) = GetParam();
  base.accumulation = 2;
  int point = base.ranks;
  for (base.stage = 0; base.stage <= 3; ++base.stage) {
    const OddResult expected = train_odd(base);
    std::vector<OddRun> variants;
    const auto vary = [&](auto&& change) {
      variants.push_back(base);
      change(variants.back());
    };
    vary([](OddRun& r) { r.overlap = false; });
    vary([](OddRun& r) { r.reduce_bucket = r.gather_bucket = 257; });
    vary([](OddRun& r) { r.faults = {0.0005, 7}, r.reduce_bucket = 1500, r.gather_bucket = 2000; });
    vary([](OddRun& r) { r.poison = true; });
    vary([](OddRun& r) { r.plan_memory = false; });
    if (base.stage == 3) {  // lower stages have no gathers to prefetch
      vary([](OddRun& r) { r.depth = 1; });
      vary([](OddRun& r) { r.depth = 4; });
    }
    vary([](OddRun& r) { r.faults = {0.0005, 8}, r.poison = true, r.depth = 3, r.reduce_bucket = 700; });
    for (const OddRun& run : variants) {
      if (swept(point++)) expect_same(expected, train_odd(run), run);
    }
  }
}

std::string name_of_case(const ::testing::TestParamInfo<std::tuple<int, DataType>>& info) {
  return "ranks" + std::to_string(std::get<0>(info.param)) + "_" +
         std::string(name_of(std::get<1>(info.param)));
}
constexpr int most_ranks = sanitized ? 3 : 5;
INSTANTIATE_TEST_SUITE_P(Laws, SameBits,
                         ::testing::Combine(::testing::Range(1, most_ranks + 1),
                                            ::testing::Values(DataType::float32, DataType::bfloat16,
                                                              DataType::float16)),
                         name_of_case);
INSTANTIATE_TEST_SUITE_P(Laws, SameBitsOverSettings,
                         ::testing::Combine(::testing::Range(1, most_ranks + 1),
                                            ::testing::ValuesIn(swept_values({DataType::float32,
                                                                              DataType::bfloat16},
                                                                             {DataType::bfloat16}))),
                         name_of_case);

TEST(SameBits, OverDrawnConfigurations) {
  // Each draw is compared with stage 0 without overlap and plan. The line printed on failure reproduces it.
  AxesMet axes;
  const RandomKey key{20, RandomPurpose::test, 1};
  std::uint64_t draw = 0;
  const auto pick = [&](std::uint32_t n) { return static_cast<int>(random_bits(key, draw++) % n); };
  for (int i = 0; i < 40; ++i) {
    OddRun run;
    run.ranks = 1 + pick(5);
    run.accumulation = 1 + pick(3);
    run.dtype = std::array{DataType::float32, DataType::bfloat16,
                           DataType::float16}[static_cast<std::size_t>(pick(3))];
    run.policy = pick(2) == 0 ? ReductionPolicy::boundary : ReductionPolicy::micro_batch;
    run.reduction_group = 1 + pick(6);
    run.optimizer = std::array{"AdamW", "Adam", "SGD"}[static_cast<std::size_t>(pick(3))];
    run.accumulation_dtype = pick(4) == 0 ? DataType::bfloat16 : DataType::float32;
    run.frozen = pick(2) == 0;
    run.clipping = pick(2);
    run.samples_per_micro_batch = 2 + pick(3);
    OddRun plain = run;
    plain.overlap = false;
    plain.plan_memory = false;
    run.stage = pick(4);
    run.overlap = pick(4) != 0;
    run.depth = 1 + pick(4);
    run.reduce_bucket = 256 + pick(4000);
    run.gather_bucket = 256 + pick(4000);
    run.poison = pick(2) == 0;
    run.faults = {pick(2) * 0.0003, static_cast<std::uint64_t>(i)};
    axes.meet("ranks", run.ranks);
    axes.meet("stage", run.stage);
    axes.meet("dtype", run.dtype);
    axes.meet("policy", run.policy);
    axes.meet("accumulation", run.accumulation);
    axes.meet("optimizer", run.optimizer);
    axes.meet("depth", run.depth);
    axes.meet("frozen", run.frozen);
    axes.meet("poison", run.poison);
    if (swept(i, 4)) expect_same(train_odd(plain), train_odd(run), run);
  }
  axes.expect("ranks", {1, 2, 3, 4, 5});
  axes.expect("stage", {0, 1, 2, 3});
  axes.expect("dtype", {DataType::float32, DataType::bfloat16, DataType::float16});
  axes.expect("policy", {ReductionPolicy::boundary, ReductionPolicy::micro_batch});
  axes.expect<std::int64_t>("accumulation", {1, 2, 3});
  axes.expect<std::string>("optimizer", {"AdamW", "Adam", "SGD"});
  axes.expect("depth", {1, 2, 3, 4});
  axes.expect("frozen", {false, true});
  axes.expect("poison", {false, true});
}

TEST(SameBits, ReductionGroupIsPartOfTheArithmetic) {
  // Five ranks summed as ((0+1+2)+(3+4)) and as (0+1+2+3+4) round differently. Otherwise the law would not
  // reveal that the reduction order is ignored.
  OddRun run;
  run.ranks = 5;
  run.reduction_group = 5;
  const OddResult flat = train_odd(run);
  run.reduction_group = 3;
  EXPECT_FALSE(train_odd(run).weights == flat.weights);
}

// --- Exact memory ------------------------------------------------------------------------------------------

/// The table in docs/internals/arithmetic.md times the number of parameters: bytes of all ranks without
/// padding.
double table_bytes(int stage, ReductionPolicy policy, int ranks, DataType dtype, double g,
                   double parameters) {
  const double n = ranks;
  double each = 0;
  const bool boundary = policy == ReductionPolicy::boundary;
  if (dtype == DataType::float32) {
    // fp32 has no second weight copy. The policy micro_batch keeps g/N from stage 1 on, boundary the whole
    // accumulator.
    const double gradient = stage == 0 || boundary ? g : g / n;
    const double state = stage == 0 ? 8 : 8 / n;
    const double weight = stage == 3 ? 4 / n : 4;
    each = weight + gradient + state;
  } else if (stage == 0) {
    each = 14 + g;
  } else if (stage < 3) {
    each = boundary ? 2 + g + 12 / n : 2 + (g + 12) / n;
  } else {
    each = boundary ? g + 14 / n : (g + 14) / n;
  }
  return each * parameters * n;
}

TEST(ExactMemory, ModelStateEqualsTheTable) {
  int point = 0;
  for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
    for (const ReductionPolicy policy : {ReductionPolicy::boundary, ReductionPolicy::micro_batch}) {
      for (const DataType accumulation : {DataType::float32, DataType::bfloat16}) {
        for (int ranks = 1; ranks <= 5; ++ranks) {
          for (int stage = 0; stage <= 3; ++stage) {
            if (!swept(point++, 3)) continue;
            OddRun run;
            run.ranks = ranks;
            run.stage = stage;
            run.dtype = dtype;
            run.policy = policy;
            run.accumulation_dtype = accumulation;
            run.frozen = false;
            run.steps = 1;
            const OddResult result = train_odd(run);
            std::int64_t used = 0;
            for (std::size_t r = 0; r < result.accounts.size(); ++r) {
              const CategoryBytes& held = result.accounts[r].persistent;
              const Engine::StateBytes& formula = result.state_bytes[r];
              EXPECT_EQ(held[Category::parameters], formula.parameters) << run.to_string();
              EXPECT_EQ(held[Category::gradients], formula.gradients) << run.to_string();
              EXPECT_EQ(held[Category::optimizer], formula.optimizer) << run.to_string();
              used += held[Category::parameters] + held[Category::gradients] + held[Category::optimizer] -
                      formula.padding;
            }
            const double parameters = static_cast<double>(odd_model().parameters());
            EXPECT_DOUBLE_EQ(static_cast<double>(used),
                             table_bytes(stage, policy, ranks, dtype,
                                         static_cast<double>(size_of(accumulation)), parameters))
                << run.to_string();
          }
        }
      }
    }
  }
}

TEST(ExactMemory, CategoriesAddUpAndStepsAllocateNothing) {
  for (int stage = 0; stage <= 3; ++stage) {
    OddRun run;
    run.ranks = 3;
    run.stage = stage;
    run.dtype = DataType::bfloat16;
    run.accumulation = 2;
    run.steps = 6;
    const OddResult result = train_odd(run);
    EXPECT_THAT(result.memory_calls_per_late_step, Each(0)) << run.to_string();
    for (const TierAccount& account : result.accounts) EXPECT_EQ(account.at_peak.total(), account.peak);
  }
}

TEST(ExactMemory, MetaRunPredictsThePeakToTheByte) {
  const RandomKey key{21, RandomPurpose::test, 2};
  std::uint64_t draw = 0;
  const auto pick = [&](std::uint32_t n) { return static_cast<int>(random_bits(key, draw++) % n); };
  for (int i = 0; i < 40; ++i) {
    OddRun run;
    run.ranks = 1 + pick(5);
    run.stage = pick(4);
    run.accumulation = 1 + pick(3);
    run.dtype = pick(2) == 0 ? DataType::float32 : DataType::bfloat16;
    run.policy = pick(2) == 0 ? ReductionPolicy::boundary : ReductionPolicy::micro_batch;
    run.depth = 1 + pick(3);
    run.frozen = pick(2) == 0;
    run.steps = 3;
    if (!swept(i, 4)) continue;
    OddRun plan = run;
    plan.device = DeviceKind::meta;
    const OddResult measured = train_odd(run);
    const OddResult predicted = train_odd(plan);
    EXPECT_EQ(predicted.accounts[0].peak, measured.accounts[0].peak) << run.to_string();
    EXPECT_EQ(predicted.accounts[0].category_peak.bytes, measured.accounts[0].category_peak.bytes)
        << run.to_string();
    EXPECT_EQ(predicted.wire_elements[0], measured.wire_elements[0]) << run.to_string();
  }
}

// --- Exact traffic -----------------------------------------------------------------------------------------

TEST(ExactTraffic, ElementsOnTheWireEqualTheFormula) {
  // The odd model gathers units 0..3 forward, 0 again, then 3, 2, 1, 0: the tied unit three times, others
  // twice.
  int point = 0;
  for (const ReductionPolicy policy : {ReductionPolicy::boundary, ReductionPolicy::micro_batch}) {
    for (int ranks = 1; ranks <= 5; ++ranks) {
      for (int stage = 0; stage <= 3; ++stage) {
        for (const std::int64_t accumulation : {1, 3}) {
          if (!swept(point++, 3)) continue;
          OddRun run;
          run.ranks = ranks;
          run.stage = stage;
          run.policy = policy;
          run.accumulation = accumulation;
          run.frozen = false;
          run.steps = 4;
          const OddResult result = train_odd(run);
          std::int64_t padded = 0, tied = 0;
          const ModelSpec model = odd_model();
          for (const UnitSpec& unit : model.units()) {
            std::vector<std::int64_t> sizes;
            for (const TensorSpec& tensor : unit.tensors) sizes.push_back(tensor.shape.elements());
            const std::int64_t size = detail::FlatLayout(sizes, ranks).padded_elements();
            padded += size;
            if (unit.name == "tied") tied = size;
          }
          const std::int64_t m = accumulation;
          const std::int64_t reductions = policy == ReductionPolicy::boundary ? 1 : m;
          const std::int64_t gathers = stage < 3 ? padded : m * (2 * padded + tied);
          const std::int64_t expected =
              ranks == 1 ? 0 : (reductions * padded + gathers) / ranks * (ranks - 1);
          EXPECT_THAT(result.wire_elements, Each(expected)) << run.to_string();
          EXPECT_THAT(result.formula_elements, Each(expected)) << run.to_string();
        }
      }
    }
  }
}

}  // namespace
}  // namespace tranche::test
