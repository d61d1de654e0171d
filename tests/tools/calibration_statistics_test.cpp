#include "tools/plan/calibration_statistics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>

namespace tranche::tools {
namespace {

using testing::ElementsAre;

TEST(CalibrationStatistics, MedianIsTheMiddleHoweverFarTheOthersAre) {
  EXPECT_EQ(median({3}), 3);
  EXPECT_EQ(median({1000, 2, 1}), 2);
  EXPECT_EQ(median({4, 1, 3, 2}), 3);  // the upper of two
}

TEST(CalibrationStatistics, EachRateIsTheMedianOfItsPassesAlone) {
  const auto pass = [](double a, double b, double c) {
    return std::vector<planner::ProductTable>{{DataType::float32, "nn", {64}, {a, b}},
                                              {DataType::bfloat16, "tn", {64}, {c}}};
  };
  // Each pass has one rate that was disturbed.
  const std::vector<planner::ProductTable> tables =
      median_tables({pass(1, 20, 300), pass(10, 2, 310), pass(12, 22, 3)});
  ASSERT_EQ(tables.size(), 2U);
  EXPECT_THAT(tables[0].rates, ElementsAre(10, 20));
  EXPECT_THAT(tables[1].rates, ElementsAre(300));
  EXPECT_EQ(tables[1].layout, "tn");
  EXPECT_EQ(tables[1].dtype, DataType::bfloat16);
  EXPECT_THAT(median_tables({pass(7, 8, 9)})[0].rates, ElementsAre(7, 8));
}

TEST(CalibrationStatistics, EachPointOfAKernelIsTheMedianOfItsPassesAlone) {
  const auto pass = [](double small, double large) {
    return std::vector<planner::KernelTable>{
        {"cast", DataType::bfloat16, "bytes", {{{1024, small}, {4096, large}}}}};
  };
  const std::vector<planner::KernelTable> tables = median_tables({pass(1, 50), pass(2, 6), pass(90, 5)});
  ASSERT_EQ(tables.size(), 1U);
  EXPECT_THAT(tables[0].time.points, ElementsAre(std::pair(1024.0, 2.0), std::pair(4096.0, 6.0)));
  EXPECT_EQ(tables[0].name, "cast");
}

TEST(CalibrationStatistics, TablesTakeThePlaceOfThoseOfTheSameKernelAndDtype) {
  const auto table = [](const char* name, DataType dtype, double seconds) {
    return planner::KernelTable{name, dtype, "bytes", {{{1024, seconds}}}};
  };
  planner::ComputeShare share;
  share.kernels = {table("cast", DataType::float32, 1), table("cast", DataType::bfloat16, 2)};
  replace_tables(share, {table("cast", DataType::bfloat16, 3), table("gelu", DataType::bfloat16, 4)});
  ASSERT_EQ(share.kernels.size(), 3U);
  EXPECT_EQ(share.kernels[0].time.points[0].second, 1);
  EXPECT_EQ(share.kernels[1].time.points[0].second, 3);
  EXPECT_EQ(share.kernels[2].name, "gelu");
}

TEST(CalibrationStatistics, RanksThatWaitTakeWhatTheSlowestTakes) {
  // A median step takes 100 ms on this rank and 110 ms until all ranks have met: 10 % more, independent of
  // single steps.
  const SharedSteps visit{{0.110, 0.500, 0.108, 0.110, 0.109}, {0.100, 0.100, 0.099, 0.300, 0.101}};
  EXPECT_DOUBLE_EQ(waiting_factor({visit}), 0.110 / 0.100);
  const SharedSteps more{{0.012, 0.012, 0.012}, {0.010, 0.010, 0.010}};
  const SharedSteps less{{0.0105, 0.0105, 0.0105}, {0.010, 0.010, 0.010}};
  EXPECT_DOUBLE_EQ(waiting_factor({more, visit, less}), 0.110 / 0.100);
}

TEST(CalibrationStatistics, ShortStepsAndFewStepsSayNothingOfWaiting) {
  const SharedSteps few{{0.3, 0.3}, {0.1, 0.1}};
  const SharedSteps brief{{14e-3, 14e-3, 14e-3}, {7e-3, 7e-3, 7e-3}};
  EXPECT_EQ(waiting_factor({few, brief}), 1);
  EXPECT_EQ(waiting_factor({}), 1);
  const SharedSteps counts{{0.12, 0.12, 0.12}, {0.1, 0.1, 0.1}};
  EXPECT_DOUBLE_EQ(waiting_factor({few, brief, counts}), 0.12 / 0.1);
}

TEST(CalibrationStatistics, NobodyIsFasterForWaiting) {
  const SharedSteps early{{0.09, 0.09, 0.09}, {0.1, 0.1, 0.1}};
  EXPECT_EQ(waiting_factor({early}), 1);
}

TEST(CalibrationStatistics, SlowingDownReachesAllThatIsComputed) {
  planner::ComputeShare share;
  share.launch_seconds = 1e-6;
  share.memory_bytes_per_second = 40e9;
  share.products.push_back({DataType::float32, "nn", {64}, {300, 600}});
  share.kernels.push_back({"gelu_forward", DataType::float32, "bytes", {{{1024, 2e-6}, {4096, 4e-6}}}});
  slow_down(share, 1.25);
  EXPECT_DOUBLE_EQ(share.launch_seconds, 1.25e-6);
  EXPECT_THAT(share.products[0].rates, ElementsAre(240, 480));
  EXPECT_DOUBLE_EQ(share.kernels[0].time.points[0].second, 2.5e-6);
  EXPECT_DOUBLE_EQ(share.kernels[0].time.points[1].second, 5e-6);
  EXPECT_EQ(share.kernels[0].time.points[0].first, 1024);
  EXPECT_EQ(share.memory_bytes_per_second, 40e9);  // measured on streams, independent of waiting
}

}  // namespace
}  // namespace tranche::tools
