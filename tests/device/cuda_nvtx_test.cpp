// NVTX ranges as a profiler receives them; needs no GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "device/cuda/nvtx_ranges.h"
#include "tests/device/cuda_nvtx_log.h"
#include "tranche/device/ledger.h"

namespace tranche {
namespace {

using cuda::nvtx::PhaseRange;
using cuda::nvtx::Range;
using ::testing::ElementsAre;
using testing_support::take_nvtx_log;

TEST(NvtxRanges, NestAndEndWithTheirScope) {
  ASSERT_TRUE(cuda::nvtx::attached());
  take_nvtx_log();
  {
    const Range outer("copy to host");
    const Range inner(std::string_view("matmul and more").substr(0, 6));
  }
  EXPECT_THAT(take_nvtx_log(), ElementsAre("push copy to host", "push matmul", "pop", "pop"));
}

TEST(NvtxRanges, OfPhasesFollowTheLedger) {
  ASSERT_TRUE(cuda::nvtx::attached());
  take_nvtx_log();
  {
    Ledger ledger;
    PhaseRange range;
    ledger.mark_phases([&](std::string_view phase, std::string_view unit) { range.mark(phase, unit); });
    ledger.set_phase("forward", "h.0");
    ledger.set_phase("step");
    ledger.set_phase("idle");
    ledger.set_phase("save");
  }
  const std::vector<std::string> log = take_nvtx_log();
  ASSERT_EQ(log.size(), 6u);
  const auto number = [&](std::size_t line) { return log[line].substr(log[line].find(' ') + 1, 1); };
  EXPECT_EQ(log[0], "start " + number(0) + " forward h.0");
  EXPECT_EQ(log[1], "end " + number(0));
  EXPECT_EQ(log[2], "start " + number(2) + " step");
  EXPECT_EQ(log[3], "end " + number(2));  // the phase "idle" begins no range
  EXPECT_EQ(log[4], "start " + number(4) + " save");
  EXPECT_EQ(log[5], "end " + number(4));
}

}  // namespace
}  // namespace tranche
