// tranche schedule, for people and for programs.
#include "tools/schedule/schedule_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/tools/program_fixture.h"

namespace tranche::tools {
namespace {

using nlohmann::json;
using test::ProgramResult;
using test::TemporaryFolder;
using testing::HasSubstr;
using testing::Not;

ProgramResult schedule(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "schedule");
  return test::run(arguments);
}

std::string schedule_refusal(const std::vector<std::string>& arguments) {
  const ProgramResult done = schedule(arguments);
  EXPECT_EQ(done.status, 2) << done.errors;
  EXPECT_EQ(done.out, "");
  return done.errors;
}

json figures(std::vector<std::string> arguments) {
  arguments.emplace_back("--json");
  const ProgramResult done = schedule(std::move(arguments));
  EXPECT_EQ(done.status, 0) << done.errors;
  return json::parse(done.out);
}

TEST(ScheduleCommand, PrintsAChartWithIdleCellsByTheirCause) {
  const ProgramResult done = schedule({"1f1b", "--p", "2", "--m", "2"});
  EXPECT_EQ(done.status, 0);
  EXPECT_EQ(done.errors, "");
  EXPECT_EQ(done.out, R"(1f1b: 2 stages, 2 micro-batches, 2 chunks

rank 0  F0 F1 .  .  B0 -- .  B1 --
rank 1  s  F0 B0 -- F1 B1 -- c  c
a cell is 1 long; idle: s start-up, . bubble, c cool-down

  rank        busy    start-up      bubble   cool-down    peak activations
     0           6           0           3           0                   2
     1           6           1           0           2                   1

length       9
utilization  66.7 % (12 of 18)
lower bound  9 (by rank 9, by path 9): no other order of these actions is shorter
)");
}

TEST(ScheduleCommand, ChunksHaveTheirNumbersAndPartsOfTheTime) {
  const std::string text = schedule({"zb-v", "--p", "2", "--m", "3"}).out;
  EXPECT_THAT(text, HasSubstr("\nrank 0  0F0 0F1 0F2 3F0 "));
  EXPECT_THAT(text, HasSubstr("\nrank 1  s   1F0 2F0 1F1 2F1 2I0 2W0 "));
  EXPECT_THAT(text, HasSubstr("\na cell is 0.5 long;"));
  // Whole backwards are two cells.
  EXPECT_THAT(schedule({"interleaved", "--p", "2", "--m", "2"}).out, HasSubstr(" 3B0 --  "));
}

TEST(ScheduleCommand, LongChartsAreLinesOfBoundedWidth) {
  const std::string text = schedule({"1f1b", "--p", "4", "--m", "16"}).out;
  EXPECT_THAT(text, HasSubstr("\ntime 0 to 28\nrank 0 "));
  EXPECT_THAT(text, HasSubstr("\n\ntime 28 to 56\nrank 0 "));
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 120u) << line;
  EXPECT_THAT(schedule({"1f1b", "--p", "4", "--m", "1000"}).out,
              HasSubstr("\n\nno chart: it would have more than 2000 cells on a rank\n"));
  EXPECT_THAT(schedule({"1f1b", "--p", "2", "--m", "2", "--f", "1e-3", "--w", "1e9"}).out,
              HasSubstr("\n\nno chart: "));
  EXPECT_THAT(schedule({"1f1b", "--p", "2", "--m", "2", "--f", "1", "--i", "1.0137", "--w", "0.777"}).out,
              HasSubstr("to which starts and ends are rounded"));
}

TEST(ScheduleCommand, JsonHasTheFiguresOfTheChart) {
  const json afab = figures({"afab", "--p", "4", "--m", "8"});
  EXPECT_EQ(afab["schema"], "tranche-schedule-1");
  EXPECT_EQ(afab["utilization"], 96.0 / 132);
  EXPECT_EQ(afab["length"], 33);
  EXPECT_EQ(afab["lower_bound"], 33);
  EXPECT_EQ(afab["peak_activations"], json({8, 8, 8, 8}));
  EXPECT_EQ(afab["ranks"][1], json({{"busy", 24}, {"start_up", 1}, {"bubble", 6}, {"cool_down", 2}}));
  const json zb_v = figures({"zb-v", "--p", "4", "--m", "4"});
  EXPECT_EQ(zb_v["length"], 15);
  EXPECT_EQ(zb_v["lower_bound"], 13.5);
  EXPECT_EQ(zb_v["rank_of_chunk"], json({0, 1, 2, 3, 3, 2, 1, 0}));
  EXPECT_THAT(schedule({"zb-v", "--p", "4", "--m", "4"}).out,
              HasSubstr("13.5 (by rank 13.5, by path 11.5): the schedule is 11.1 % longer"));
}

TEST(ScheduleCommand, TimesAreForAllStagesOrEach) {
  EXPECT_EQ(figures({"1f1b", "--p", "4", "--m", "8", "--f", "1,2,1,1", "--i", "1,2,1,1", "--w",
                     "1,2,1,1"})["length"],
            53);
  EXPECT_EQ(figures({"1f1b", "--p", "4", "--m", "8", "--f", "2", "--i", "2", "--w", "2"})["length"], 66);
  EXPECT_EQ(figures({"zb-v", "--p", "2", "--m", "3", "--f", "4", "--i", "6,8", "--w", "8"})["times"]["input"],
            json({6, 8}));
  EXPECT_THAT(schedule_refusal({"1f1b", "--p", "4", "--m", "8", "--f", "1,2"}),
              HasSubstr("--f '1,2' has 2 times; there are 4 stages: give one for all, or one for each"));
  for (const std::string time : {"0", "-1", "x", "nan", "inf", "1e300", "1;2", ""}) {
    EXPECT_THAT(schedule_refusal({"1f1b", "--p", "1", "--m", "8", "--i", "1," + time}),
                HasSubstr("'" + time + "' is no time"))
        << time;
  }
}

TEST(ScheduleCommand, FewMicroBatchesHaveANote) {
  const ProgramResult done = schedule({"1f1b", "--p", "4", "--m", "2"});
  EXPECT_EQ(done.status, 0);
  EXPECT_EQ(done.errors,
            "note: 2 micro-batches on 4 stages of a pipeline: at most 2 of 4 stages can work at once\n");
  EXPECT_EQ(figures({"1f1b", "--p", "4", "--m", "1"})["notes"],
            json::array({"1 micro-batch on 4 stages of a pipeline: at most 1 of 4 stages can work at once"}));
  EXPECT_EQ(figures({"1f1b", "--p", "4", "--m", "4"})["notes"].size(), 0u);
}

TEST(ScheduleCommand, FilesAreReadAndWritten) {
  const TemporaryFolder folder;
  const std::string file = folder.path("mine.csv");
  EXPECT_EQ(schedule({"zb-h1", "--p", "2", "--m", "2", "--write", file}).status, 0);
  EXPECT_EQ(test::read_file(file), "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n");
  json of_file = figures({file}), of_name = figures({"zb-h1", "--p", "2", "--m", "2"});
  EXPECT_EQ(of_file["schedule"], file);
  of_file["schedule"] = of_name["schedule"] = "";
  EXPECT_EQ(of_file, of_name);
  EXPECT_EQ(schedule({file, "--write", file, "--messages"}).status, 0);
  EXPECT_THAT(test::read_file(file), HasSubstr("0F0,0SEND_F0,0F1,"));
  EXPECT_EQ(figures({file, "--p", "2", "--m", "2", "--v", "1"})["length"], of_name["length"]);
  EXPECT_THAT(schedule_refusal({file, "--m", "8"}),
              HasSubstr(file + " was made for 2 micro-batches, but there are 8"));
  EXPECT_THAT(schedule_refusal({folder.write("bad.csv", "0F0,0B0\n1F0,1X0\n")}),
              HasSubstr("bad.csv: line 2 (rank 1), cell 2: '1X0' is no action"));
  EXPECT_THAT(schedule_refusal({folder.write("lacks.csv", "0F0,0B0\n1F0,1F1,1B0\n")}),
              HasSubstr("lacks.csv lacks 0F1"));
  EXPECT_THAT(schedule_refusal({"zb-h1", "--p", "2", "--m", "2", "--write", folder.path("none/x.csv")}),
              HasSubstr("--write '"));
  EXPECT_THAT(schedule({folder.write("gathers.csv", "0GATHER,0F0,0B0,0FREE\n")}).out,
              HasSubstr("\ngathers      1\n"));
}

TEST(ScheduleCommand, RefusalsSayWhatToDo) {
  EXPECT_THAT(
      schedule_refusal({}),
      HasSubstr("which schedule? there are afab, 1f1b, interleaved, breadth-first, zb-h1, zb-v, and files"));
  EXPECT_THAT(schedule_refusal({"1f1b", "--m", "8"}), HasSubstr("--p is missing: the number of stages"));
  EXPECT_THAT(schedule_refusal({"1f1b", "--p", "8"}),
              HasSubstr("--m is missing: the number of micro-batches"));
  EXPECT_THAT(schedule_refusal({"1f1b", "--p", "-1", "--m", "1"}),
              HasSubstr("--p is -1, but must be 1 to 1000000"));
  for (const char* const flag : {"--p", "--m", "--v"}) {
    std::vector<std::string> words{"1f1b"};
    for (const char* const other : {"--p", "--m", "--v"}) {
      words.insert(words.end(), {other, other == std::string_view(flag) ? "0" : "1"});
    }
    EXPECT_THAT(schedule_refusal(words), HasSubstr(std::string(flag) + " is 0, but must be 1 to 1000000"));
  }
  EXPECT_THAT(schedule_refusal({"1f1d", "--p", "4", "--m", "8"}),
              HasSubstr("'1f1d' is no schedule (did you mean 1f1b?)"));
  EXPECT_THAT(schedule_refusal({"interleaved", "--p", "4", "--m", "6"}),
              HasSubstr("4 or 8 micro-batches work, and breadth-first takes any number"));
  EXPECT_THAT(schedule_refusal({"1f1b", "--p", "4", "--m", "8", "--messages"}),
              HasSubstr("--messages says what --write FILE writes; give both"));
  EXPECT_THAT(schedule_refusal({"1f1b", "--p", "4", "--m", "8", "--k"}), HasSubstr("unknown flag --k"));
  EXPECT_THAT(schedule_refusal({"1f1b", "2f2b", "--p", "4", "--m", "8"}),
              HasSubstr("'2f2b' is no argument of tranche schedule"));
}

}  // namespace
}  // namespace tranche::tools
