#include "pipeline/schedule/lower.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "pipeline/schedule/generators.h"
#include "pipeline/schedule/pipeline_schedule.h"
#include "pipeline/schedule/simulate.h"
#include "pipeline/schedule/text.h"
#include "tests/pipeline/schedule/every_schedule.h"
#include "tranche/core/error.h"

namespace tranche::pipeline {
namespace {

TEST(Lower, ReceivesStandInFrontAndSendsBehind) {
  EXPECT_EQ(write_schedule(with_messages(generate("1f1b", 2, 2))),
            "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,"
            "1SEND_B1\n");
  EXPECT_EQ(write_schedule(with_messages(generate("zb-h1", 2, 1))),
            "0F0,0SEND_F0,0RECV_B0,0I0,0W0\n1RECV_F0,1F0,1I0,1SEND_B0,1W0\n");
}

TEST(Lower, NothingIsSentBetweenChunksOfOneRank) {
  // Chunks 1 and 2 are both on rank 1, where the V turns.
  EXPECT_EQ(write_schedule(with_messages(generate("zb-v", 2, 1))),
            "0F0,0SEND_F0,3RECV_F0,3F0,3I0,3SEND_B0,3W0,0RECV_B0,0I0,0W0\n1RECV_F0,1F0,2F0,2SEND_F0,2RECV_B0,"
            "2I0,2W0,1I0,1SEND_B0,1W0\n");
  const PipelineSchedule one_rank = generate("breadth-first", 1, 2, 3);
  EXPECT_EQ(with_messages(one_rank), one_rank);
}

TEST(Lower, EachCutIsCrossedOnceInEachDirection) {
  test::for_every_schedule(
      5, 5, 3, [](const std::string& name, const PipelineSchedule& schedule, int p, int m, int v) {
        const PipelineSchedule lowered = with_messages(schedule);
        int crossings = 0;
        for (int chunk = 0; chunk < schedule.chunks(); ++chunk) crossings += schedule.crosses(chunk) ? 1 : 0;
        EXPECT_EQ(crossings, p == 1 ? 0 : v * p - (name == "zb-v" ? 2 : 1));
        std::int64_t messages = 0;
        for (const std::vector<Action>& line : lowered.ranks) {
          messages += std::count_if(line.begin(), line.end(),
                                    [](const Action& action) { return is_message(action.kind); });
        }
        EXPECT_EQ(messages, std::int64_t{4} * crossings * m);
        EXPECT_EQ(with_messages(lowered), lowered);
        // Messages without duration change no time.
        const StageTimes times = StageTimes::equal(p, 1, 2, 3);
        EXPECT_EQ(simulate(lowered, times).length, simulate(schedule, times).length);
      });
}

TEST(Lower, FurthestNextUseIsFreedFirst) {
  EXPECT_EQ(write_schedule(with_gathers(generate("breadth-first", 1, 2, 2), 1)),
            "0GATHER,0F0,0F1,0FREE,1GATHER,1F0,1F1,1B0,1B1,1FREE,0GATHER,0B0,0B1,0FREE\n");
  EXPECT_EQ(write_schedule(with_gathers(generate("breadth-first", 1, 1, 3), 2)),
            "0GATHER,0F0,1GATHER,1F0,0FREE,2GATHER,2F0,2B0,2FREE,1B0,1FREE,0GATHER,0B0,0FREE\n");
  // The gather precedes the receive, so that both can be waited for together.
  EXPECT_EQ(write_schedule(with_gathers(with_messages(generate("1f1b", 2, 1)), 1)),
            "0GATHER,0F0,0SEND_F0,0RECV_B0,0B0,0FREE\n1GATHER,1RECV_F0,1F0,1B0,1FREE,1SEND_B0\n");
  EXPECT_THROW(with_gathers(generate("1f1b", 2, 1), 0), InvalidArgument);
}

/// Checks counts and capacity on every rank: no chunk computes without its weights.
void check_gathers(const PipelineSchedule& schedule, std::size_t capacity) {
  for (const std::vector<Action>& line : schedule.ranks) {
    std::set<int> held;
    for (const Action& action : line) {
      if (action.kind == ActionKind::gather) {
        EXPECT_TRUE(held.insert(action.chunk).second) << "gathered twice";
      }
      if (action.kind == ActionKind::free) {
        EXPECT_EQ(held.erase(action.chunk), 1u) << "freed twice";
      }
      if (computes(action.kind)) {
        EXPECT_TRUE(held.contains(action.chunk)) << action.name();
      }
      EXPECT_LE(held.size(), capacity);
    }
    EXPECT_TRUE(held.empty());
  }
}

TEST(Lower, NoChunkComputesWithoutItsWeights) {
  test::for_every_schedule(
      4, 5, 4, [](const std::string&, const PipelineSchedule& schedule, int, int, int v) {
        std::int64_t fewest = 0;
        for (int capacity = v; capacity >= 1; --capacity) {
          const PipelineSchedule gathered = with_gathers(with_messages(schedule), capacity);
          check_gathers(gathered, static_cast<std::size_t>(capacity));
          EXPECT_EQ(with_gathers(gathered, capacity), gathered);
          EXPECT_GE(gathers_of(gathered), fewest);  // with less capacity there are at least as many gathers
          fewest = gathers_of(gathered);
          if (capacity == v) {
            EXPECT_EQ(fewest, schedule.chunks());
          }
        }
      });
}

/// If one chunk at a time is gathered, breadth-first gathers each chunk twice except the last, for any number
/// of micro-batches: (2 - 1/v) P elements, where a chunk has P/v.
TEST(Lower, GathersOfBreadthFirstDoNotGrowWithMicroBatches) {
  for (int v = 1; v <= 4; ++v) {
    for (const int m : {4, 8, 32}) {
      const PipelineSchedule schedule = with_gathers(generate("breadth-first", 4, m, v), 1);
      for (const std::vector<Action>& line : schedule.ranks) EXPECT_EQ(gathers_of(line), 2 * v - 1);
      EXPECT_EQ(gathers_of(schedule), 4 * (2 * v - 1));
    }
  }
  // In the schedule "interleaved" a rank gathers its chunks repeatedly.
  const auto by_rank = [](int m) {
    std::vector<std::int64_t> gathers;
    for (const std::vector<Action>& line : with_gathers(generate("interleaved", 4, m, 2), 1).ranks)
      gathers.push_back(gathers_of(line));
    return gathers;
  };
  EXPECT_EQ(by_rank(8), (std::vector<std::int64_t>{11, 19, 13, 5}));
  EXPECT_EQ(by_rank(32), (std::vector<std::int64_t>{47, 103, 73, 17}));
}

TEST(Lower, ForwardAloneRunsEachChunkInTurn) {
  EXPECT_EQ(write_schedule(forward_alone(ranks_of_chunks(ChunkPlacement::v, 2, 2), 2, 2)),
            "0F0,0F1,3F0,3F1\n1F0,1F1,2F0,2F1\n");
}

}  // namespace
}  // namespace tranche::pipeline
