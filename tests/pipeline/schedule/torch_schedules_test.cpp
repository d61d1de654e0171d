// Compares orders that torch wrote (scripts/schedule_goldens.py) with ours.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/text_file.h"
#include "pipeline/schedule/check.h"
#include "pipeline/schedule/generators.h"
#include "pipeline/schedule/text.h"
#include "tranche/core/error.h"

namespace tranche::pipeline {
namespace {

struct TorchSchedule {
  std::string_view file;  ///< torch's name of the schedule in the file's name
  std::string_view ours;
  int stages;
  std::int64_t micro_batches;
  int chunks;
};

std::string path_of(const TorchSchedule& schedule) {
  return std::string(TRANCHE_SCHEDULES) + "/torch/" + std::string(schedule.file) + "-" +
         std::to_string(schedule.stages) + "-" + std::to_string(schedule.micro_batches) + "-" +
         std::to_string(schedule.chunks) + ".csv";
}
PipelineSchedule torchs(const TorchSchedule& schedule) {
  return read_schedule(detail::read_text_file(path_of(schedule), "schedule"), std::string(schedule.file));
}
PipelineSchedule ours(const TorchSchedule& schedule) {
  return generate(schedule.ours, schedule.stages, schedule.micro_batches, schedule.chunks);
}
/// Compares both as text, so that a failure shows them.
void expect_equal(const PipelineSchedule& a, const PipelineSchedule& b, std::string_view what) {
  EXPECT_EQ(write_schedule(a), write_schedule(b)) << what;
  EXPECT_EQ(a, b) << what;
}

TEST(TorchSchedules, HaveTheSameOrder) {
  for (const TorchSchedule& schedule :
       {TorchSchedule{"gpipe", "afab", 2, 3, 1}, TorchSchedule{"gpipe", "afab", 4, 8, 1},
        TorchSchedule{"interleaved", "interleaved", 2, 4, 2},
        TorchSchedule{"interleaved", "interleaved", 4, 8, 2},
        TorchSchedule{"interleaved", "interleaved", 4, 8, 3}, TorchSchedule{"zero-bubble", "zb-h1", 3, 5, 1},
        TorchSchedule{"zero-bubble", "zb-h1", 4, 8, 1}, TorchSchedule{"zbv", "zb-v", 2, 3, 2},
        TorchSchedule{"zbv", "zb-v", 4, 4, 2}, TorchSchedule{"zbv", "zb-v", 4, 8, 2}}) {
    expect_equal(ours(schedule), torchs(schedule), path_of(schedule));
  }
}

/// Torch's breadth-first order runs the backward passes of a chunk in descending micro-batches, ours in
/// ascending ones. The sum of weight gradients ascends in every schedule of ours, so that all have equal
/// bits.
TEST(TorchSchedules, DifferFromOursInTheBackwardOfBreadthFirst) {
  for (const TorchSchedule& schedule : {TorchSchedule{"looped-bfs", "breadth-first", 2, 3, 2},
                                        TorchSchedule{"looped-bfs", "breadth-first", 4, 8, 2}}) {
    PipelineSchedule order = torchs(schedule);
    EXPECT_THROW(proved(order, MessageModel::channels, "looped-bfs"), ConfigurationError);
    for (std::vector<Action>& line : order.ranks) {
      for (Action& action : line) {
        if (action.kind == ActionKind::backward)
          action.micro_batch = schedule.micro_batches - 1 - action.micro_batch;
      }
    }
    expect_equal(ours(schedule), order, path_of(schedule));
  }
}

/// In torch's own order of 1F1B (2.15) the last rank's forward passes are one micro-batch too high, so the
/// first is missing and there is one too many. The checker refuses such a file.
TEST(TorchSchedules, NumberTheLastForwardsOf1F1BFromOne) {
  for (const TorchSchedule& schedule :
       {TorchSchedule{"1f1b", "1f1b", 2, 3, 1}, TorchSchedule{"1f1b", "1f1b", 4, 8, 1}}) {
    PipelineSchedule order = torchs(schedule);
    try {
      proved(order, MessageModel::channels, "1f1b.csv");
      ADD_FAILURE() << path_of(schedule);
    } catch (const ConfigurationError& error) {
      EXPECT_THAT(error.message(),
                  testing::StartsWith("1f1b.csv lacks 0F" + std::to_string(schedule.micro_batches)));
    }
    for (Action& action : order.ranks.back()) {
      if (action.kind == ActionKind::forward) --action.micro_batch;
    }
    order.micro_batches = schedule.micro_batches;
    expect_equal(ours(schedule), order, path_of(schedule));
  }
}

/// We have no zero-bubble schedule with several chunks in a loop, but torch's order can be given as a file.
TEST(TorchSchedules, PassTheChecker) {
  const PipelineSchedule order = torchs({"zero-bubble", "", 4, 8, 2});
  EXPECT_NO_THROW(proved(order, MessageModel::channels, "zero-bubble"));
  EXPECT_THROW(proved(order, MessageModel::stream, "zero-bubble"), ConfigurationError);
}

}  // namespace
}  // namespace tranche::pipeline
