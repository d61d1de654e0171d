// Any two capabilities together: a covering array of short trainings, each with the bits of the same
// arithmetic at stage 0 and the bytes of its plan. tests/combinations.json assigns pairs to these tests.

#include "combination_checks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>
#include <filesystem>
#include <set>
#include <string>

#include "device/cuda_probe.h"
#include "tests/core/rounds.h"

namespace tranche::models {
namespace {

using test::CoveringRow;

/// A folder that is removed with the test, including everything that trainings leave in it.
class Combinations : public ::testing::Test {
 protected:
  Combinations()
      : folder_(std::filesystem::temp_directory_path() /
                ("tranche_combinations_" + std::to_string(::getpid()))) {
    clear();
  }
  ~Combinations() override { std::filesystem::remove_all(folder_); }
  std::string clear() const {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
    return folder_.string();
  }

 private:
  std::filesystem::path folder_;
};

/// Trains every row, and the same arithmetic at stage 0, which inspects its weights wherever a row may.
class EveryRow : public Combinations {
 protected:
  /// Takes every `parts`-th row, beginning with row `part`.
  void expect_bits_of_stage_zero(const std::vector<CombinationAxis>& axes,
                                 const std::vector<CoveringRow>& rows, DeviceKind device, int part = 0,
                                 int parts = 1) {
    for (std::size_t i = static_cast<std::size_t>(part); i < rows.size();
         i += static_cast<std::size_t>(parts)) {
      if (!test::swept(static_cast<int>(i), 6)) continue;
      SCOPED_TRACE("row " + std::to_string(i) + ": " + text_of(axes, rows[i]));
      const Combination whole = combination_of(axes, rows[i]);
      Combination plain = plain_combination_of(axes, rows[i]);
      plain.evaluate = whole.evaluate;
      plain.generate = whole.generate;
      CombinationOutcome expected, actual;
      ASSERT_NO_THROW(expected = train_combination(plain, {.device = device, .folder = clear()}, true));
      ASSERT_NO_THROW(actual = train_combination(whole, {.device = device, .folder = clear()}));
      expect_same(expected, actual, whole);
      if (HasFailure()) return;
    }
  }
};

#if defined(TRANCHE_COMBINATIONS_ON_GPU)
/// Ranks that are threads share a GPU's launch queues, which are sufficient for this many.
constexpr int most_ranks_on_a_gpu = 4;

class EveryRowOnAGpu : public EveryRow {
 protected:
  void SetUp() override {
    const detail::CudaProbe probe = detail::probe_cuda();
    if (probe.devices.empty()) GTEST_SKIP() << probe.problem;
  }
};

// The rows are divided among cases, because a row that hangs or faults on a GPU costs the rest of its case.
constexpr int parts_on_a_gpu = 6;
class CombinationsOnAGpu : public EveryRowOnAGpu, public ::testing::WithParamInterface<int> {};
INSTANTIATE_TEST_SUITE_P(Part, CombinationsOnAGpu, ::testing::Range(0, parts_on_a_gpu));

TEST_P(CombinationsOnAGpu, HaveTheBitsOfStageZero) {
  const std::vector<CombinationAxis> axes = combination_axes();
  static const std::vector<CoveringRow> rows =
      rows_of_every_value(rows_of_few_ranks(axes, most_ranks_on_a_gpu));
  ASSERT_GE(rows.size(), static_cast<std::size_t>(parts_on_a_gpu)) << "a part would be empty";
  if (GetParam() == 0) {
    expect_pairs_of_the_table("CombinationsOnAGpu.HaveTheBitsOfStageZero", axes, rows, {"cuda", "threads"});
  }
  expect_bits_of_stage_zero(axes, rows, DeviceKind::cuda, GetParam(), parts_on_a_gpu);
}

// These take minutes on the emulation.
class CombinationsOnAGpuSlow : public EveryRowOnAGpu {};
TEST_F(CombinationsOnAGpuSlow, HaveTheBitsOfStageZero) {
  const std::vector<CombinationAxis> axes = combination_axes();
  expect_bits_of_stage_zero(axes, rows_of_few_ranks(axes, most_ranks_on_a_gpu), DeviceKind::cuda);
}
#else
class CombinationsOfTwo : public EveryRow {};

TEST_F(CombinationsOfTwo, HaveTheBitsOfStageZero) {
  const std::vector<CombinationAxis> axes = combination_axes();
  const std::vector<CoveringRow> rows = rows_of(axes);
  expect_pairs_of_the_table("CombinationsOfTwo.HaveTheBitsOfStageZero", axes, rows, {"cpu", "threads"});
  std::set<std::string> schedules;
  for (const CoveringRow& row : rows) {
    const Combination c = combination_of(axes, row);
    if (c.pipeline > 1) schedules.insert(c.config.pipeline_schedule);
  }
  EXPECT_GE(schedules.size(), 3u) << "all six are beside each feature in pipeline_bits_test.cpp";
  expect_bits_of_stage_zero(axes, rows, DeviceKind::cpu);
}

TEST_F(CombinationsOfTwo, ArePlannedToTheByte) {
  const std::vector<CombinationAxis> axes = combination_axes();
  const std::vector<CoveringRow> rows = rows_of(axes);
  expect_pairs_of_the_table("CombinationsOfTwo.ArePlannedToTheByte", axes, rows, {"meta"});
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (!test::swept(static_cast<int>(i), 6)) continue;
    SCOPED_TRACE("row " + std::to_string(i) + ": " + text_of(axes, rows[i]));
    Combination whole = combination_of(axes, rows[i]);
    whole.continued = Continued::not_at_all;
    CombinationOutcome measured, planned;
    ASSERT_NO_THROW(measured = train_combination(whole, {.folder = clear()}));
    ASSERT_NO_THROW(planned = plan_combination(whole));
    for (const Tier tier : all_tiers) {
      const TierAccount& plan = planned.tiers[static_cast<std::size_t>(tier)];
      const TierAccount& account = measured.tiers[static_cast<std::size_t>(tier)];
      EXPECT_EQ(plan.peak, account.peak) << name_of(tier);
      EXPECT_EQ(plan.category_peak.bytes, account.category_peak.bytes) << name_of(tier);
      EXPECT_EQ(plan.persistent.bytes, account.persistent.bytes) << name_of(tier);
    }
    EXPECT_EQ(planned.traffic, measured.traffic);
    if (HasFailure()) return;
  }
}

TEST(CoveringRows, HoldEveryPairThatCanMeet) {
  const std::vector<int> counts{4, 3, 1, 2, 3};
  const auto can = [](std::size_t a, int value, std::size_t b, int other) {
    return a != 0 || b != 1 || value == 3 || other == 0;  // for example stages and offloaded parameters
  };
  const std::vector<CoveringRow> rows = test::CoveringRows(counts, can).rows();
  EXPECT_LE(rows.size(), 17u)
      << "of which 15 are needed: nine without the last value of the first axis, six with it";
  for (std::size_t a = 0; a < counts.size(); ++a) {
    for (std::size_t b = a + 1; b < counts.size(); ++b) {
      for (int value = 0; value < counts[a]; ++value) {
        for (int other = 0; other < counts[b]; ++other) {
          const bool met = std::any_of(rows.begin(), rows.end(), [&](const CoveringRow& row) {
            return row[a] == value && row[b] == other;
          });
          EXPECT_EQ(met, can(a, value, b, other)) << a << " " << value << ", " << b << " " << other;
        }
      }
    }
  }
  EXPECT_EQ(test::CoveringRows(counts, can).rows(), rows);
}
#endif

}  // namespace
}  // namespace tranche::models
