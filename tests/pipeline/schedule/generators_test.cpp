#include "pipeline/schedule/generators.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/schedule/pipeline_schedule.h"
#include "pipeline/schedule/text.h"
#include "tests/pipeline/schedule/every_schedule.h"
#include "tranche/core/error.h"

namespace tranche::pipeline {
namespace {

using testing::HasSubstr;

std::string refusal(const std::string& name, int stages, std::int64_t micro_batches, int chunks = 0) {
  try {
    (void)generate(name, stages, micro_batches, chunks);
  } catch (const ConfigurationError& error) {
    return error.message();
  }
  return "nothing was refused";
}

TEST(Generators, OrdersOfThePapers) {
  EXPECT_EQ(write_schedule(generate("afab", 2, 2)), "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n");
  EXPECT_EQ(write_schedule(generate("1f1b", 2, 3)), "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n");
  EXPECT_EQ(write_schedule(generate("1f1b", 3, 1)), "0F0,0B0\n1F0,1B0\n2F0,2B0\n");
  // The warm-up of the last rank is a round of the first chunk; the first rank's is two forward passes
  // longer.
  EXPECT_EQ(write_schedule(generate("interleaved", 2, 2, 2)),
            "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1\n");
  EXPECT_EQ(write_schedule(generate("breadth-first", 2, 2, 2)),
            "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,3F0,3F1,3B0,3B1,1B0,1B1\n");
  EXPECT_EQ(write_schedule(generate("zb-h1", 2, 3)),
            "0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2\n1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2\n");
  EXPECT_EQ(write_schedule(generate("zb-v", 1, 2)), "0F0,1F0,1I0,1W0,0F1,0I0,0W0,1F1,1I1,1W1,0I1,0W1\n");
  EXPECT_EQ(
      write_schedule(generate("zb-v", 2, 2)),
      "0F0,0F1,3F0,3I0,3W0,3F1,3I1,3W1,0I0,0W0,0I1,0W1\n1F0,2F0,1F1,2F1,2I0,2W0,1I0,1W0,2I1,2W1,1I1,1W1\n");
}

/// In every schedule each action occurs once, on the rank of its chunk, and each chunk has forward passes,
/// input gradients and weight gradients in ascending micro-batches.
TEST(Generators, EachActionOnceAndAscending) {
  test::for_every_schedule(
      8, 8, 4, [](const std::string& name, const PipelineSchedule& schedule, int p, int m, int v) {
        SCOPED_TRACE(name + " p " + std::to_string(p) + " m " + std::to_string(m) + " v " +
                     std::to_string(v));
        const NamedSchedule& named = *find_schedule(name);
        EXPECT_EQ(schedule.rank_of_chunk, ranks_of_chunks(named.placement, p, v));
        std::map<std::pair<ActionKind, int>, std::int64_t> next;
        for (std::size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
          for (const Action& action : schedule.ranks[rank]) {
            ASSERT_EQ(schedule.rank_of_chunk[static_cast<std::size_t>(action.chunk)], static_cast<int>(rank));
            const std::int64_t expected = next[std::pair(action.kind, action.chunk)]++;
            ASSERT_EQ(action.micro_batch, expected) << action.name();
          }
        }
        const std::size_t kinds = named.splits_backward ? 3 : 2;
        EXPECT_EQ(next.size(), kinds * static_cast<std::size_t>(p * v));
        for (const auto& [kind_and_chunk, count] : next) EXPECT_EQ(count, m);
      });
}

TEST(Generators, ChunksInALoopAndInTheShapeOfAV) {
  EXPECT_EQ(ranks_of_chunks(ChunkPlacement::loop, 3, 2), (std::vector<int>{0, 1, 2, 0, 1, 2}));
  EXPECT_EQ(ranks_of_chunks(ChunkPlacement::v, 3, 2), (std::vector<int>{0, 1, 2, 2, 1, 0}));
  EXPECT_THROW(ranks_of_chunks(ChunkPlacement::v, 3, 1), InvalidArgument);
  EXPECT_THROW(ranks_of_chunks(ChunkPlacement::loop, 0, 1), InvalidArgument);
  const PipelineSchedule v = generate("zb-v", 3, 2);
  EXPECT_TRUE(v.crosses(0));
  EXPECT_FALSE(v.crosses(2));  // the turn of the V
  EXPECT_FALSE(v.crosses(5));  // the last chunk
}

TEST(Generators, Refusals) {
  EXPECT_EQ(refusal("interleaved", 4, 6),
            "schedule interleaved takes micro-batches in rounds of 4, one for each stage, and 6 is no "
            "multiple of it: 4 "
            "or 8 micro-batches work, and breadth-first takes any number");
  EXPECT_THAT(refusal("interleaved", 4, 2), HasSubstr(": 4 micro-batches work"));
  EXPECT_EQ(refusal("zb-h1", 4, 8, 2),
            "schedule zb-h1 has one chunk on a rank, not 2; interleaved and breadth-first have any number");
  EXPECT_EQ(refusal("zb-v", 4, 8, 3),
            "schedule zb-v has two chunks on a rank, not 3; interleaved and breadth-first have any number");
  EXPECT_EQ(refusal("1f1d", 4, 8),
            "'1f1d' is no schedule (did you mean 1f1b?); there are afab, 1f1b, interleaved, breadth-first, "
            "zb-h1, zb-v");
  EXPECT_THAT(refusal("afab", 0, 8),
              HasSubstr("0 stages, 8 micro-batches and 1 chunks on a rank: each has to be at least 1"));
  EXPECT_THAT(refusal("afab", 4, 0), HasSubstr("each has to be at least 1"));
  EXPECT_THAT(refusal("breadth-first", 4, 8, -1), HasSubstr("each has to be at least 1"));
  EXPECT_THAT(refusal("afab", 1 << 20, 1 << 20), HasSubstr("take more than 16777216 actions"));
  EXPECT_THAT(refusal("zb-v", 1'000'000, 1), HasSubstr("take more than 16777216 actions"));
  EXPECT_THAT(refusal("afab", 2, std::int64_t{1} << 62), HasSubstr("take more than 16777216 actions"));
}

}  // namespace
}  // namespace tranche::pipeline
