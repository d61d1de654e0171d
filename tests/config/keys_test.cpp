// Every row of the table of keys behaves as its class says, and docs/reference/configuration.md agrees with
// it.
#include "config/keys.h"

#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "tests/config/every_note.h"
#include "tranche/config/config.h"
#include "tranche/core/error.h"

namespace tranche {
namespace {

using detail::ConfigKey;
using detail::configuration_keys;
using detail::find_configuration_key;
using detail::KeyClass;
using detail::ValueKind;
using Json = nlohmann::ordered_json;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

/// Builds {"a": {"b": value}} for the path "a.b".
std::string document(std::string_view path, const Json& value) {
  std::string pointer = "/" + std::string(path);
  for (char& c : pointer) {
    if (c == '.') c = '/';
  }
  Json json;
  json[Json::json_pointer(pointer)] = value;
  return json.dump();
}

/// The notes about keys in the file, without those about missing keys.
std::vector<std::string> said_of_keys(const Config& config) {
  std::vector<std::string> notes;
  for (const std::string& note : test::every_note(config)) {
    if (note.find("not given") == std::string::npos && !note.starts_with("\"auto\"")) notes.push_back(note);
  }
  return notes;
}

bool in_a_list(const ConfigKey& key) {
  return key.path.find("[]") != std::string_view::npos;
}

std::string problems(const std::string& json) {
  try {
    parse_config(json, 1);
  } catch (const ConfigurationError& error) {
    return error.message();
  }
  return "nothing was thrown";
}

TEST(ConfigKeys, AreUniqueAndFollowTheirBlocks) {
  std::set<std::string_view> seen;
  for (const ConfigKey& key : configuration_keys()) {
    EXPECT_TRUE(seen.insert(key.path).second) << key.path << " is there twice";
    EXPECT_FALSE(key.text.empty()) << key.path;
    const std::size_t dot = key.path.rfind('.');
    if (dot == std::string_view::npos) continue;
    std::string_view parent = key.path.substr(0, dot);
    if (parent.ends_with("[]")) parent.remove_suffix(2);
    EXPECT_TRUE(seen.contains(parent)) << key.path << " comes before its block";
  }
}

TEST(ConfigKeys, WithoutMeaningAreAcceptedWithOneNote) {
  for (const ConfigKey& key : configuration_keys()) {
    if (key.key_class != KeyClass::no_meaning) continue;
    // If a whole block has no effect, one note covers its keys.
    std::string_view speaker = key.path;
    for (std::size_t dot = key.path.find('.'); dot != std::string_view::npos;
         dot = key.path.find('.', dot + 1)) {
      const ConfigKey* parent = find_configuration_key(key.path.substr(0, dot));
      if (parent != nullptr && parent->key_class == KeyClass::no_meaning) {
        speaker = parent->path;
        break;
      }
    }
    for (const Json& value : {Json(1), Json("auto"), Json(false)}) {
      const Config config = parse_config(document(key.path, value), 1);
      ASSERT_THAT(said_of_keys(config),
                  ElementsAre(StartsWith(fmt::format("{}: no meaning here: ", speaker))))
          << key.path;
    }
  }
}

TEST(ConfigKeys, RefusedOnesSayWhyAndTakeWhatAsksForNothing) {
  for (const ConfigKey& key : configuration_keys()) {
    if (key.key_class != KeyClass::refused) continue;
    const std::string text = problems(document(key.path, "surely"));
    EXPECT_THAT(text, StartsWith(fmt::format("configuration: {}: \"surely\" cannot be honoured: {}", key.path,
                                             key.text)));
    std::vector<Json> harmless = {Json(nullptr), Json::parse(key.default_value)};
    if (key.default_value != "true") {
      harmless.insert(harmless.end(),
                      {Json(false), Json("none"), Json::object(),
                       Json::parse(R"({"enabled": false, "x": 1})"), Json::parse(R"({"enabled": "auto"})")});
    } else {
      EXPECT_THAT(problems(document(key.path, false)), HasSubstr("false cannot be honoured")) << key.path;
    }
    for (const Json& value : harmless) {
      Config config;
      ASSERT_NO_THROW(config = parse_config(document(key.path, value), 1)) << key.path << " " << value;
      if (value == Json(true)) {
        EXPECT_THAT(said_of_keys(config),
                    ElementsAre(fmt::format("{}: no meaning here: {}", key.path, key.text)));
      } else {
        EXPECT_THAT(said_of_keys(config), IsEmpty()) << key.path;
      }
    }
    EXPECT_THAT(problems(document(key.path, Json::parse(R"({"enabled": true})"))),
                HasSubstr("cannot be honoured"));
  }
}

TEST(ConfigKeys, AutoMeansTheDefaultWhereItIsAllowed) {
  const std::string defaults = parse_config("{}", 1).to_json();
  for (const ConfigKey& key : configuration_keys()) {
    if (key.key_class != KeyClass::honoured || in_a_list(key)) continue;
    if (key.automatic) {
      const Config config = parse_config(document(key.path, "auto"), 1);
      if (key.path == "gradient_clipping") {  // the value that Hugging Face's trainer writes
        EXPECT_EQ(config.to_json(), parse_config(R"({"gradient_clipping": 1.0})", 1).to_json());
      } else if (key.path == "bf16.enabled" || key.path == "bfloat16.enabled") {
        EXPECT_EQ(config.to_json(), parse_config(R"({"bf16": {"enabled": true}})", 1).to_json());
      } else {
        EXPECT_EQ(config.to_json(), defaults) << key.path;
      }
      EXPECT_THAT(said_of_keys(config), Each(HasSubstr(std::string(key.path) + ": \"auto\" is ")))
          << "or nothing";
    } else {
      EXPECT_NE(problems(document(key.path, "auto")), "nothing was thrown") << key.path;
    }
    EXPECT_EQ(parse_config(document(key.path, nullptr), 1).to_json(), defaults) << key.path << " null";
  }
}

TEST(ConfigKeys, HonouredOnesRefuseTheWrongType) {
  for (const ConfigKey& key : configuration_keys()) {
    if (key.key_class != KeyClass::honoured || in_a_list(key)) continue;
    const Json wrong = key.kind == ValueKind::block ? Json(7) : Json::parse(R"({"a": 7})");
    EXPECT_THAT(problems(document(key.path, wrong)), HasSubstr(fmt::format("{}: expected ", key.path)));
  }
}

/// The cells of a row of a Markdown table, without the blanks around them.
std::vector<std::string> cells_of(const std::string& line) {
  std::vector<std::string> cells;
  for (std::size_t begin = 1, end; (end = line.find('|', begin)) != std::string::npos; begin = end + 1) {
    const std::size_t first = line.find_first_not_of(' ', begin);
    cells.push_back(first >= end ? "" : line.substr(first, line.find_last_not_of(' ', end - 1) - first + 1));
  }
  return cells;
}

/// The page's keys with class, default and text. Keys that are honoured or refused have a row each, under a
/// heading that says which; keys without effect stand behind their reason.
std::multimap<std::string, std::vector<std::string>> documented_keys() {
  std::multimap<std::string, std::vector<std::string>> rows;
  std::ifstream file(std::string(TRANCHE_DOCS) + "/configuration.md");
  KeyClass of_table = KeyClass::honoured;
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("| ")) continue;
    if (line.starts_with("| Key |"))
      of_table = line.find("Refused") == std::string::npos ? KeyClass::honoured : KeyClass::refused;
    const std::vector<std::string> cells = cells_of(line);
    if (cells.size() == 3 && cells[0].starts_with('`')) {
      rows.emplace(cells[0].substr(1, cells[0].size() - 2),
                   std::vector{std::string(name_of(of_table)), cells[1], cells[2]});
    } else if (cells.size() == 2 && cells[1].starts_with('`')) {
      for (std::size_t begin = 1, end; begin < cells[1].size(); begin = end + 4) {
        end = cells[1].find('`', begin);
        rows.emplace(cells[1].substr(begin, end - begin),
                     std::vector{std::string(name_of(KeyClass::no_meaning)), std::string(), cells[0]});
      }
    }
  }
  return rows;
}

TEST(ConfigKeys, TheDocumentationHasEachWithItsClassAndText) {
  std::multimap<std::string, std::vector<std::string>> rows = documented_keys();
  ASSERT_FALSE(rows.empty()) << "docs/reference/configuration.md cannot be read";
  for (const ConfigKey& key : configuration_keys()) {
    const auto row = rows.find(std::string(key.path));
    if (row == rows.end()) {
      ADD_FAILURE() << "docs/reference/configuration.md lacks " << key.path;
      continue;
    }
    const std::string default_value = key.default_value.empty() ? "" : fmt::format("`{}`", key.default_value);
    EXPECT_THAT(row->second,
                ElementsAre(std::string(name_of(key.key_class)), default_value, std::string(key.text)))
        << key.path;
    rows.erase(row);
  }
  for (const auto& [path, cells] : rows)
    ADD_FAILURE() << "docs/reference/configuration.md has " << path << " twice, or the code has not";
}

}  // namespace
}  // namespace tranche
