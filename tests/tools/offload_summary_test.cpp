#include "tools/train/offload_summary.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tranche::tools {
namespace {

StepResult step(double scale) {
  StepResult result;
  result.seconds = 0.100 * scale;
  result.exposed_offload_seconds = 0.020 * scale;
  result.exposed_gather_seconds = 0.003 * scale;
  result.exposed_reduce_seconds = 0.002 * scale;
  result.offload = {0.050 * scale, 0.025 * scale, 0.090 * scale, 0.0051 * scale};
  return result;
}

TEST(OffloadSummary, SaysWhatIsExposedBesideTheBound) {
  EXPECT_EQ(OffloadSummary::line_of(step(1)),
            "offload: 20.0 ms of a step of 100 ms exposed (20.0%); bound 90.0 ms, the longest of compute "
            "75.0, copies "
            "out 50.0, copies back 25.0, host update 90.0, disk 5.10");
}

TEST(OffloadSummary, SaysWhyTheDiskWasIdle) {
  StepResult result = step(1);
  result.offload.disk = 0.060;
  result.disk_idle = {0.010, 0.020, 0.030};
  EXPECT_THAT(OffloadSummary::line_of(result),
              ::testing::EndsWith("disk 60.0; disk idle 50.0% of the time: nothing asked for 8.3%, no buffer "
                                  "free 16.7%, waiting for the norm 25.0%"));
}

TEST(OffloadSummary, LeavesTheFirstTwoStepsOutOnceThereAreOthers) {
  OffloadSummary summary;
  EXPECT_EQ(summary.line(), "offload: no steps");
  summary.add(step(10));
  summary.add(step(10));
  EXPECT_EQ(summary.line(), OffloadSummary::line_of(step(10)));
  summary.add(step(1));
  summary.add(step(3));
  EXPECT_EQ(summary.line(), OffloadSummary::line_of(step(2)));
}

}  // namespace
}  // namespace tranche::tools
