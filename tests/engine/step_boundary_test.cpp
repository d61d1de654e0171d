// The end of a step by itself: what ranks agree on, and what an update changes.
#include "engine/step_boundary.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "engine/gradient_reducer.h"
#include "rank_state.h"
#include "tests/core/error_text.h"
#include "tests/offload/test_folder.h"

namespace tranche::test {
namespace {

using detail::GradientReducer;
using detail::StepBoundary;
using detail::StepRecord;

/// One micro-batch in which every trainable gradient of rank r is r + 1, but for `poison` of rank 1's a.b.
void reduce_all(RankState& rank, float poison = 0) {
  GradientReducer reducer(rank.store, rank.config, rank.arena, rank.compute, rank.ledger, rank.scalars);
  rank.arena.begin("train", false);
  reducer.begin_micro_batch(0);
  for (int unit = 0; unit < 2; ++unit) {
    for (int times = 0; times <= unit; ++times) {
      reducer.open(0, unit);
      if (times == 0) {
        for (int index = 0; index < 2; ++index) {
          rank.add(reducer.view(0, unit, index), static_cast<float>(rank.group.rank() + 1));
        }
        if (unit == 0 && rank.group.rank() == 1 && poison != 0) rank.add(reducer.view(0, 0, 1), poison);
      }
      reducer.submit(0, unit, true);
    }
  }
  reducer.end_micro_batch(0);
  rank.compute.synchronize();
  for (const detail::FlatBuffer* flat : rank.store.trainable()) {
    rank.compute.wait(flat->reduce_done);
    rank.compute.wait(flat->gradients_on_host);
  }
  rank.scalars.losses()[0] = 2.5;
  rank.scalars.tokens()[0] = 10;
  rank.arena.end();
}

/// Stage and tier of the optimizer's state.
using TierCase = std::tuple<int, OffloadTier>;
class StepBoundaryStages : public ::testing::TestWithParam<TierCase> {};

TEST_P(StepBoundaryStages, AgreesAndUpdates) {
  const auto [stage, tier] = GetParam();
  const testing::TestFolder folder;
  Config config = plain_config(stage);
  config.offload = in_tiles(512, tier);
  run_thread_ranks(3, [&](int, const CommunicatorFactory& factory) {
    const std::unique_ptr<Communicator> group = factory({});
    RankState rank(config, *group, detail::posix_file_system(), folder.path());
    StepBoundary boundary(rank.store, rank.config, rank.updater, rank.matrices, *group, rank.mesh,
                          *rank.device, rank.scalars);
    boundary.allocate(rank.memory);
    const std::vector<float> before = rank.weight("b.w"), frozen = rank.weight("b.frozen");
    for (const bool applied : {false, true}) {
      reduce_all(rank);
      StepRecord mine;
      mine.learning_rate = 0.25;
      const StepBoundary::Agreement found = boundary.agree(mine, 1, 1);
      EXPECT_EQ(found.loss_sum, 7.5);
      EXPECT_EQ(found.tokens, 30);
      EXPECT_EQ(found.non_finite, "");
      EXPECT_EQ(found.sum_of_squares, 36.0 * (137 * 41 + 7 + 1009)) << "each rank's sum of 1 + 2 + 3, once";
      ASSERT_EQ(found.records.size(), 3u);
      EXPECT_EQ(found.records[2].learning_rate, 0.25);
      OptimizerStep step;
      step.learning_rate = 0.25;
      step.gradient_scale = 0.5f;
      step.apply = applied;
      boundary.update(step);
      std::vector<float> expected = before;
      if (applied) {
        for (float& value : expected) value -= 0.25f * (6.0f * 0.5f);
      }
      EXPECT_EQ(rank.weight("b.w"), expected);
      EXPECT_EQ(rank.weight("b.frozen"), frozen);
    }
    EXPECT_TRUE(boundary.replay_problems().empty());
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, StepBoundaryStages,
                         ::testing::Values(TierCase{0, OffloadTier::none}, TierCase{1, OffloadTier::none},
                                           TierCase{3, OffloadTier::none}, TierCase{2, OffloadTier::cpu},
                                           TierCase{3, OffloadTier::nvme}));

TEST(StepBoundary, NamesTheFirstElementThatIsNotFinite) {
  run_thread_ranks(2, [](int, const CommunicatorFactory& factory) {
    const std::unique_ptr<Communicator> group = factory({});
    RankState rank(plain_config(2), *group);
    StepBoundary boundary(rank.store, rank.config, rank.updater, rank.matrices, *group, rank.mesh,
                          *rank.device, rank.scalars);
    boundary.allocate(rank.memory);
    reduce_all(rank, std::numeric_limits<float>::infinity());
    EXPECT_EQ(boundary.agree({}, 1, 1).non_finite, "a.b at element 0");
  });
}

}  // namespace
}  // namespace tranche::test
