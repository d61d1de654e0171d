#include "pipeline/schedule/check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/text_file.h"
#include "pipeline/schedule/generators.h"
#include "pipeline/schedule/lower.h"
#include "pipeline/schedule/text.h"
#include "tests/core/rounds.h"
#include "tests/pipeline/schedule/mutated_schedules.h"
#include "tests/pipeline/schedule/schedule_threads.h"
#include "tranche/core/error.h"

namespace tranche::pipeline {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::array all_models{MessageModel::async, MessageModel::channels, MessageModel::stream};

PipelineSchedule schedule_of(std::string_view text) {
  return read_schedule(text, "schedule.csv");
}

/// The text with which a schedule is refused before step 1; empty if it is accepted.
std::string refusal(const PipelineSchedule& schedule, MessageModel model = MessageModel::channels,
                    const Limits& limits = {}) {
  try {
    proved(schedule, model, "schedule.csv", limits);
  } catch (const ConfigurationError& error) {
    return error.message();
  }
  return {};
}
std::string refusal(std::string_view text, MessageModel model = MessageModel::channels) {
  return refusal(schedule_of(text), model);
}

/// Every named schedule with this number of stages and micro-batches.
std::vector<std::pair<std::string, PipelineSchedule>> named(int stages, std::int64_t micro_batches,
                                                            int most_chunks) {
  std::vector<std::pair<std::string, PipelineSchedule>> all;
  for (const NamedSchedule& schedule : named_schedules()) {
    if (schedule.name == "interleaved" && micro_batches % stages != 0) continue;
    for (int chunks = 1; chunks <= most_chunks; ++chunks) {
      if (!schedule.any_chunks && chunks != schedule.chunks_per_rank) continue;
      all.emplace_back(std::string(schedule.name) + " with " + std::to_string(chunks) + " chunks",
                       with_messages(generate(schedule.name, stages, micro_batches, chunks)));
    }
  }
  return all;
}

TEST(ScheduleCheck, PassesAllNamedSchedulesWithMessagesThatDoNotBlock) {
  int checked = 0, point = 0;
  for (int stages = 1; stages <= 8; ++stages) {
    for (std::int64_t micro_batches = 1; micro_batches <= 8; ++micro_batches) {
      if (!test::swept(point++, 5)) continue;
      for (const auto& [name, schedule] : named(stages, micro_batches, 4)) {
        for (const MessageModel model : {MessageModel::async, MessageModel::channels}) {
          const Verdict verdict = check(schedule, model, name);
          ASSERT_TRUE(verdict.accepted())
              << stages << " stages, " << micro_batches << " micro-batches: " << verdict.refusal;
          ++checked;
        }
      }
    }
  }
  EXPECT_GT(checked, 100);
}

TEST(ScheduleCheck, RefusesAllButAfabInOneStream) {
  std::string passed;
  for (const auto& [name, schedule] : named(4, 8, 4)) {
    const Verdict verdict = check(schedule, MessageModel::stream, name);
    if (verdict.accepted()) {
      passed += name + "\n";
    } else {
      EXPECT_EQ(verdict.fault, Fault::deadlock) << verdict.refusal;
      EXPECT_THAT(verdict.refusal, HasSubstr("(model stream)"));
      EXPECT_GE(verdict.cycle.size(), 4U);
      EXPECT_TRUE(verdict.most.empty());
    }
  }
  // Breadth-first with one chunk is afab.
  EXPECT_EQ(passed, "afab with 1 chunks\nbreadth-first with 1 chunks\n");
}

TEST(ScheduleCheck, FindsTheHangOfPytorchsIssue172668) {
  const std::string file = std::string(TRANCHE_SCHEDULES) + "/issue-172668.csv";
  const PipelineSchedule schedule = schedule_of(detail::read_text_file(file, "schedule"));
  EXPECT_EQ(refusal(schedule, MessageModel::async), "");
  EXPECT_EQ(refusal(schedule, MessageModel::channels), "");
  EXPECT_EQ(
      refusal(schedule, MessageModel::stream),
      "schedule.csv: rank 1 waits for 0SEND_F2 of rank 0, which waits for 3SEND_B0 of rank 1: a cycle of 4 "
      "actions "
      "(model stream): 0SEND_F2 and 2RECV_B0 behind it on rank 0, 3SEND_B0 and 1RECV_F2 behind it on rank 1");
  const Verdict verdict = check(schedule, MessageModel::stream);
  EXPECT_THAT(verdict.cycle, ElementsAre(RankAction{0, {ActionKind::send_residual, 0, 2}},
                                         RankAction{0, {ActionKind::receive_gradient, 2, 0}},
                                         RankAction{1, {ActionKind::send_gradient, 3, 0}},
                                         RankAction{1, {ActionKind::receive_residual, 1, 2}}));
  // Before the odd rank's receives were moved to the front, the same order hung one message earlier.
  EXPECT_EQ(
      refusal(generate("interleaved", 2, 4, 2), MessageModel::stream),
      "schedule.csv: rank 1 waits for 0SEND_F1 of rank 0, which waits for 1SEND_F0 of rank 1: a cycle of 4 "
      "actions "
      "(model stream): 0SEND_F1 and 2RECV_F0 behind it on rank 0, 1SEND_F0 and 1RECV_F1 behind it on rank 1");
}

TEST(ScheduleCheck, NamesWhatWaitsUnderEachModel) {
  // Rank 0 needs a gradient before it sends the residual from which the gradient results.
  const std::string_view cycle =
      "0F0,0SEND_F0,0F1,0RECV_B1,0SEND_F1,0RECV_B0,0B0,0B1\n"
      "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n";
  EXPECT_EQ(
      refusal(cycle, MessageModel::async),
      "schedule.csv: rank 1 waits for 0RECV_B1 of rank 0, which waits for 1RECV_F1 of rank 1: a cycle of 4 "
      "actions "
      "(model async): 0RECV_B1 and 0SEND_F1 behind it on rank 0, 1RECV_F1 and 1SEND_B1 behind it on rank 1");
  // Two residuals are received in a different order from their sends.
  const std::string_view crossed =
      "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
      "1RECV_F1,1RECV_F0,1F0,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n";
  EXPECT_EQ(refusal(crossed, MessageModel::async), "");
  EXPECT_EQ(refusal(crossed, MessageModel::channels),
            "schedule.csv: rank 1 waits for 0SEND_F0 of rank 0, which waits for 1RECV_F1 of rank 1: a cycle "
            "of 4 actions "
            "(model channels): 0SEND_F0 and 0SEND_F1 behind it on rank 0, 1RECV_F1 and 1RECV_F0 behind it on "
            "rank 1");
  // Three ranks in a ring.
  EXPECT_EQ(refusal("0F0,0SEND_F0,0RECV_B0,0B0,3RECV_F0,3F0,3B0,3SEND_B0\n"
                    "1RECV_F0,1F0,1SEND_F0,1RECV_B0,1B0,1SEND_B0\n"
                    "2RECV_F0,2F0,2SEND_F0,2RECV_B0,2B0,2SEND_B0\n",
                    MessageModel::async),
            "schedule.csv: rank 2 waits for 0RECV_B0 of rank 0, which waits for 1RECV_B0 of rank 1, which "
            "waits for "
            "2RECV_B0 of rank 2: a cycle of 6 actions (model async): 0RECV_B0 and 3SEND_B0 behind it on rank "
            "0, 1RECV_B0 and "
            "1SEND_B0 behind it on rank 1, 2RECV_B0 and 2SEND_B0 behind it on rank 2");
}

TEST(ScheduleCheck, SaysWhatIsMissingOrThereTwice) {
  EXPECT_EQ(refusal("0F0,0B0\n1F0,1F0,1B0\n"), "schedule.csv: 1F0 of rank 1 is there twice");
  EXPECT_EQ(refusal("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1RECV_F0,1F0,1B0,1SEND_B0\n"),
            "schedule.csv: 1RECV_F0 of rank 1 is there twice");
  EXPECT_EQ(refusal("0F0,0B0\n1F0,1B0,1I0\n"),
            "schedule.csv: 1I0 of rank 1 is there beside 1B0, which holds both halves");
  PipelineSchedule without = generate("1f1b", 3, 4);
  without.ranks[2].pop_back();
  EXPECT_EQ(refusal(without), "schedule.csv lacks 2B3");
  without.ranks[0].pop_back();
  EXPECT_EQ(refusal(without), "schedule.csv lacks 0B3 and 1 other action");
  EXPECT_EQ(refusal("0F0,0F1,0F2,0I0,0W0,0I1,0W1,0W2\n"), "schedule.csv lacks 0I2");
  EXPECT_EQ(refusal("0F0,0F1,0F2,0I0,0W0,0I1,0W1,0I2\n"), "schedule.csv lacks 0W2");
  EXPECT_EQ(refusal("0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"), "schedule.csv lacks 0SEND_F0");
  EXPECT_EQ(refusal("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0\n"), "schedule.csv lacks 1SEND_B0");
  EXPECT_EQ(refusal("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0\n"), "schedule.csv lacks 1RECV_F0");
  EXPECT_EQ(refusal("0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"), "schedule.csv lacks 0RECV_B0");
}

TEST(ScheduleCheck, RefusesActionsThatHaveNoPlace) {
  EXPECT_EQ(refusal("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1SEND_F0,1B0,1SEND_B0\n"),
            "schedule.csv: 1SEND_F0 of rank 1: there is no chunk behind the last one");
  EXPECT_EQ(refusal("0RECV_F0,0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"),
            "schedule.csv: 0RECV_F0 of rank 0: there is no chunk before the first one");
  EXPECT_EQ(refusal("0F0,0SEND_F0,1RECV_F0,1F0,1B0,0B0\n"),
            "schedule.csv: 0SEND_F0 of rank 0: chunk 1 lies on this rank too, so there is no message");
  PipelineSchedule other = generate("1f1b", 2, 2);
  other.ranks[0].push_back({ActionKind::forward, 1, 0});
  EXPECT_EQ(refusal(other), "schedule.csv: 1F0 of rank 0: chunk 1 lies on rank 1");
  other.ranks[0].back() = {ActionKind::forward, 0, 2};
  EXPECT_EQ(refusal(other), "schedule.csv: 0F2 of rank 0: the micro-batches are 0 to 1");
  other.ranks[0].back() = {ActionKind::forward, 2, 0};
  EXPECT_EQ(refusal(other), "schedule.csv: 2F0 of rank 0: the chunks are 0 to 1");
  other.rank_of_chunk = {0, 0};
  EXPECT_EQ(refusal(other), "schedule.csv lacks actions of rank 1: each rank of a pipeline has a chunk");
  EXPECT_EQ(refusal(PipelineSchedule{}), "schedule.csv lacks actions: it has 0 chunks and 0 micro-batches");
  other.rank_of_chunk = {0, 2};
  EXPECT_THROW(check(other, MessageModel::async), InvalidArgument);
}

TEST(ScheduleCheck, RefusesAResultThatIsNeededBeforeItIsThere) {
  EXPECT_EQ(refusal("0B0,0F0\n"), "schedule.csv: 0B0 of rank 0 stands before 0F0, whose result it needs");
  EXPECT_EQ(refusal("0F0,0W0,0I0\n"), "schedule.csv: 0W0 of rank 0 stands before 0I0, whose result it needs");
  EXPECT_EQ(refusal("1F0,0F0,1B0,0B0\n"),
            "schedule.csv: 1F0 of rank 0 stands before 0F0, whose result it needs");
  EXPECT_EQ(refusal("0F0,1F0,0B0,1I0,1W0\n"),
            "schedule.csv: 0B0 of rank 0 stands before 1I0, whose result it needs");
  EXPECT_EQ(refusal("0SEND_F0,0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"),
            "schedule.csv: 0SEND_F0 of rank 0 stands before 0F0, whose result it needs");
  EXPECT_EQ(refusal("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1SEND_B0,1B0\n"),
            "schedule.csv: 1F0 of rank 1 stands before 1RECV_F0, whose result it needs");
  EXPECT_EQ(refusal("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1SEND_B0,1B0\n"),
            "schedule.csv: 1SEND_B0 of rank 1 stands before 1B0, whose result it needs");
}

TEST(ScheduleCheck, RefusesGradientsThatDoNotAscend) {
  const std::string ascend =
      " gradients of a chunk have to be computed in ascending micro-batches, so that no schedule "
      "changes a bit";
  EXPECT_EQ(refusal("0F0,0F1,0B1,0B0\n"),
            "schedule.csv: 0B0 of rank 0 stands behind 0B1: the weight" + ascend);
  EXPECT_EQ(refusal("0F0,0F1,0I0,0I1,0W1,0W0\n"),
            "schedule.csv: 0W0 of rank 0 stands behind 0W1: the weight" + ascend);
  EXPECT_EQ(refusal("0F0,0F1,0I1,0I0,0W0,0W1\n"),
            "schedule.csv: 0I0 of rank 0 stands behind 0I1: the input" + ascend);
  EXPECT_EQ(refusal("0F0,0F1,0I0,0B1,0W0\n"),
            "schedule.csv: 0W0 of rank 0 stands behind 0B1: the weight" + ascend);
}

TEST(ScheduleCheck, CountsWhatRanksHold) {
  const auto activations = [](const PipelineSchedule& schedule) {
    std::vector<std::int64_t> most;
    for (const Held& held : check(with_messages(schedule), MessageModel::channels).most)
      most.push_back(held.activations);
    return most;
  };
  EXPECT_THAT(activations(generate("afab", 4, 8)), ElementsAre(8, 8, 8, 8));
  EXPECT_THAT(activations(generate("1f1b", 4, 8)), ElementsAre(4, 3, 2, 1));
  EXPECT_THAT(activations(generate("zb-h1", 4, 8)), ElementsAre(4, 4, 4, 4));
  EXPECT_THAT(activations(generate("interleaved", 4, 8, 2)), ElementsAre(11, 9, 7, 5));

  // Two residuals are received before the first is read.
  const Verdict early = check(schedule_of("0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
                                          "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"),
                              MessageModel::channels);
  EXPECT_THAT(early.most, ElementsAre(Held{2, 1, 0}, Held{1, 2, 0}));
  const Verdict gathered =
      check(with_gathers(with_messages(generate("breadth-first", 2, 2, 2)), 1), MessageModel::channels);
  EXPECT_THAT(gathered.most, ElementsAre(Held{4, 1, 1}, Held{4, 1, 1})) << gathered.refusal;
}

TEST(ScheduleCheck, RefusesMoreThanTheLimits) {
  Limits limits;
  limits.activations = 4;
  EXPECT_EQ(refusal(generate("1f1b", 4, 8), MessageModel::channels, limits), "");
  limits.activations = 3;
  EXPECT_EQ(refusal(generate("1f1b", 4, 8), MessageModel::channels, limits),
            "schedule.csv: rank 0 holds 4 pairs of chunk and micro-batch at 0F3, and the limit is 3");
  limits = {};
  limits.buffers = 0;
  EXPECT_EQ(refusal(generate("1f1b", 2, 1), MessageModel::channels, limits),
            "schedule.csv: rank 0 holds 1 message received and not read at 0RECV_B0, and the limit is 0");
  limits = {};
  limits.gathered = 1;
  const PipelineSchedule two = with_gathers(with_messages(generate("breadth-first", 2, 2, 2)), 2);
  EXPECT_EQ(refusal(two, MessageModel::channels, limits),
            "schedule.csv: rank 0 holds 2 chunks gathered at 2GATHER, and the limit is 1");
  limits.gathered = 2;
  EXPECT_EQ(refusal(two, MessageModel::channels, limits), "");
}

TEST(ScheduleCheck, RefusesWeightsThatAreUsedWithoutAGather) {
  EXPECT_EQ(refusal("0GATHER,0F0,0B0,0FREE\n"), "");
  EXPECT_EQ(refusal("0GATHER,0F0,0FREE,0B0\n"),
            "schedule.csv: 0B0 of rank 0 stands where the weights of chunk 0 are not gathered");
  EXPECT_EQ(refusal("0GATHER,0F0,0GATHER,0B0,0FREE\n"),
            "schedule.csv: 0GATHER of rank 0 stands where the weights of chunk 0 are gathered already");
  EXPECT_EQ(refusal("0GATHER,0F0,0B0,0FREE,0FREE\n"),
            "schedule.csv: 0FREE of rank 0 stands where the weights of chunk 0 are not gathered");
  EXPECT_EQ(
      refusal("0GATHER,0FREE,0GATHER,0F0,0B0,0FREE\n"),
      "schedule.csv: 0FREE of rank 0 stands where the weights of chunk 0 are gathered and not used yet");
  EXPECT_EQ(refusal("0GATHER,0F0,0B0\n"), "schedule.csv lacks 0FREE at the end of rank 0");
}

TEST(ScheduleCheck, TakesNoMoreForLargeNumbers) {
  PipelineSchedule schedule = generate("1f1b", 2, 2);
  schedule.micro_batches = std::int64_t{1} << 62;
  schedule.ranks[1].push_back({ActionKind::forward, 1, schedule.micro_batches - 1});
  EXPECT_EQ(refusal(schedule), "schedule.csv lacks 0F2 and others");
}

TEST(ScheduleCheck, NamesTheModelsOfMessages) {
  for (const MessageModel model : all_models) EXPECT_EQ(message_model_named(name_of(model)), model);
  try {
    message_model_named("channel");
    FAIL();
  } catch (const ConfigurationError& error) {
    EXPECT_EQ(error.message(), "'channel' is no model of messages: the models are async, channels, stream");
  }
}

TEST(ScheduleCheck, ReturnsTheScheduleWithItsMessages) {
  EXPECT_EQ(proved(generate("zb-v", 2, 3), MessageModel::channels, "zb-v"),
            with_messages(generate("zb-v", 2, 3)));
}

/// Each schedule runs in threads with each message model, and must end as the checker predicts.
void compare_with_threads(int from, int rounds) {
  std::map<Fault, int> faults;
  for (const int round : test::rounds(rounds)) {
    const test::MutatedSchedule mutated = test::mutated_schedule(static_cast<std::uint64_t>(from + round));
    const bool gathers = has_gathers(mutated.schedule);
    for (const MessageModel model : all_models) {
      const Verdict verdict = check(mutated.schedule, model);
      const test::Ending ending = test::run_by_threads(mutated.schedule, model);
      const auto story = [&] {
        return "seed " + std::to_string(from + round) + ", " + mutated.origin + ", model " +
               std::string(name_of(model)) + "\nchecker: " + verdict.refusal +
               "\nthreads: " + (ending.outcome == test::Outcome::hung ? "hung" : ending.why) + "\n" +
               write_schedule(mutated.schedule);
      };
      ASSERT_EQ(verdict.accepted(), ending.outcome == test::Outcome::trained) << story();
      if (verdict.fault == Fault::deadlock && !gathers) {
        ASSERT_EQ(ending.outcome, test::Outcome::hung) << story();
      }
      if (verdict.fault == Fault::gradients) {
        ASSERT_EQ(ending.outcome, test::Outcome::broken) << story();
      }
      ++faults[verdict.fault];
    }
  }
  if (rounds < 10000 || test::sanitized || test::sweep_part().of > 1) return;
  for (const Fault fault : {Fault::none, Fault::misplaced, Fault::twice, Fault::missing, Fault::order,
                            Fault::deadlock, Fault::gathering, Fault::gradients}) {
    EXPECT_GT(faults[fault], 100) << "of kind " << static_cast<int>(fault);
  }
}

TEST(ScheduleOracle, ThreadsEndAsTheCheckerSays) {
  compare_with_threads(10000, 300);
}

TEST(ScheduleOracleSlow, ThreadsEndAsTheCheckerSays) {
  compare_with_threads(0, 10000);
}

}  // namespace
}  // namespace tranche::pipeline
