// Hand-made graphs with known answers.

#include "planner/simulation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tranche/core/error.h"

namespace tranche::planner {
namespace {

SimulatedTask task(int lane, double seconds, std::vector<int> after = {}, std::vector<Claim> claims = {}) {
  return {lane, seconds, std::move(claims), std::move(after)};
}

TEST(Simulation, LanesOverlapAndWaitsHold) {
  // compute 2 | gather 3 | compute that needs it 1
  const auto spans = simulate({task(0, 2), task(1, 3), task(0, 1, {1})}, {true, true}, {});
  EXPECT_DOUBLE_EQ(spans[1].end, 3);
  EXPECT_DOUBLE_EQ(spans[2].begin, 3);
  EXPECT_DOUBLE_EQ(spans[2].end, 4);
  EXPECT_EQ(spans[2].cause, 1);
}

TEST(Simulation, WhatIsHiddenCostsNothing) {
  const auto spans = simulate({task(0, 5), task(1, 3), task(0, 1, {1})}, {true, true}, {});
  EXPECT_DOUBLE_EQ(spans[2].begin, 5);
  EXPECT_EQ(spans[2].cause, 0);
}

TEST(Simulation, ClaimsBeyondCapacitySlowAllAlike) {
  // Two tasks of 2 s on one core: the first half of the longer one is shared.
  const std::vector<Claim> one{{0, 1.0}};
  const auto spans = simulate({task(0, 2, {}, one), task(1, 1, {}, one)}, {true, true}, {1.0});
  EXPECT_DOUBLE_EQ(spans[1].end, 2);  // at half speed
  EXPECT_DOUBLE_EQ(spans[0].end, 3);  // 1 s of it is done by then, the rest runs alone
}

TEST(Simulation, ClaimsWithinCapacityDoNotSlow) {
  const auto spans = simulate({task(0, 2, {}, {{0, 1.5}}), task(1, 1, {}, {{0, 0.5}})}, {true, true}, {2.0});
  EXPECT_DOUBLE_EQ(spans[0].end, 2);
  EXPECT_DOUBLE_EQ(spans[1].end, 1);
}

TEST(Simulation, OnlyTheWorstResourceSlows) {
  const auto spans =
      simulate({task(0, 1, {}, {{0, 1}, {1, 1}}), task(1, 1, {}, {{0, 1}}), task(2, 1, {}, {{1, 3}})},
               {true, true, true}, {1.0, 1.0});
  EXPECT_DOUBLE_EQ(spans[1].end, 2);  // it shares a resource only with the first task
  EXPECT_DOUBLE_EQ(spans[2].end, 4);  // 4 times slower while both run
  EXPECT_DOUBLE_EQ(spans[0].end, 4);
}

TEST(Simulation, UnorderedLanesTakeWhatIsReadyFirst) {
  // The first of lane 1 becomes ready at 4, the second at 1.
  const auto spans = simulate({task(0, 1), task(0, 3), task(1, 2, {1}), task(1, 2, {0})}, {true, false}, {});
  EXPECT_DOUBLE_EQ(spans[3].begin, 1);
  EXPECT_DOUBLE_EQ(spans[2].begin, 4);
  // One task at a time.
  const auto busy = simulate({task(0, 1), task(1, 5), task(1, 2, {0})}, {true, false}, {});
  EXPECT_DOUBLE_EQ(busy[2].begin, 5);
  EXPECT_EQ(busy[2].cause, 1);
}

TEST(Simulation, TasksOfNoTimeAreOrderOnly) {
  const auto spans = simulate({task(0, 1), task(1, 0, {0}), task(0, 0), task(1, 2)}, {true, true}, {});
  EXPECT_DOUBLE_EQ(spans[1].end, 1);
  EXPECT_DOUBLE_EQ(spans[2].end, 1);
  EXPECT_DOUBLE_EQ(spans[3].end, 3);
}

TEST(Simulation, RefusesWhatCannotBeRun) {
  const auto text = [](const std::vector<SimulatedTask>& tasks, const std::vector<bool>& lanes) {
    try {
      simulate(tasks, lanes, {});
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_THAT(text({task(0, 1, {1}), task(0, 1)}, {true}),
              testing::HasSubstr("2 tasks that wait for each other"));
  EXPECT_THAT(text({task(3, 1)}, {true}), testing::HasSubstr("task 0 has no such lane"));
  EXPECT_THAT(text({task(0, 1, {7})}, {true}), testing::HasSubstr("is after no such task"));
  EXPECT_THAT(text({task(0, 1, {}, {{0, 1}})}, {true}), testing::HasSubstr("claims no such resource"));
}

}  // namespace
}  // namespace tranche::planner
