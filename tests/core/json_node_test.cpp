#include "core/json_node.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <optional>

#include "tests/core/error_text.h"
#include "tranche/core/error.h"

namespace tranche {
namespace {

using detail::JsonNode;
using test::message_of;
using test::nothing_thrown;

const char* const sample = R"({
  "name": "a", "on": true, "count": 3, "share": 0.5, "bytes": 5e8, "nothing": null,
  "list": [1, 2, 3], "rates": [1.5, 2], "words": ["x", "y"], "empty": "",
  "blocks": [{"kind": "disk"}, {"kind": "tape", "size": 1.5}]})";

JsonNode root_of(const std::string& text = sample) {
  return JsonNode::read<ConfigurationError>(text, "m.json");
}

/// The error message of `get` for the member `key` of an object, if its value is `value`.
template <typename Get>
std::string refused(const std::string& value, Get&& get) {
  const JsonNode root = root_of("{\"a\": {\"b\": " + value + "}}");
  return message_of<ConfigurationError>([&] { (void)get(root["a"]["b"]); });
}

TEST(JsonNode, ReadsWhatIsAsAsked) {
  const JsonNode root = root_of();
  EXPECT_EQ(root["name"].text(), "a");
  EXPECT_EQ(root["name"].name(), "a");
  EXPECT_EQ(root["name"].choice({"b", "a"}), "a");
  EXPECT_EQ(root["empty"].text(), "");
  EXPECT_TRUE(root["on"].boolean());
  EXPECT_EQ(root["count"].integer(3, 3), 3);
  EXPECT_EQ(root["count"].integer<int>(), 3);
  EXPECT_EQ(root["bytes"].integer(), 500'000'000);
  EXPECT_EQ(root["share"].number(0.5, 0.5), 0.5);
  EXPECT_EQ(root["count"].number(), 3.0);
  EXPECT_EQ(root["list"].integers(1, 3), (std::vector<std::int64_t>{1, 2, 3}));
  EXPECT_EQ(root["rates"].numbers(0, 9), (std::vector<double>{1.5, 2}));
  EXPECT_EQ(root["words"].texts(), (std::vector<std::string>{"x", "y"}));
  EXPECT_EQ(root["blocks"].items(2, 2)[1]["kind"].text(), "tape");
  EXPECT_EQ(root["blocks"].items()[0].object(), R"({"kind":"disk"})");
  EXPECT_EQ(root["blocks"].items()[0].members()[0].first, "kind");
  EXPECT_EQ(root["list"].json().dump(), "[1,2,3]");
  root["blocks"].items()[1].allow({"kind", "size", "speed"});
}

TEST(JsonNode, NullIsAsGoodAsAbsentForWhatMayBeAbsent) {
  const JsonNode root = root_of();
  EXPECT_TRUE(root["on"]);
  EXPECT_FALSE(root["nothing"]);
  EXPECT_FALSE(root["nowhere"]);
  EXPECT_EQ(root["nothing"].integer_or(7), 7);
  EXPECT_EQ(root["nowhere"].integer_or<int>(7, 0, 1), 7);
  EXPECT_EQ(root["count"].integer_or(7), 3);
  EXPECT_EQ(root["nowhere"].number_or(0.25, 1, 2), 0.25);
  EXPECT_EQ(root["share"].number_or(0.25, 0, 1), 0.5);
}

TEST(JsonNode, ItsTextLivesAsLongAsANode) {
  std::optional<JsonNode> node;
  {
    const JsonNode root = root_of("{\"a\": [{\"b\": \"a text beyond what a string keeps in itself\"}]}");
    node = root["a"].items().front()["b"];
  }
  EXPECT_EQ(node->text(), "a text beyond what a string keeps in itself");
}

TEST(JsonNode, ATextThatCannotBeReadIsAnErrorOfTheReadersType) {
  EXPECT_EQ(message_of<ConfigurationError>([] { root_of("{\n  x"); }).substr(0, 52),
            "m.json is not JSON: line 2, column 3: syntax error w");
  EXPECT_EQ(message_of<CheckpointError>([] { JsonNode::read<CheckpointError>("", "m"); }),
            "m is not JSON: line 1, column 1: it is empty");
  EXPECT_EQ(message_of<ConfigurationError>([] { root_of(R"({"a": [{"b": 1, "c": 2, "b": 3}]})"); }),
            "m.json: key 'a.b' is given twice; keep one");
  const std::string twice = R"({"a": 1, "a": 1})";
  EXPECT_EQ(message_of<CheckpointError>([&] { JsonNode::read<CheckpointError>(twice, "m", "user"); }),
            "m: key 'user.a' is given twice; keep one");
  EXPECT_EQ(
      message_of<CheckpointError>([] { JsonNode::read<CheckpointError>("{}", "m", "user")["a"].text(); }),
      "m: user.a is missing");
}

TEST(JsonNode, WhatIsMissingIsSaidByTheGetter) {
  const JsonNode root = root_of();
  const auto missing = [&](auto get) {
    return message_of<ConfigurationError>([&] { (void)get(root["blocks"].items()[1]["speed"]); });
  };
  const std::string expected = "m.json: blocks[1].speed is missing";
  EXPECT_EQ(missing([](const JsonNode& node) { return node.text(); }), expected);
  EXPECT_EQ(missing([](const JsonNode& node) { return node.boolean(); }), expected);
  EXPECT_EQ(missing([](const JsonNode& node) { return node.integer(); }), expected);
  EXPECT_EQ(missing([](const JsonNode& node) { return node.number(); }), expected);
  EXPECT_EQ(missing([](const JsonNode& node) { return node.items().size(); }), expected);
  EXPECT_EQ(missing([](const JsonNode& node) { return node.texts().size(); }), expected);
  EXPECT_EQ(missing([](const JsonNode& node) { return node.object(); }), expected);
  EXPECT_EQ(missing([](const JsonNode& node) { return node["more"].text(); }), expected);
  EXPECT_EQ(missing([](const JsonNode& node) { return node.json().size(); }), expected);
}

TEST(JsonNode, OtherTypesAreNamedWithTheValue) {
  const auto text = [](const JsonNode& node) { return node.text(); };
  const auto integer = [](const JsonNode& node) { return node.integer(); };
  EXPECT_EQ(refused("7", text), "m.json: a.b is not a string: 7");
  EXPECT_EQ(refused("null", text), "m.json: a.b is not a string: null");
  EXPECT_EQ(refused("1", [](const JsonNode& node) { return node.boolean(); }),
            "m.json: a.b is neither true nor false: 1");
  EXPECT_EQ(refused("\"3\"", integer), "m.json: a.b is not an integer: \"3\"");
  EXPECT_EQ(refused("true", integer), "m.json: a.b is not an integer: true");
  EXPECT_EQ(refused("\"fast\"", [](const JsonNode& node) { return node.number(); }),
            "m.json: a.b is not a number: \"fast\"");
  EXPECT_EQ(refused("{}", [](const JsonNode& node) { return node.items().size(); }),
            "m.json: a.b is not an array: a block of 0 keys");
  EXPECT_EQ(refused("[1]", [](const JsonNode& node) { return node.members().size(); }),
            "m.json: a.b is not an object: a list of 1");
  EXPECT_EQ(refused("[1]", [](const JsonNode& node) { return node.object(); }),
            "m.json: a.b is not an object: a list of 1");
  EXPECT_EQ(refused("[1]", [](const JsonNode& node) { return node["c"].text(); }),
            "m.json: a.b is not an object: a list of 1");
  EXPECT_EQ(refused("[1, \"x\"]", [](const JsonNode& node) { return node.integers().size(); }),
            "m.json: a.b[1] is not an integer: \"x\"");
  EXPECT_EQ(refused("[1, \"x\"]", [](const JsonNode& node) { return node.numbers(0, 9).size(); }),
            "m.json: a.b[1] is not a number: \"x\"");
  EXPECT_EQ(refused("[\"x\", 1]", [](const JsonNode& node) { return node.texts().size(); }),
            "m.json: a.b[1] is not a string: 1");
  EXPECT_EQ(message_of<ConfigurationError>([] { root_of("[]")["a"].text(); }),
            "m.json is not an object: a list of 0");
}

TEST(JsonNode, NumbersAreOfTheirRange) {
  const auto integer = [](const JsonNode& node) { return node.integer(); };
  const auto small = [](const JsonNode& node) { return node.integer<int>(1); };
  const auto number = [](const JsonNode& node) { return node.number(0, 10); };
  EXPECT_EQ(refused("1.5", integer), "m.json: a.b is not an integer: 1.5");
  EXPECT_EQ(refused("1e300", integer), "m.json: a.b is not an integer: 1e+300");
  EXPECT_EQ(refused("9007199254740994.0", integer), "m.json: a.b is not an integer: 9.007199254740994e+15");
  EXPECT_EQ(refused("18446744073709551615", integer),
            "m.json: a.b is not an integer of 64 bits: 18446744073709551615");
  EXPECT_EQ(refused("9223372036854775807", integer), nothing_thrown);
  EXPECT_EQ(refused("-9223372036854775808", integer), nothing_thrown);
  EXPECT_EQ(refused("0", small), "m.json: a.b is 0, which cannot be: from 1 to 2147483647 is wanted");
  EXPECT_EQ(refused("4294967297", small),
            "m.json: a.b is 4294967297, which cannot be: from 1 to 2147483647 is wanted");
  EXPECT_EQ(refused("10.5", number), "m.json: a.b is 10.5, which cannot be: from 0 to 10 is wanted");
  EXPECT_EQ(refused("-1", number), "m.json: a.b is -1, which cannot be: from 0 to 10 is wanted");
  EXPECT_EQ(refused("[0, 3]", [](const JsonNode& node) { return node.integers(1).size(); }),
            "m.json: a.b[0] is 0, which cannot be: from 1 to 9223372036854775807 is wanted");
  EXPECT_EQ(refused("[0, 3]", [](const JsonNode& node) { return node.numbers(0, 2).size(); }),
            "m.json: a.b[1] is 3, which cannot be: from 0 to 2 is wanted");
}

TEST(JsonNode, ListsAreOfTheirLength) {
  EXPECT_EQ(refused("[]", [](const JsonNode& node) { return node.items(1).size(); }),
            "m.json: a.b has 0 entries; at least 1 are needed");
  EXPECT_EQ(refused("[1, 2, 3]", [](const JsonNode& node) { return node.items(0, 2).size(); }),
            "m.json: a.b has 3 entries; at most 2 are read");
}

TEST(JsonNode, UnknownTextsAndKeysAreRefusedWithTheClosestMatch) {
  EXPECT_EQ(refused("\"\"", [](const JsonNode& node) { return node.name(); }),
            "m.json: a.b is an empty string");
  const auto kind = [](const JsonNode& node) { return node.choice({"disk", "network", "tape"}); };
  EXPECT_EQ(refused("\"disc\"", kind),
            "m.json: a.b is 'disc'; known are disk, network and tape; did you mean 'disk'?");
  EXPECT_EQ(refused("\"elephant\"", kind), "m.json: a.b is 'elephant'; known are disk, network and tape");
  const auto allow = [](const JsonNode& node) { return node.allow({"ranks", "name"}), true; };
  EXPECT_EQ(refused(R"({"ranks": 1, "nmae": 2})", allow),
            "m.json: a.b.nmae is an unknown key; known are ranks and name; did you mean 'name'?");
  EXPECT_EQ(refused(R"({"xyzzy": 2})", allow),
            "m.json: a.b.xyzzy is an unknown key; known are ranks and name");
}

TEST(JsonNode, AReadersOwnComplaintNamesThePlace) {
  EXPECT_EQ(message_of<ConfigurationError>([] { root_of()["blocks"].items()[0]["kind"].fail("is odd"); }),
            "m.json: blocks[0].kind is odd");
}

}  // namespace
}  // namespace tranche
