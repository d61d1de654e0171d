#include "core/nearest.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace tranche {
namespace {

TEST(Nearest, FindsTypingErrorsAndNothingFarAway) {
  const std::vector<std::string> names = {"stage", "overlap_comm", "fp16", "bf16"};
  EXPECT_EQ(nearest("stgae", names), "stage");
  EXPECT_EQ(nearest("STAGE", names), "stage");
  EXPECT_EQ(nearest("overlap", names), "overlap_comm");
  EXPECT_EQ(nearest("fp_16", names), "fp16");
  EXPECT_EQ(nearest("elephant", names), "");
  EXPECT_EQ(nearest("", names), "");
  EXPECT_EQ(nearest("stage", {}), "");
}

}  // namespace
}  // namespace tranche
