#include "pipeline/schedule/run_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "pipeline/schedule/generators.h"
#include "pipeline/schedule/lower.h"

namespace tranche::pipeline {
namespace {

using testing::ElementsAre;

/// For example "1SEND_B0:0": the action after which each micro-batch ends.
std::vector<std::string> ends(const PipelineSchedule& schedule, int rank) {
  const RunOrder order = run_order(schedule, rank);
  std::vector<std::string> found;
  for (std::size_t i = 0; i < order.ends.size(); ++i) {
    for (const std::int64_t m : order.ends[i]) {
      found.push_back(schedule.ranks[static_cast<std::size_t>(rank)][i].name() + ":" + std::to_string(m));
    }
  }
  return found;
}

TEST(RunOrder, EndsMicroBatchesBehindTheirLastAction) {
  const PipelineSchedule schedule = with_messages(generate("1f1b", 3, 2));
  EXPECT_THAT(ends(schedule, 0), ElementsAre("0B0:0", "0B1:1"));
  EXPECT_THAT(ends(schedule, 1), ElementsAre("1SEND_B0:0", "1SEND_B1:1"));
  EXPECT_THAT(ends(schedule, 2), ElementsAre("2SEND_B0:0", "2SEND_B1:1"));
}

// Delayed weight gradients belong to the micro-batch.
TEST(RunOrder, EndsMicroBatchesBehindTheirWeightGradients) {
  EXPECT_THAT(ends(with_messages(generate("breadth-first", 2, 2, 2)), 1),
              ElementsAre("1SEND_B0:0", "1SEND_B1:1"));
  const PipelineSchedule split = with_messages(generate("zb-h1", 3, 4));
  EXPECT_THAT(ends(split, 2), ElementsAre("2W0:0", "2W1:1", "2W2:2", "2W3:3"));
  EXPECT_EQ(ends(split, 0).size(), 4u);
}

TEST(RunOrder, SaysWhenGradientsWereTaken) {
  for (const char* const name : {"interleaved", "zb-v", "breadth-first"}) {
    const PipelineSchedule schedule = with_messages(generate(name, 2, 4));
    for (int rank = 0; rank < 2; ++rank) {
      const RunOrder order = run_order(schedule, rank);
      const std::vector<Action>& own = schedule.ranks[static_cast<std::size_t>(rank)];
      std::size_t sent = 0, taken = 0;
      for (std::size_t i = 0; i < own.size(); ++i) {
        sent += own[i].kind == ActionKind::send_gradient ? 1 : 0;
        for (const std::size_t send : order.taken[i]) {
          EXPECT_LT(send, i);
          EXPECT_EQ(own[send].kind, ActionKind::send_gradient);
          ++taken;
        }
      }
      EXPECT_LE(taken, sent) << name;
      EXPECT_GT(taken, 0u) << name;
    }
  }
  const RunOrder one_chunk = run_order(with_messages(generate("1f1b", 2, 4)), 1);
  for (const auto& taken : one_chunk.taken) EXPECT_TRUE(taken.empty());
}

TEST(RunOrder, ListsMessagesAsTheirSenderSendsThem) {
  const PipelineSchedule schedule = with_messages(generate("afab", 2, 2));
  const RunOrder order = run_order(schedule, 0);
  EXPECT_THAT(order.incoming[1], ElementsAre(Action{ActionKind::receive_gradient, 0, 0},
                                             Action{ActionKind::receive_gradient, 0, 1}));
  EXPECT_TRUE(order.incoming[0].empty());
}

TEST(RunOrder, ListsWeightGradientsThatComeBeforeThoseOfALaterChunk) {
  using enum ActionKind;
  const PipelineSchedule schedule{.ranks = {{{forward, 0, 0},
                                             {forward, 0, 1},
                                             {forward, 1, 0},
                                             {forward, 1, 1},
                                             {backward, 1, 0},
                                             {input_gradient, 1, 1},
                                             {backward, 0, 0},
                                             {backward, 0, 1},
                                             {weight_gradient, 1, 1}}},
                                  .rank_of_chunk = {0, 0},
                                  .micro_batches = 2};
  const RunOrder order = run_order(schedule, 0);
  ASSERT_EQ(order.early_weights.size(), 1u);
  EXPECT_EQ(order.early_weights[0].action, (Action{backward, 0, 1}));
  EXPECT_EQ(order.early_weights[0].later_chunk, 1);
  EXPECT_TRUE(run_order(with_messages(generate("interleaved", 2, 4)), 0).early_weights.empty());
}

}  // namespace
}  // namespace tranche::pipeline
