#include "tests/core/rounds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <set>

namespace tranche::test {
namespace {

TEST(SweepPart, IsReadFromTheEnvironmentsText) {
  EXPECT_EQ(read_sweep_part(nullptr).of, 1);
  EXPECT_EQ(read_sweep_part("").of, 1);
  const SweepPart part = read_sweep_part("1/3");
  EXPECT_EQ(part.part, 1);
  EXPECT_EQ(part.of, 3);
}

TEST(SweepPartDeathTest, ThatIsNoneEndsTheProgram) {
  for (const char* text : {"1", "3/3", "-1/3", "1/0", "1/3x", "x/3", "1/", "/3", " 1/3"}) {
    EXPECT_EXIT((void)read_sweep_part(text), ::testing::ExitedWithCode(2),
                "TRANCHE_TEST_PART is \".*\": it has to be k/n with 0 <= k < n")
        << text;
  }
}

TEST(SweepPart, PartsMeetEachNumberOnceAndEachRemainder) {
  for (const int of : {1, 2, 3, 4, 5}) {
    for (int number = 0; number < 200; ++number) {
      int parts = 0;
      for (int part = 0; part < of; ++part) parts += lies_in({part, of}, number);
      ASSERT_EQ(parts, 1) << number << " of " << of;
    }
    for (int part = 0; part < of; ++part) {
      std::set<int> remainders;
      for (int number = 0; number < of * of; ++number) {
        if (lies_in({part, of}, number)) remainders.insert(number % of);
      }
      EXPECT_EQ(static_cast<int>(remainders.size()), of);
    }
  }
}

// The loops of a sweep, for example 3 x 3 x 4.
TEST(SweepPart, MeetsEveryValueOfEachLoop) {
  for (const std::array<int, 3>& lengths : {std::array{3, 3, 3},
                                            {2, 4, 3},
                                            {3, 4, 3},
                                            {4, 3, 2},
                                            {5, 4, 7},
                                            {3, 2, 6},
                                            {9, 3, 2},
                                            {6, 6, 6},
                                            {1, 5, 5},
                                            {7, 2, 4}}) {
    for (int part = 0; part < 3; ++part) {
      std::array<std::set<int>, 3> met;
      int point = 0;
      for (int a = 0; a < lengths[0]; ++a) {
        for (int b = 0; b < lengths[1]; ++b) {
          for (int c = 0; c < lengths[2]; ++c) {
            if (!lies_in({part, 3}, point++)) continue;
            met[0].insert(a);
            met[1].insert(b);
            met[2].insert(c);
          }
        }
      }
      for (std::size_t loop = 0; loop < 3; ++loop) {
        EXPECT_EQ(static_cast<int>(met[loop].size()), lengths[loop])
            << "loop " << loop << " of " << ::testing::PrintToString(lengths) << ", part " << part;
      }
    }
  }
}

TEST(Rounds, AreThoseOfTheRunsPart) {
  const std::vector<int> taken = rounds(40);
  const SweepPart part = sweep_part();
  if (sanitized) {
    EXPECT_EQ(taken.size(), part.part % 6 == 5 ? 5u : 7u);
  } else {
    for (int round = 0; round < 40; ++round) {
      EXPECT_EQ(lies_in(part, round), std::find(taken.begin(), taken.end(), round) != taken.end()) << round;
    }
  }
  EXPECT_THAT(rounds(1), ::testing::ElementsAre(0)) << "one at least";
  EXPECT_THAT(rounds(0), ::testing::IsEmpty());
}

TEST(SweptValues, HoldTheFewInEveryPart) {
  const std::vector<int> few = swept_values({1, 2, 3}, {2});
  EXPECT_EQ(few.size(), sanitized ? 1u : 3u);
  const std::vector<int> many = swept_values({2, 3, 4, 5, 6, 7, 8}, {3, 6});
  EXPECT_THAT(many, ::testing::IsSupersetOf({3, 6}));
  EXPECT_TRUE(std::is_sorted(many.begin(), many.end()));
  if (!sanitized) {
    EXPECT_EQ(many.size() == 7, sweep_part().of == 1);
  }
}

}  // namespace
}  // namespace tranche::test
