#include "engine/offload_share.h"

#include <gtest/gtest.h>

namespace tranche {
namespace {

using detail::units_that_move;
using Moves = std::vector<bool>;

TEST(OffloadShare, WholeUnitsMoveTheLastFirst) {
  const std::vector<std::int64_t> units{100, 300, 300, 300};
  EXPECT_EQ(units_that_move(units, 1), (Moves{true, true, true, true}));
  EXPECT_EQ(units_that_move(units, 0), (Moves{false, false, false, false}));
  EXPECT_EQ(units_that_move(units, 0.9), (Moves{false, true, true, true})) << "exactly";
  EXPECT_EQ(units_that_move(units, 0.89), (Moves{false, true, true, true})) << "at least what was asked";
  EXPECT_EQ(units_that_move(units, 0.6), (Moves{false, false, true, true}));
  EXPECT_EQ(units_that_move(units, 0.95), (Moves{true, true, true, true}))
      << "no unit is small enough to stay";
}

TEST(OffloadShare, WhatHasNoStateDoesNotMove) {
  EXPECT_EQ(units_that_move(std::vector<std::int64_t>{0, 10, 0}, 1), (Moves{false, true, false}));
  EXPECT_TRUE(units_that_move({}, 0.5).empty());
}

}  // namespace
}  // namespace tranche
