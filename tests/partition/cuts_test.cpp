#include "partition/cuts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>
#include <set>

#include "tranche/core/error.h"

namespace tranche::detail {
namespace {

using testing::ElementsAre;

double largest_share(const std::vector<double>& work, const std::vector<int>& cuts) {
  double largest = 0;
  for (std::size_t s = 0; s < cuts.size(); ++s) {
    const auto end = s + 1 < cuts.size() ? work.begin() + cuts[s + 1] : work.end();
    largest = std::max(largest, std::accumulate(work.begin() + cuts[s], end, 0.0));
  }
  return largest;
}

/// The minimum of the largest share over all ways to cut.
double least_largest_share(const std::vector<double>& work, int stages) {
  double least = 1e300;
  std::vector<int> cuts{0};
  const std::function<void()> extend = [&] {
    if (static_cast<int>(cuts.size()) == stages) {
      least = std::min(least, largest_share(work, cuts));
      return;
    }
    for (int next = cuts.back() + 1; next < static_cast<int>(work.size()); ++next) {
      cuts.push_back(next);
      extend();
      cuts.pop_back();
    }
  };
  extend();
  return least;
}

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.message();
  }
  return "nothing was thrown";
}

TEST(Cuts, BalancedHaveTheLeastLargestShare) {
  std::mt19937 random(4);
  for (int round = 0; round < 500; ++round) {
    std::vector<double> work(1 + random() % 9);
    for (double& one : work) one = static_cast<double>(random() % 8);
    const int stages = 1 + static_cast<int>(random() % work.size());
    const std::vector<int> cuts = balanced_cuts(work, stages);
    ASSERT_EQ(static_cast<int>(cuts.size()), stages);
    ASSERT_TRUE(std::adjacent_find(cuts.begin(), cuts.end(), std::greater_equal<>()) == cuts.end());
    ASSERT_LT(cuts.back(), static_cast<int>(work.size())) << "no stage is empty";
    EXPECT_EQ(largest_share(work, cuts), least_largest_share(work, stages));
  }
}

/// Uses that read common tensors, each of which a stage holds once.
TEST(Cuts, BalancedCountWhatUsesShareOnce) {
  const std::vector<std::vector<int>> reads{{0, 1}, {1}, {1, 2}, {3}};
  const std::vector<double> sizes{1, 8, 1, 9};
  const auto share = [&](int begin, int end) {
    std::set<int> held;
    for (int i = begin; i < end; ++i) held.insert(reads[i].begin(), reads[i].end());
    return std::accumulate(held.begin(), held.end(), 0.0,
                           [&](double sum, int one) { return sum + sizes[one]; });
  };
  EXPECT_THAT(balanced_cuts(4, 2, share), ElementsAre(0, 3)) << "10 and 9; sums would cut 9 + 8 and 9 + 9";
}

TEST(Cuts, OfGpt2LeaveTheStageWithTheHeadFewerBlocks) {
  const auto work = [](double sequence) {
    std::vector<double> uses{0};
    const double width = 768;
    for (int block = 0; block < 12; ++block) uses.push_back(24 * width * width + 4 * sequence * width);
    uses.push_back(2 * 50257 * width);
    return uses;
  };
  EXPECT_THAT(balanced_cuts(work(1024), 2), ElementsAre(0, 9)) << "8 blocks, and 4 with the head";
  EXPECT_THAT(balanced_cuts(work(256), 2), ElementsAre(0, 10)) << "9 blocks, and 3 with the head";
}

TEST(Cuts, EqualGiveTheFirstStagesOneMore) {
  EXPECT_THAT(equal_cuts(14, 4), ElementsAre(0, 4, 8, 11));
  EXPECT_THAT(equal_cuts(3, 3), ElementsAre(0, 1, 2));
}

TEST(Cuts, ListedAreCheckedOneByOne) {
  EXPECT_THAT(listed_cuts(std::vector{2, 5}, 6, 3), ElementsAre(0, 2, 5));
  EXPECT_EQ(refusal([] { (void)listed_cuts(std::vector{2}, 6, 3); }),
            "[2]: it has 1 numbers; 3 stages have 2 cuts");
  EXPECT_EQ(
      refusal([] {
        (void)listed_cuts(std::vector{4, 4}, 6, 3);
      }),
      "[4, 4]: 4 leaves a stage without a unit; it has to be above 4 and below 6, the number of the model's "
      "units");
  EXPECT_EQ(
      refusal([] {
        (void)listed_cuts(std::vector{2, 6}, 6, 3);
      }),
      "[2, 6]: 6 leaves a stage without a unit; it has to be above 2 and below 6, the number of the model's "
      "units");
}

TEST(Cuts, MoreStagesThanUsesAreRefused) {
  for (const auto& call : {std::function<void()>([] { (void)equal_cuts(6, 8); }), std::function<void()>([] {
                             (void)balanced_cuts(std::vector<double>(6, 1), 8);
                           })}) {
    EXPECT_EQ(refusal(call), "the model has 6 units to cut, so 6 stages at most, not 8");
  }
}

}  // namespace
}  // namespace tranche::detail
