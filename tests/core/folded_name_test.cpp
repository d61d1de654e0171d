#include "core/folded_name.h"

#include <gtest/gtest.h>

namespace tranche::detail {
namespace {

TEST(FoldedName, BlocksOfAModelHaveOneName) {
  EXPECT_EQ(with_folded_numbers("transformer.h.12 master"), "transformer.h.* master");
  EXPECT_EQ(with_folded_numbers("h.0"), with_folded_numbers("h.123"));
  EXPECT_EQ(with_folded_numbers("4.7"), "*.*");
}

TEST(FoldedName, NumbersInsideOfWordsStay) {
  EXPECT_EQ(with_folded_numbers("fp16 ln1"), "fp16 ln1");
  EXPECT_EQ(with_folded_numbers(""), "");
}

}  // namespace
}  // namespace tranche::detail
