#include "core/closest_match.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace tranche {
namespace {

using detail::closest_match;

TEST(ClosestMatch, FindsTypingErrorsAndNothingFarAway) {
  const std::vector<std::string> names = {"stage", "overlap_comm", "fp16", "bf16"};
  EXPECT_EQ(closest_match("stgae", names), "stage");
  EXPECT_EQ(closest_match("STAGE", names), "stage");
  EXPECT_EQ(closest_match("overlap", names), "overlap_comm");
  EXPECT_EQ(closest_match("fp_16", names), "fp16");
  EXPECT_EQ(closest_match("elephant", names), "");
  EXPECT_EQ(closest_match("", names), "");
  EXPECT_EQ(closest_match("stage", {}), "");
}

}  // namespace
}  // namespace tranche
