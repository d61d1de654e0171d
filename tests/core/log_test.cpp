#include "tranche/core/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace tranche {
namespace {

using testing::ElementsAre;
using testing::MatchesRegex;
using testing::Pair;

using Lines = std::vector<std::pair<LogLevel, std::string>>;

Logger logger_into(Lines& lines, LogLevel level = LogLevel::debug, int rank = 0) {
  return Logger(rank, level, [&lines](LogLevel at, std::string_view text) { lines.emplace_back(at, text); });
}

TEST(Logger, HandsMessagesToTheFunctionAsTheyAre) {
  Lines lines;
  const Logger logger = logger_into(lines, LogLevel::debug, 4);
  logger.debug("a");
  logger.info("");
  logger.warning("{} {0} %v %s");
  logger.error("d\nd");
  EXPECT_EQ(logger.rank(), 4);
  EXPECT_THAT(lines, ElementsAre(Pair(LogLevel::debug, "a"), Pair(LogLevel::info, ""),
                                 Pair(LogLevel::warning, "{} {0} %v %s"), Pair(LogLevel::error, "d\nd")));
}

TEST(Logger, LeavesOutWhatIsBelowItsLevel) {
  Lines lines;
  const Logger logger = logger_into(lines, LogLevel::warning);
  logger.debug("a");
  logger.info("b");
  logger.warning("c");
  logger.error("d");
  logger.log(LogLevel::off, "e");
  EXPECT_THAT(lines, ElementsAre(Pair(LogLevel::warning, "c"), Pair(LogLevel::error, "d")));
  const Logger silent = logger_into(lines, LogLevel::off);
  silent.error("f");
  silent.log(LogLevel::off, "g");
  EXPECT_EQ(lines.size(), 2u);
}

TEST(Logger, OnceIsPerLoggerAndKey) {
  Lines lines;
  const Logger logger = logger_into(lines);
  const Logger copy = logger;
  logger.once("key", LogLevel::info, "first");
  logger.once("key", LogLevel::info, "second");
  copy.once("key", LogLevel::error, "third");
  copy.once("other key", LogLevel::info, "fourth");
  const Logger other = logger_into(lines);
  other.once("key", LogLevel::info, "fifth");
  EXPECT_THAT(lines, ElementsAre(Pair(LogLevel::info, "first"), Pair(LogLevel::info, "fourth"),
                                 Pair(LogLevel::info, "fifth")));
}

TEST(Logger, ThreadsDoNotLoseOrMixLines) {
  Lines lines;
  const Logger logger = logger_into(lines);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([logger, t] {
      for (int i = 0; i < 100; ++i) {
        logger.info("thread " + std::to_string(t));
        logger.once("one", LogLevel::info, "once");
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(lines.size(), 401u);
}

TEST(Logger, StandardErrorLinesStartWithTheRank) {
  testing::internal::CaptureStderr();
  const Logger logger(12);
  logger.debug("not shown");
  logger.warning("shown");
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              MatchesRegex("\\[rank 12\\] \\[[0-9:]+\\] \\[warning\\] shown\n"));
}

TEST(Logger, ManyOfThemLiveTogether) {
  // Loggers may have equal names, which spdlog's registry would refuse.
  testing::internal::CaptureStderr();
  const Logger a(0);
  const Logger b(1);
  const Logger c(1);
  a.info("x");
  b.info("y");
  c.info("z");
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_THAT(text, testing::HasSubstr("[rank 0]"));
  EXPECT_THAT(text, testing::HasSubstr("z\n"));
}

TEST(Logger, StandardErrorGetsNothingThatCommandsATerminal) {
  testing::internal::CaptureStderr();
  Logger(1, LogLevel::info).info("caf\u00e9 \x1b[2J\xff");
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              testing::EndsWith("[info] caf\u00e9 \\u001b[2J\\xff\n"));
}

}  // namespace
}  // namespace tranche
