#pragma once
/// Compares plans of drawn cases with the memory and traffic of their runs.

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "memory_draw.h"
#include "tests/core/sweep.h"

namespace tranche::models {

inline void expect_equal(const TierAccount& planned, const TierAccount& measured) {
  EXPECT_EQ(planned.peak, measured.peak);
  EXPECT_EQ(planned.current.bytes, measured.current.bytes);
  EXPECT_EQ(planned.persistent.bytes, measured.persistent.bytes);
  EXPECT_EQ(planned.category_peak.bytes, measured.category_peak.bytes);
  EXPECT_EQ(planned.at_peak.bytes, measured.at_peak.bytes);
  EXPECT_EQ(planned.peak_phase, measured.peak_phase);
}

/// Plans and measures each case of this run.
inline void expect_plans_hold(const std::function<MemoryCase(std::uint64_t)>& draw_case,
                              const test::Sweep& cases) {
  for (const std::uint64_t index : test::rounds(cases)) {
    const MemoryCase drawn = draw_case(index);
    SCOPED_TRACE("case(" + std::to_string(index) + "): " + drawn.to_string());
    const MemoryRun planned = plan_case(drawn, 3, 2);
    const std::vector<MemoryRun> runs = measure_case(drawn, 3, 2);
    const MemoryRun& measured = runs[static_cast<std::size_t>(drawn.rank)];
    for (std::size_t tier = 0; tier < tier_count; ++tier)
      expect_equal(planned.tiers[tier], measured.tiers[tier]);
    EXPECT_EQ(planned.traffic, measured.traffic);
    EXPECT_EQ(planned.step.block, measured.step.block);
    for (const MemoryRun& run : runs) {
      EXPECT_EQ(run.device().peak, measured.device().peak) << "all ranks hold the same";
      EXPECT_EQ(run.device().at_peak.total(), run.device().peak) << "categories add up";
    }
    if (::testing::Test::HasFailure()) return;  // one failing case is enough to reproduce
  }
}

}  // namespace tranche::models
