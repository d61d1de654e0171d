#include "pipeline/schedule/schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tranche/core/error.h"

namespace tranche::pipeline {
namespace {

std::string text(ScheduleKind kind, int stages, std::int64_t micro_batches, int stage) {
  std::string line;
  for (const Action& action : actions_of(kind, stages, micro_batches, stage)) line += action.name() + " ";
  return line;
}

TEST(Schedule, NamesItsActions) {
  EXPECT_EQ(text(ScheduleKind::one_f_one_b, 2, 3, 0),
            "F0 SEND_F0 F1 SEND_F1 RECV_B0 B0 F2 SEND_F2 RECV_B1 B1 RECV_B2 B2 ");
  EXPECT_EQ(text(ScheduleKind::one_f_one_b, 2, 3, 1),
            "RECV_F0 F0 B0 SEND_B0 RECV_F1 F1 B1 SEND_B1 RECV_F2 F2 B2 SEND_B2 ");
  EXPECT_EQ(text(ScheduleKind::afab, 2, 2, 1), "RECV_F0 F0 RECV_F1 F1 B0 SEND_B0 B1 SEND_B1 ");
  EXPECT_EQ(text(ScheduleKind::forward_alone, 3, 1, 1), "RECV_F0 F0 SEND_F0 ");
}

TEST(Schedule, HoldsAsManyMicroBatchesAsTheKindSays) {
  for (const std::int64_t micro_batches : {4, 8, 64}) {
    for (int stage = 0; stage < 4; ++stage) {
      EXPECT_EQ(open_at_once(actions_of(ScheduleKind::one_f_one_b, 4, micro_batches, stage)), 4 - stage);
      EXPECT_EQ(open_at_once(actions_of(ScheduleKind::afab, 4, micro_batches, stage)), micro_batches);
    }
  }
}

/// Runs all stages at once, each action in its order as soon as it can: messages are buffered. False: some
/// stage waits for ever.
bool runs_to_its_end(ScheduleKind kind, int stages, std::int64_t micro_batches) {
  std::vector<std::vector<Action>> lines;
  for (int stage = 0; stage < stages; ++stage) {
    lines.push_back(actions_of(kind, stages, micro_batches, stage));
  }
  std::vector<std::size_t> next(lines.size());
  std::map<std::pair<int, std::string>, int> sent;  // by receiver and message
  for (bool moved = true; std::exchange(moved, false);) {
    for (int stage = 0; stage < stages; ++stage) {
      const auto s = static_cast<std::size_t>(stage);
      for (; next[s] < lines[s].size(); ++next[s]) {
        const Action& action = lines[s][next[s]];
        const std::string number = std::to_string(action.micro_batch);
        if (action.kind == ActionKind::send_residual) ++sent[{stage + 1, "F" + number}];
        if (action.kind == ActionKind::send_gradient) ++sent[{stage - 1, "B" + number}];
        if (action.kind == ActionKind::receive_residual && sent[{stage, "F" + number}]-- == 0) break;
        if (action.kind == ActionKind::receive_gradient && sent[{stage, "B" + number}]-- == 0) break;
        moved = true;
      }
      for (auto& [message, count] : sent) count = std::max(count, 0);
    }
  }
  for (std::size_t s = 0; s < lines.size(); ++s) {
    if (next[s] < lines[s].size()) return false;
  }
  return true;
}

TEST(Schedule, IsCompleteAndEndsForAnyNumbers) {
  for (const ScheduleKind kind : {ScheduleKind::afab, ScheduleKind::one_f_one_b}) {
    for (int stages = 1; stages <= 8; ++stages) {
      for (std::int64_t micro_batches = 1; micro_batches <= 9; ++micro_batches) {
        ASSERT_TRUE(runs_to_its_end(kind, stages, micro_batches)) << stages << " " << micro_batches;
        for (int stage = 0; stage < stages; ++stage) {
          std::int64_t forward = 0, backward = 0;
          for (const Action& action : actions_of(kind, stages, micro_batches, stage)) {
            if (action.kind == ActionKind::forward) {
              ASSERT_EQ(action.micro_batch, forward++);
            } else if (action.kind == ActionKind::backward) {
              ASSERT_EQ(action.micro_batch, backward++);
            }
          }
          ASSERT_EQ(forward, micro_batches);
          ASSERT_EQ(backward, micro_batches);
        }
      }
    }
  }
}

TEST(Schedule, RefusesNumbersThatAreNone) {
  EXPECT_THROW(actions_of(ScheduleKind::afab, 2, 1, 2), InvalidArgument);
  EXPECT_THROW(actions_of(ScheduleKind::afab, 0, 1, 0), InvalidArgument);
  EXPECT_THROW(actions_of(ScheduleKind::afab, 2, 0, 0), InvalidArgument);
}

}  // namespace
}  // namespace tranche::pipeline
