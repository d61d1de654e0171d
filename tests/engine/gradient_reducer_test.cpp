// Gradients without an engine: where kernels add them, when they are reduced, and several active
// micro-batches.
#include "engine/gradient_reducer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "rank_state.h"
#include "tests/core/error_text.h"

namespace tranche::test {
namespace {

using detail::GradientReducer;

GradientReducer reducer_of(RankState& rank) {
  return {rank.store, rank.arena, rank.compute, rank.ledger, rank.scalars, nullptr};
}

/// Runs `body` on `ranks` ranks with an active pass of the arena.
void on_each(int ranks, const Config& config, const std::function<void(RankState&, GradientReducer&)>& body) {
  run_thread_ranks(ranks, [&](int, const CommunicatorFactory& factory) {
    const std::unique_ptr<Communicator> group = factory({});
    RankState rank(config, *group);
    rank.arena.begin("train", false);
    {
      GradientReducer reducer = reducer_of(rank);
      body(rank, reducer);
      rank.compute.synchronize();
      for (const detail::FlatBuffer* flat : rank.store.trainable()) flat->reduce_done.wait();
    }
    rank.arena.end();
    group->barrier({"test", "end"}).wait();
  });
}

/// One use of a unit, which adds `value` to all its gradients.
void use(RankState& rank, GradientReducer& reducer, std::int64_t micro_batch, int unit, float value,
         bool last) {
  reducer.open(micro_batch, unit);
  for (int index = 0; index < 2; ++index) rank.add(reducer.view(micro_batch, unit, index), value);
  reducer.submit(micro_batch, unit, last);
}

bool all_equal(const std::vector<float>& values, float value) {
  return std::all_of(values.begin(), values.end(), [value](float one) { return one == value; });
}

/// Stage, reduction and ranks.
using ReductionCase = std::tuple<int, ReductionPolicy, int>;
class GradientReducerSums : public ::testing::TestWithParam<ReductionCase> {};

// Unit b is used twice a pass, and two micro-batches are active at once and end in reverse order. The main
// gradient must be the sum over uses, micro-batches and ranks.
TEST_P(GradientReducerSums, UsesMicroBatchesAndRanks) {
  const auto [stage, policy, ranks] = GetParam();
  Config config = plain_config(stage, 2);
  config.reduction = policy;
  on_each(ranks, config, [ranks = ranks](RankState& rank, GradientReducer& reducer) {
    const auto own = static_cast<float>(rank.group.rank() + 1);
    for (int step = 1; step <= 2; ++step) {
      reducer.begin_micro_batch(0);
      reducer.begin_micro_batch(1);
      EXPECT_FALSE(reducer.backward_begun(0));
      use(rank, reducer, 0, 1, own, false);
      EXPECT_TRUE(reducer.backward_begun(0));
      EXPECT_FALSE(reducer.submitted(0, 1));
      use(rank, reducer, 0, 1, 2 * own, false);
      EXPECT_TRUE(reducer.submitted(0, 1));
      use(rank, reducer, 1, 1, 4 * own, true);
      use(rank, reducer, 1, 1, 8 * own, true);
      use(rank, reducer, 1, 0, 16 * own, false);
      use(rank, reducer, 0, 0, 32 * own, true);
      EXPECT_EQ(reducer.missing(0), "");
      EXPECT_EQ(reducer.missing(1), "");
      reducer.end_micro_batch(1);
      reducer.end_micro_batch(0);
      const float of_ranks = static_cast<float>(ranks * (ranks + 1)) / 2;
      EXPECT_TRUE(all_equal(rank.access().main_gradient(0, true, 1 << 30), 48 * of_ranks));
      EXPECT_TRUE(all_equal(rank.access().main_gradient(1, true, 1 << 30), 48 * of_ranks));
      EXPECT_TRUE(all_equal(rank.access().main_gradient(2, true, 1 << 30), 15 * of_ranks));
      reducer.begin_step();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, GradientReducerSums,
                         ::testing::Values(ReductionCase{0, ReductionPolicy::boundary, 1},
                                           ReductionCase{0, ReductionPolicy::boundary, 3},
                                           ReductionCase{2, ReductionPolicy::boundary, 3},
                                           ReductionCase{2, ReductionPolicy::micro_batch, 3},
                                           ReductionCase{3, ReductionPolicy::micro_batch, 2}));

// The first gradient overwrites its tensor, which is not zeroed before, if the kernel can overwrite; later
// gradients are added.
TEST(GradientReducer, TargetsAreWrittenFirstAndAddedToLater) {
  const auto alone = make_self_communicator();
  RankState rank(plain_config(1, 2), *alone);
  rank.arena.begin("train", false);
  {
    GradientReducer reducer = reducer_of(rank);
    reducer.begin_micro_batch(0);
    reducer.open(0, 0);
    EXPECT_TRUE(reducer.target(0, 0, 1).accumulate) << "a small tensor is cleared with its neighbours";
    const GradientTarget first = reducer.target(0, 0, 0);
    EXPECT_FALSE(first.accumulate);
    rank.compute.enqueue("write",
                         [view = first.view] { std::fill_n(view.as<float>(), view.elements(), 5.0f); });
    EXPECT_TRUE(reducer.target(0, 0, 0).accumulate);
    EXPECT_EQ(message_of<InvalidArgument>([&] { (void)reducer.target(0, 0, 2); }),
              "unit a has 2 tensors, no index 2");
    reducer.submit(0, 0, false);
    reducer.end_micro_batch(0);
    // The second micro-batch of the step adds. A new step writes again, and tensors that no kernel writes are
    // cleared.
    reducer.begin_micro_batch(1);
    reducer.open(1, 0);
    EXPECT_TRUE(reducer.target(1, 0, 0).accumulate);
    reducer.submit(1, 0, true);
    reducer.end_micro_batch(1);
    EXPECT_TRUE(all_equal(rank.access().main_gradient(0, true, 1), 5));
    reducer.begin_step();
    reducer.begin_micro_batch(0);
    reducer.open(0, 0);
    reducer.submit(0, 0, true);
    reducer.end_micro_batch(0);
    EXPECT_TRUE(all_equal(rank.access().main_gradient(0, true, 1), 0));
  }
  rank.arena.end();
}

TEST(GradientReducer, SaysWhatIsOpenAndMissing) {
  const auto alone = make_self_communicator();
  RankState rank(plain_config(1), *alone);
  rank.arena.begin("train", false);
  {
    GradientReducer reducer = reducer_of(rank);
    reducer.begin_micro_batch(5);
    reducer.open(5, 0);
    EXPECT_EQ(reducer.held(5), "a");
    EXPECT_EQ(message_of<LogicError>([&] { reducer.open(5, 0); }),
              "gradients(a) while another handle of the unit is open");
    reducer.submit(5, 0, true);
    EXPECT_EQ(reducer.held(5), "");
    EXPECT_EQ(message_of<LogicError>([&] { reducer.open(5, 0); }),
              "gradients(a) for use 2 of a micro-batch, but the model declares uses_per_micro_batch = 1");
    EXPECT_EQ(
        reducer.missing(5),
        "unit b submitted its gradients 0 of 2 times in micro-batch 5; call skip_gradients() for a unit "
        "that is not used");
    reducer.open(5, 1);
    reducer.drop(5, 1);
    EXPECT_EQ(reducer.held(5), "");
    reducer.end_micro_batch(5);
  }
  rank.arena.end();
}

// The gradient of a frozen tensor has temporary memory that is discarded.
TEST(GradientReducer, FrozenTensorsHaveScratch) {
  const auto alone = make_self_communicator();
  RankState rank(plain_config(1), *alone);
  rank.arena.begin("train", false);
  {
    GradientReducer reducer = reducer_of(rank);
    reducer.begin_micro_batch(0);
    for (int times = 0; times < 2; ++times) {
      reducer.open(0, 1);
      const TensorView scratch = reducer.view(0, 1, 1);
      EXPECT_EQ(scratch.elements(), 13);
      rank.compute.synchronize();
      EXPECT_EQ(scratch.as<float>()[12], 0.0f);
      rank.add(scratch, 1);
      reducer.submit(0, 1, true);
    }
    reducer.end_micro_batch(0);
  }
  rank.arena.end();
}

}  // namespace
}  // namespace tranche::test
