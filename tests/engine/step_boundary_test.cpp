// The step boundary without an engine: the values on which ranks agree, and the effects of an update.
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

/// One micro-batch in which every trainable gradient of rank r is r + 1, except that of a.b on rank 1, which
/// is `poison`.
void reduce_all(RankState& rank, float poison = 0) {
  GradientReducer reducer(rank.store, rank.arena, rank.compute, rank.ledger, rank.scalars, nullptr);
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
                          *rank.device, rank.scalars, rank.pieces);
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
                          *rank.device, rank.scalars, rank.pieces);
    boundary.allocate(rank.memory);
    reduce_all(rank, std::numeric_limits<float>::infinity());
    EXPECT_EQ(boundary.agree({}, 1, 1).non_finite, "a.b at element 0");
  });
}

/// The results of a step of LAMB on two_units().
struct Outcome {
  double squares = 0;
  std::string non_finite;
  kernels::Digest before, after;
};

/// Unit a is on the first stage, unit b on the second.
detail::Stages two_stages() {
  return {2, {0, 1}, {0, 1}, {{{0}, {}}, {{0}, {}}, {{1}, {}}, {{1}, {}}}, {}, {}};
}

/// A step in which rank r of a unit's group adds r + 1 to each of its gradients. `ranks` ranks share all
/// units, or with `staged` two groups of as many ranks hold one unit each.
Outcome lamb_step(int ranks, bool staged, int stage, float poison) {
  Outcome outcome;
  Config config = plain_config(stage);
  config.optimizer.type = "Lamb";
  config.optimizer.learning_rate = 0.5;
  run_thread_ranks(staged ? 2 * ranks : ranks, [&](int number, const CommunicatorFactory& factory) {
    const std::unique_ptr<Communicator> all = factory({});
    std::unique_ptr<Communicator> own = staged ? all->split(number / ranks, number) : nullptr;
    Communicator& group = staged ? *own : *all;
    const int held = number / ranks;  // the unit
    const Staged stages{
        Mesh::parse(staged ? "pipeline=2, shard=*" : "shard=*", all->size()), two_stages(),
        [&](const detail::Placement& placement, int buffer) {
          return detail::BufferRanks{placement.holds(buffer, number) ? &group : nullptr, nullptr};
        }};
    RankState rank(config, *all, detail::posix_file_system(), {}, {}, staged ? &stages : nullptr);
    StepBoundary boundary(rank.store, rank.config, rank.updater, rank.matrices, *all, rank.mesh, *rank.device,
                          rank.scalars, rank.pieces);
    boundary.allocate(rank.memory);
    const kernels::Digest before = rank.access().digest(detail::TensorAccess::Digested::weights_and_state);
    GradientReducer reducer(rank.store, rank.arena, rank.compute, rank.ledger, rank.scalars, nullptr);
    rank.arena.begin("train", false);
    reducer.begin_micro_batch(0);
    for (const int unit : {0, 1, 1}) {
      if (staged && unit != held) continue;
      reducer.open(0, unit);
      for (int index = 0; index < 2; ++index) {
        rank.add(reducer.view(0, unit, index), static_cast<float>(group.rank() + 1));
      }
      if (unit == 1 && group.rank() == 1 && poison != 0) rank.add(reducer.view(0, 1, 0), poison);
      reducer.submit(0, unit, true);
    }
    EXPECT_EQ(reducer.missing(0), "") << "a rank owes gradients of what it holds alone";
    reducer.end_micro_batch(0);
    rank.compute.synchronize();
    for (const detail::FlatBuffer* flat : rank.store.trainable()) rank.compute.wait(flat->reduce_done);
    rank.scalars.losses()[0] = 2.5;
    rank.scalars.tokens()[0] = staged && held == 0 ? 0 : 10;
    rank.arena.end();
    const StepBoundary::Agreement found = boundary.agree({}, 1, 1);
    EXPECT_EQ(found.tokens, 10 * ranks);
    OptimizerStep step;
    step.step = 1;
    step.learning_rate = 0.5;
    step.gradient_scale = 0.125f;
    step.apply = found.non_finite.empty();
    boundary.update(step);
    rank.compute.synchronize();
    const kernels::Digest after = rank.access().digest(detail::TensorAccess::Digested::weights_and_state);
    if (number == 0) outcome = {found.sum_of_squares, found.non_finite, before, after};
    all->barrier({"test", "end"}).wait();
  });
  return outcome;
}

TEST(StepBoundary, OfRanksWithDifferentUnitsIsThatOfAllUnitsEverywhere) {
  for (const int stage : {0, 1, 2, 3}) {
    for (const float poison : {0.0f, std::numeric_limits<float>::infinity()}) {
      const Outcome flat = lamb_step(2, false, stage, poison), staged = lamb_step(2, true, stage, poison);
      EXPECT_EQ(staged.squares, flat.squares) << stage;
      EXPECT_EQ(staged.non_finite, flat.non_finite) << stage;
      EXPECT_EQ(flat.non_finite, poison == 0 ? "" : "b.w at element 0");
      EXPECT_EQ(staged.before, flat.before) << stage;
      EXPECT_EQ(staged.after, flat.after) << stage << ": LAMB's sums are of each tensor";
      EXPECT_EQ(flat.after == flat.before, poison != 0);
    }
  }
}

// All tensors of a rank's units are frozen. It takes part in every agreement without contributing anything.
TEST(StepBoundary, TakesARankWithoutTrainableTensors) {
  run_thread_ranks(2, [](int number, const CommunicatorFactory& factory) {
    const std::unique_ptr<Communicator> all = factory({}), alone = make_self_communicator();
    Config config = plain_config(1);
    config.frozen = {"a.*", "b.frozen"};
    const Staged stages{
        Mesh::parse("pipeline=2", 2), two_stages(), [&](const detail::Placement& placement, int buffer) {
          return detail::BufferRanks{placement.holds(buffer, number) ? alone.get() : nullptr, nullptr};
        }};
    RankState rank(config, *all, detail::posix_file_system(), {}, {}, &stages);
    StepBoundary boundary(rank.store, rank.config, rank.updater, rank.matrices, *all, rank.mesh, *rank.device,
                          rank.scalars, rank.pieces);
    boundary.allocate(rank.memory);
    GradientReducer reducer(rank.store, rank.arena, rank.compute, rank.ledger, rank.scalars, nullptr);
    rank.arena.begin("train", false);
    reducer.begin_micro_batch(0);
    for (int use = 0; use < 2 && number == 1; ++use) {
      reducer.open(0, 1);
      rank.add(reducer.view(0, 1, 0), 1);
      reducer.submit(0, 1, true);
    }
    EXPECT_EQ(reducer.missing(0), "");
    reducer.end_micro_batch(0);
    rank.compute.synchronize();
    rank.scalars.losses()[0] = 0;
    rank.scalars.tokens()[0] = 5 * number;
    rank.arena.end();
    const StepBoundary::Agreement found = boundary.agree({}, 1, 1);
    EXPECT_EQ(found.sum_of_squares, 4.0 * 1009);
    EXPECT_EQ(found.tokens, 5);
    OptimizerStep step;
    step.learning_rate = 0.25;
    step.gradient_scale = 1;
    step.apply = true;
    boundary.update(step);
    (void)rank.access().digest(detail::TensorAccess::Digested::weights_and_state);
    all->barrier({"test", "end"}).wait();
  });
}

}  // namespace
}  // namespace tranche::test
