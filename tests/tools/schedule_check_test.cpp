// tranche schedule check, for people and for programs.
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
using testing::StartsWith;

ProgramResult check_schedule(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {"schedule", "check"});
  return test::run(arguments);
}

/// The hang described in pytorch's issue 172668, in the fewest actions: one stream of messages on each rank.
constexpr const char* two_lines =
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
    "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n";

TEST(ScheduleCheckCommand, SaysWhatRanksHold) {
  const TemporaryFolder folder;
  const std::string file = folder.write("mine.csv", two_lines);
  const ProgramResult done = check_schedule({file});
  EXPECT_EQ(done.status, 0);
  EXPECT_EQ(done.errors, "");
  EXPECT_EQ(done.out,
            file + R"(: complete, causal and free of deadlock (model channels); weight gradients ascend
2 stages, 2 micro-batches, 2 chunks, 16 actions

  rank    peak activations   received messages     gathered chunks
     0                   2                   1                   0
     1                   1                   1                   0
)");
}

TEST(ScheduleCheckCommand, PrintsTheCycle) {
  const TemporaryFolder folder;
  const std::string file = folder.write("mine.csv", two_lines);
  const ProgramResult done = check_schedule({file, "--model", "stream"});
  EXPECT_EQ(done.status, 2);
  EXPECT_EQ(done.out, "");
  EXPECT_THAT(
      done.errors,
      StartsWith(
          "tranche: " + file +
          ": rank 1 waits for 0SEND_F1 of rank 0, which waits for 1SEND_B0 of rank 1: a cycle of 4 actions "
          "(model stream): 0SEND_F1 and 0RECV_B0 behind it on rank 0, 1SEND_B0 and 1RECV_F1 behind it on "
          "rank 1"));
  const ProgramResult told = check_schedule({file, "--model", "stream", "--json"});
  EXPECT_EQ(told.status, 2);
  EXPECT_EQ(told.errors, "");
  const json verdict = json::parse(told.out);
  EXPECT_EQ(verdict.at("accepted"), false);
  EXPECT_THAT(verdict.at("refusal").get<std::string>(), HasSubstr("a cycle of 4 actions (model stream)"));
  EXPECT_EQ(verdict.at("cycle"),
            json::parse(R"([{"rank": 0, "action": "0SEND_F1"}, {"rank": 0, "action": "0RECV_B0"},
                                                 {"rank": 1, "action": "1SEND_B0"}, {"rank": 1, "action": "1RECV_F1"}])"));
  EXPECT_EQ(verdict.at("ranks"), json::array());
}

TEST(ScheduleCheckCommand, AddsMessagesAndSaysSo) {
  const TemporaryFolder folder;
  const std::string file = folder.write("mine.csv", "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n");
  const ProgramResult done = check_schedule({file, "--model", "stream"});
  EXPECT_EQ(done.status, 0);
  EXPECT_EQ(done.errors, "note: " + file +
                             " has no messages; what a run would do is checked: a receive before each action "
                             "that reads a message, and a send after the action that makes it\n");
  EXPECT_THAT(done.out, HasSubstr("2 stages, 2 micro-batches, 2 chunks, 16 actions"));
}

TEST(ScheduleCheckCommand, RefusesWithStatus2) {
  const TemporaryFolder folder;
  const auto refusal = [&](const std::vector<std::string>& more,
                           const char* text = "0F0,0B0\n1F0,1F0,1B0\n") {
    std::vector<std::string> arguments{folder.write("mine.csv", text)};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const ProgramResult done = check_schedule(arguments);
    EXPECT_EQ(done.status, 2);
    EXPECT_EQ(done.out, "");
    return done.errors;
  };
  EXPECT_THAT(refusal({}), HasSubstr("mine.csv: 1F0 of rank 1 is there twice"));
  EXPECT_THAT(refusal({}, "0F0,0B0,0F1\n1F0,1B0,1F1,1B1\n"), HasSubstr("mine.csv lacks 0B1"));
  EXPECT_THAT(
      refusal({"--activations", "1"}, two_lines),
      HasSubstr("mine.csv: rank 0 holds 2 pairs of chunk and micro-batch at 0F1, and the limit is 1"));
  EXPECT_THAT(refusal({"--buffers", "0"}, two_lines),
              HasSubstr("rank 0 holds 1 message received and not read at 0RECV_B0"));
  EXPECT_THAT(refusal({"--gathered", "0"}, "0GATHER,0F0,0B0,0FREE\n"),
              HasSubstr("rank 0 holds 1 chunk gathered at 0GATHER"));
  EXPECT_THAT(refusal({"--p", "4"}, two_lines), HasSubstr("was made for 2 stages, but there are 4"));
  EXPECT_THAT(refusal({"--model", "nccl"}),
              HasSubstr("--model: 'nccl' is no model of messages: the models are async, channels, stream"));
  EXPECT_THAT(refusal({"--buffers", "-1"}), HasSubstr("--buffers is -1, but must be 0 or more"));
  EXPECT_THAT(refusal({"--v", "-1"}), HasSubstr("--v is -1, but must be 1 to 1000000"));
  EXPECT_THAT(check_schedule({}).errors, HasSubstr("schedule is missing; see tranche schedule check --help"));
}

TEST(ScheduleCheckCommand, TakesNames) {
  const ProgramResult done = check_schedule({"zb-v", "--p", "2", "--m", "3", "--json"});
  EXPECT_EQ(done.status, 0);
  EXPECT_EQ(done.errors, "");
  const json verdict = json::parse(done.out);
  EXPECT_EQ(verdict.at("accepted"), true);
  EXPECT_EQ(verdict.at("rank_of_chunk"), (std::vector<int>{0, 1, 1, 0}));
  EXPECT_EQ(verdict.at("ranks").size(), 2U);
}

}  // namespace
}  // namespace tranche::tools
