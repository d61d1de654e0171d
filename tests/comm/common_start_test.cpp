#include "tests/comm/common_start.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

namespace tranche::test {
namespace {

TEST(CommonStart, NoRankBeginsBeforeAllHaveMadeTheirEngines) {
  constexpr int ranks = 4;
  for (int round = 0; round < 50; ++round) {
    CommonStart start(ranks);
    std::atomic<int> made = 0, early = 0;
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&] {
        CommonStart::Rank started(start);
        ++made;
        started.await_others();
        early += made < ranks;
      });
    }
    threads.clear();
    EXPECT_EQ(early, 0);
  }
}

TEST(CommonStart, ARankThatFailsBeforeHoldsNoOtherUp) {
  CommonStart start(3);
  std::atomic<int> began = 0;
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        CommonStart::Rank started(start);
        if (rank == 1) throw std::runtime_error("no memory for its engine");
        started.await_others();
        ++began;
      } catch (const std::runtime_error&) {
      }
    });
  }
  threads.clear();
  EXPECT_EQ(began, 2);
}

}  // namespace
}  // namespace tranche::test
