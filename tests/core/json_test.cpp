#include "core/json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <nlohmann/json.hpp>

namespace tranche {
namespace {

using detail::brief_json;
using detail::is_utf8;
using detail::JsonRemarks;
using detail::parse_json;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using ::testing::StartsWith;

std::string problem_of(std::string_view text) {
  JsonRemarks remarks;
  const bool discarded = parse_json(text, &remarks).is_discarded();
  EXPECT_EQ(discarded, !remarks.problem.empty());
  return remarks.problem;
}

std::string nested(std::size_t levels) {
  return std::string(levels, '[') + std::string(levels, ']');
}

TEST(Json, IsReadInTheOrderOfTheText) {
  for (const char* text :
       {R"({"b":[1,-2,2.5,"x\"é\\",null,true],"a":{"d":{},"c":[]}})", "7", R"("[{")", "[[],[{}]]"}) {
    JsonRemarks remarks;
    EXPECT_EQ(parse_json(text, &remarks).dump(), text);
    EXPECT_EQ(remarks.problem + remarks.duplicate, "") << text;
  }
  EXPECT_EQ(parse_json(" {\"a\": 18446744073709551615}\n")["a"], UINT64_MAX);
}

TEST(Json, OfAKeyGivenTwiceTheLastValueCountsAndThePathIsKnown) {
  JsonRemarks remarks;
  const auto value =
      parse_json(R"({"a": 1, "b": [{"c": {"d": 1, "e": 2, "d": {"f": 3}}}], "a": 5})", &remarks);
  EXPECT_EQ(value.dump(), R"({"a":5,"b":[{"c":{"d":{"f":3},"e":2}}]})");
  EXPECT_EQ(remarks.duplicate, "b.c.d");
}

TEST(Json, ANumberThatADoubleTurnsInto0IsKnown) {
  const auto vanished = [](std::string_view text) {
    JsonRemarks remarks;
    EXPECT_FALSE(parse_json(text, &remarks).is_discarded());
    return remarks.vanished;
  };
  EXPECT_EQ(vanished(R"({"a": [1e-320, 1e-400, -2e-999]})"), "1e-400");
  EXPECT_EQ(vanished("-0.01e-999"), "-0.01e-999");
  EXPECT_EQ(vanished(R"([0, 0.0, 0.00e-999, -0.0, "1e-400"])"), "");
  EXPECT_EQ(vanished("0." + std::string(5000, '0') + "1"), "0." + std::string(198, '0') + "...");
}

// The library's parser accepts any depth, but its printing recurses and would overflow the stack.
TEST(Json, IsNoDeeperThanItMayBe) {
  EXPECT_EQ(problem_of(nested(64)), "");
  EXPECT_EQ(problem_of(nested(65)), "blocks are nested deeper than 64");
  std::string blocks;
  for (int level = 0; level < 200'000; ++level) blocks += "{\"a\":";
  EXPECT_EQ(problem_of(blocks), "blocks are nested deeper than 64");
  EXPECT_EQ(problem_of("[\"" + std::string(100, '[') + "\\\"" + std::string(100, '{') + "\"]"), "")
      << "brackets in texts are none";
  std::string flat = "[";
  for (int item = 0; item < 1000; ++item) flat += "[],";
  EXPECT_EQ(problem_of(flat + "{}]"), "");
  JsonRemarks remarks;
  parse_json(" " + nested(70), &remarks);
  EXPECT_EQ(remarks.byte, 65u);
}

TEST(Json, ProblemsAreNoExceptionsOfTheLibrary) {
  EXPECT_EQ(problem_of(""), "it is empty");
  EXPECT_EQ(problem_of(" \n"), "it is empty");
  EXPECT_EQ(problem_of("{\"a\": 1e999}"), "number overflow parsing '1e999'");
  EXPECT_THAT(problem_of("{\"a\": \"\xff\"}"), HasSubstr("ill-formed UTF-8"));
  EXPECT_THAT(problem_of("{\"a\": 1} 2"), StartsWith("syntax error"));
  EXPECT_THAT(problem_of("[1, 2,]"), StartsWith("syntax error"));
  EXPECT_THAT(problem_of("\"" + std::string(100'000, 'x')), SizeIs(::testing::Lt(300)));
}

TEST(Json, IntegersMayBeWrittenInAnyWayThatIsExact) {
  const auto integer = [](std::string_view text) {
    return detail::json_integer(parse_json(text)).value_or(-7);
  };
  EXPECT_EQ(integer("9223372036854775807"), INT64_MAX);
  EXPECT_EQ(integer("-9223372036854775808"), INT64_MIN);
  EXPECT_EQ(integer("5e8"), 500'000'000);
  EXPECT_EQ(integer("-2.0"), -2);
  EXPECT_EQ(integer("9007199254740992.0"), 9007199254740992);
  for (const char* none :
       {"9223372036854775808", "9007199254740994.0", "1e300", "0.5", "\"1\"", "true", "null", "[1]"}) {
    EXPECT_EQ(integer(none), -7) << none;
  }
}

// The library's own parser compares each key with all earlier ones.
TEST(Json, ManyKeysTakeTimeInProportion) {
  std::string text = "{";
  for (int key = 0; key < 300'000; ++key) text += "\"key" + std::to_string(key) + "\":0,";
  text += "\"end\":0}";
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(parse_json(text).size(), 300'001u);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(120))
      << "hours, if each is compared";
}

TEST(Json, InMessagesListsAndBlocksAreOnlyCounted) {
  EXPECT_EQ(brief_json(parse_json("1.5")), "1.5");
  EXPECT_EQ(brief_json(parse_json("\"two\"")), "\"two\"");
  EXPECT_EQ(brief_json(parse_json("[1, [2, 3]]")), "a list of 2");
  EXPECT_EQ(brief_json(parse_json("{\"a\": 1}")), "a block of 1 keys");
  EXPECT_EQ(brief_json("\xff"), "\"\xef\xbf\xbd\"");
  EXPECT_THAT(brief_json(std::string(1000, 'x')), SizeIs(60));
}

TEST(Json, KnowsWhichTextsItCanHold) {
  EXPECT_TRUE(is_utf8(""));
  EXPECT_TRUE(is_utf8("é\n"));
  EXPECT_FALSE(is_utf8("/x/\xff"));
}

}  // namespace
}  // namespace tranche
