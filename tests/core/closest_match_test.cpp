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
  // Texts of this length are on the heap, where a read before the first letter is found by AddressSanitizer.
  EXPECT_EQ(closest_match("sub_group_sizes_of_all", {"sub_group_size_of_all"}), "sub_group_size_of_all");
}

TEST(ClosestMatch, OfEquallyFarNamesIsTheOneThatKeepsAllLetters) {
  EXPECT_EQ(closest_match("llama-3-8b", {"llama-2-7b", "llama-3.1-8b", "llama-2-13b"}), "llama-3.1-8b");
  EXPECT_EQ(closest_match("llama-3-8b", {"llama-3.1-8b", "llama-2-7b"}), "llama-3.1-8b");
  EXPECT_EQ(closest_match("llama-3-7b", {"llama-2-7b", "llama-3.1-8b"}), "llama-2-7b") << "the nearest first";
}

}  // namespace
}  // namespace tranche
