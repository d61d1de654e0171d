#include "pipeline/schedule/text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "pipeline/schedule/load.h"
#include "pipeline/schedule/lower.h"
#include "pipeline/schedule/pipeline_schedule.h"
#include "tests/pipeline/schedule/every_schedule.h"
#include "tranche/core/error.h"

namespace tranche::pipeline {
namespace {

using testing::HasSubstr;

std::string read_refusal(const std::string& text) {
  try {
    (void)read_schedule(text, "s.csv");
  } catch (const ConfigurationError& error) {
    return error.message();
  }
  return "nothing was refused";
}

TEST(ScheduleText, ComesBackAsItWasAtEveryLevel) {
  test::for_every_schedule(4, 5, 3, [](const std::string&, const PipelineSchedule& schedule, int, int, int) {
    const PipelineSchedule messages = with_messages(schedule);
    for (const PipelineSchedule& level : {schedule, messages, with_gathers(messages, 1)}) {
      EXPECT_EQ(read_schedule(write_schedule(level), "s.csv"), level);
    }
  });
}

TEST(ScheduleText, ReadsEmptyCellsAndTorchsLineEnds) {
  const PipelineSchedule schedule =
      read_schedule("0F0,0F1,,,0B0,0B1\r\n,1F0, 1I0 ,1W0,1F1,1B1\r\n\r\n", "s.csv");
  EXPECT_EQ(schedule.rank_of_chunk, (std::vector<int>{0, 1}));
  EXPECT_EQ(schedule.micro_batches, 2);
  EXPECT_EQ(write_schedule(schedule), "0F0,0F1,0B0,0B1\n1F0,1I0,1W0,1F1,1B1\n");
}

TEST(ScheduleText, NamesItsActionsAsTorchDoes) {
  const std::string text =
      "0GATHER,0F12,0SEND_F12,0RECV_B12,0B12,0FREE\n1RECV_F12,1F12,1I12,1SEND_B12,1W12\n";
  const PipelineSchedule schedule = read_schedule(text, "s.csv");
  EXPECT_EQ(write_schedule(schedule), text);
  EXPECT_EQ(schedule.ranks[0][2], (Action{ActionKind::send_residual, 0, 12}));
  EXPECT_EQ(schedule.ranks[1][0], (Action{ActionKind::receive_residual, 1, 12}));
}

TEST(ScheduleText, RefusalsNameLineRankAndCell) {
  for (const std::string cell : {"0X0", "F0", "0F", "0F-1", "0F0x", "-1F0", "-0F0", "0F-0", "0f0", "0GATHER0",
                                 "99999999999F0", "0F99999999999999999999"}) {
    EXPECT_THAT(
        read_refusal("0F0,0B0\n1F0,," + cell),
        testing::StartsWith("s.csv: line 2 (rank 1), cell 3: '" + cell + "' is no action; there are 2F0 "))
        << cell;
  }
  EXPECT_THAT(read_refusal("0F0," + std::string(1000, 'A')),
              HasSubstr("'" + std::string(40, 'A') + "...' is no action"));
  EXPECT_THAT(read_refusal("0UNSHARD,0F0"),
              HasSubstr("cell 1: '0UNSHARD' is an action of torch's own lowering; write the schedule's "
                        "compute actions alone"));
  EXPECT_THAT(read_refusal("(0F0;1B0)OVERLAP_F_B"), HasSubstr("is an action of torch's own lowering"));
  EXPECT_EQ(read_refusal("0F0,0B0\n1F0,0B1"),
            "s.csv: line 2 (rank 1), cell 2: 0B1 is on rank 1, but 0F0 of the same chunk is on rank 0; a "
            "chunk lies on one rank");
  EXPECT_EQ(read_refusal("0F0,0B0\n2F0,2B0"), "s.csv has actions of chunk 2, but none of chunk 1");
  EXPECT_EQ(read_refusal("0F0\n,,\n1F0"),
            "s.csv: line 2 (rank 1) has no action; each rank holds a chunk at least");
  EXPECT_THAT(read_refusal(""), HasSubstr("s.csv has no action; a schedule has a line for each rank"));
  EXPECT_THAT(read_refusal(" \n\n"), HasSubstr("s.csv has no action"));
  // Numbers so large that all memory would be used.
  EXPECT_THAT(read_refusal("0F0,2000000000F0"),
              HasSubstr("cell 2: 2000000000F0 has a number that no schedule of 2 cells can reach"));
  EXPECT_THAT(read_refusal("0F0,0B9000000000000000000"), HasSubstr("no schedule of 2 cells can reach"));
}

TEST(ScheduleText, FilesForOtherNumbersSayBoth) {
  const PipelineSchedule schedule = generate("breadth-first", 2, 3, 2);
  const auto refusal_of = [&](int stages, std::int64_t micro_batches, int chunks) -> std::string {
    try {
      require_numbers(schedule, "s.csv", stages, micro_batches, chunks);
    } catch (const ConfigurationError& error) {
      return error.message();
    }
    return "";
  };
  EXPECT_EQ(refusal_of(2, 3, 2), "");
  EXPECT_EQ(refusal_of(0, 0, 0), "");
  EXPECT_EQ(refusal_of(4, 3, 2), "s.csv was made for 2 stages, but there are 4");
  EXPECT_EQ(refusal_of(2, 8, 2), "s.csv was made for 3 micro-batches, but there are 8");
  EXPECT_EQ(refusal_of(2, 3, 1), "s.csv was made for 4 chunks, but there are 2");
}

TEST(ScheduleText, NamesAndFilesAreLoadedAlike) {
  EXPECT_EQ(load_schedule("zb-h1", 2, 3), generate("zb-h1", 2, 3));
  const auto refusal_of = [](const std::string& what) -> std::string {
    try {
      (void)load_schedule(what, 2, 3);
    } catch (const ConfigurationError& error) {
      return error.message();
    }
    return "";
  };
  EXPECT_THAT(refusal_of("1f1d"), HasSubstr("'1f1d' is no schedule (did you mean 1f1b?)"));
  EXPECT_THAT(refusal_of("/dev/null"), HasSubstr("schedule '/dev/null' cannot be read: "));  // pipes, devices
  EXPECT_THAT(refusal_of("not/there.csv"), HasSubstr("schedule 'not/there.csv' cannot be read"));
}

}  // namespace
}  // namespace tranche::pipeline
