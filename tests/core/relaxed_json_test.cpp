#include "core/relaxed_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tranche/core/error.h"

namespace tranche {
namespace {

using detail::place_in;
using detail::strict_json;
using detail::StrictJson;

std::string read(std::string_view relaxed) {
  const StrictJson strict = strict_json(relaxed);
  EXPECT_EQ(strict.origin.size(), strict.text.size() + 1);
  const auto json = nlohmann::json::parse(strict.text, nullptr, false);
  return json.is_discarded() ? "no JSON" : json.dump();
}

std::string problem(std::string_view relaxed) {
  try {
    strict_json(relaxed);
  } catch (const InvalidArgument& error) {
    return error.message();
  }
  return "nothing was thrown";
}

TEST(RelaxedJson, StrictJsonStaysWhatItIs) {
  for (const char* text : {R"({"a":[1,-2.5e+3,"x\"y\\",null,true],"b":{"c":{}},"d":[]})",
                           R"(["#no","//no","/*no*/","a,}"])", "7", R"("")"}) {
    EXPECT_EQ(read(text), nlohmann::json::parse(text).dump()) << text;
  }
}

TEST(RelaxedJson, CommentsOfThreeKinds) {
  EXPECT_EQ(read("# first\n{\"a\": 1, // second\n \"b\" /* third\n , */ : 2} # last"), R"({"a":1,"b":2})");
  EXPECT_EQ(read("{\"a\": 1#x\n}"), R"({"a":1})");
  EXPECT_EQ(read("{a: 3//x\n}"), R"({"a":3})");
  EXPECT_EQ(read("{a: 3/*x*/, b: word/*y*/}"), R"({"a":3,"b":"word"})");
}

TEST(RelaxedJson, CommasThatAreTooManyOrMissingAtTheEndOfALine) {
  EXPECT_EQ(read("{\"a\": [1, 2,], \"b\": {\"c\": 1,},}"), R"({"a":[1,2],"b":{"c":1}})");
  EXPECT_EQ(read("{\"a\": 1,\n # nothing more\n}"), R"({"a":1})");
  EXPECT_EQ(read("{\n\"a\": 1\n\"b\": [1\n2]\n c: {}\n}"), R"({"a":1,"b":[1,2],"c":{}})");
  for (const char* text : {"{,}", "[,1]", "{\"a\": 1,, \"b\": 2}", "{\"a\": 1 \"b\": 2}", "{\"a\": 1},",
                           "[1 2]", "1\n2", "[1}"}) {
    EXPECT_EQ(read(text), "no JSON") << text;
  }
}

TEST(RelaxedJson, WordsWithoutQuotes) {
  EXPECT_EQ(read("{stage: 3, stage3_x-y.z: auto, true: true, 1: 2}"),
            R"({"1":2,"stage":3,"stage3_x-y.z":"auto","true":true})");
  EXPECT_EQ(read("{a: True, b: False, c: None, d: truely}"), R"({"a":true,"b":false,"c":null,"d":"truely"})");
  EXPECT_EQ(read("{a: /local_nvme\nb: C\\d, c: 'it\"s \\'', d: \"it's\", 'e': 1}"),
            R"({"a":"/local_nvme","b":"C\\d","c":"it\"s '","d":"it's","e":1})");
  EXPECT_EQ(read("{a: 01, b: 1., c: .5, d: +1, e: 1e, f: -, g: -0.5e-3, h: 5E8}"),
            R"({"a":"01","b":"1.","c":".5","d":"+1","e":"1e","f":"-","g":-0.0005,"h":500000000.0})");
}

TEST(RelaxedJson, LinesOfWindowsAndTheMarkAtTheBeginning) {
  EXPECT_EQ(read("\xEF\xBB\xBF{\r\n a: x\r\n b: 2\r\n}\r\n"), R"({"a":"x","b":2})");
}

TEST(RelaxedJson, WhatItDoesNotReadIsToldWithItsPlace) {
  EXPECT_EQ(problem("{\n  a: two words\n}"), "line 2, column 6: text that is not one word needs quotes");
  EXPECT_EQ(problem("{\n  nvme_path: /data/run#1\n}"),
            "line 2, column 14: text with # or // in it needs quotes");
  EXPECT_EQ(problem("{a: /data//run}"), "line 1, column 5: text with # or // in it needs quotes");
  EXPECT_EQ(read("{a: /data/run # 1\n}"), R"({"a":"/data/run"})");
  EXPECT_EQ(problem("{a: http://x}"), "line 1, column 5: text that is not one word needs quotes");
  EXPECT_EQ(problem("{\n\n /* for ever"), "line 3, column 2: the comment that begins here has no end");
  EXPECT_EQ(problem("{a: '''x\ny'''}"),
            "line 1, column 5: text of several lines in ''' is not read; write it in \"...\"");
}

TEST(RelaxedJson, DeepNestingIsRefusedBeforeAParserRecurses) {
  const std::string deep = std::string(64, '[') + std::string(64, ']');
  EXPECT_EQ(read(deep), deep);
  EXPECT_EQ(problem(std::string(65, '[')), "line 1, column 65: blocks are nested deeper than 64");
  EXPECT_EQ(problem(std::string(1000000, '{')), "line 1, column 65: blocks are nested deeper than 64");
}

TEST(RelaxedJson, EveryByteKnowsItsPlace) {
  const std::string_view given = "{ # c\n  key: [1,],\n  other: None\n}";
  const StrictJson strict = strict_json(given);
  const auto place_of = [&](std::string_view what) {
    return place_in(given, strict.origin[strict.text.find(what)]);
  };
  EXPECT_EQ(place_of("\"key\""), "line 2, column 3");
  EXPECT_EQ(place_of("]"), "line 2, column 11");
  EXPECT_EQ(place_of("null"), "line 3, column 10");
  EXPECT_EQ(place_of("}"), "line 4, column 1");
  EXPECT_EQ(place_in(given, strict.origin.back()), "line 4, column 2");
  EXPECT_EQ(place_in("", 9), "line 1, column 1");
}

/// A text that is cut anywhere is either an error or not JSON, and causes no crash.
TEST(RelaxedJson, TextsThatEndTooEarly) {
  const std::string whole = "{a: 'x\\'y', # c\n \"b\\\"\": [True, {c: /* d */ 1e5,},],\n}";
  EXPECT_EQ(read(whole), R"({"a":"x'y","b\"":[true,{"c":100000.0}]})");
  for (std::size_t length = 0; length < whole.size(); ++length) {
    const std::string cut = whole.substr(0, length);
    if (problem(cut) == "nothing was thrown") {
      EXPECT_EQ(read(cut), "no JSON") << cut;
    }
  }
}

}  // namespace
}  // namespace tranche
