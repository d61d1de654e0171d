#pragma once
/// Strict access to JSON that was written by a program: every complaint names the file and the key.
/// For this folder's sources only.

#include <fmt/format.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "tranche/core/error.h"

namespace tranche::checkpoint {

using Json = nlohmann::ordered_json;

/// A value and where it stands: "step-00000012/manifest.json", "units[3].name".
class JsonNode {
 public:
  JsonNode(const Json& value, std::string origin, std::string path)
      : value_(&value), origin_(std::move(origin)), path_(std::move(path)) {}

  [[noreturn]] void fail(std::string_view what) const {
    throw CheckpointError(fmt::format("{}: {} {}", origin_, path_.empty() ? "the whole" : path_, what));
  }
  JsonNode operator[](const char* key) const {
    if (!value_->is_object()) fail("is not an object");
    const auto found = value_->find(key);
    const std::string path = path_.empty() ? key : path_ + "." + key;
    if (found == value_->end()) JsonNode(*value_, origin_, path).fail("is missing");
    return {*found, origin_, path};
  }
  bool has(const char* key) const { return value_->is_object() && value_->contains(key); }
  std::vector<JsonNode> items() const {
    if (!value_->is_array()) fail("is not an array");
    std::vector<JsonNode> nodes;
    for (std::size_t i = 0; i < value_->size(); ++i) {
      nodes.emplace_back((*value_)[i], origin_, fmt::format("{}[{}]", path_, i));
    }
    return nodes;
  }
  std::string text() const {
    if (!value_->is_string()) fail("is not a string");
    return value_->get<std::string>();
  }
  bool boolean() const {
    if (!value_->is_boolean()) fail("is neither true nor false");
    return value_->get<bool>();
  }
  std::int64_t integer(std::int64_t least = INT64_MIN, std::int64_t most = INT64_MAX) const {
    const bool too_large =
        value_->is_number_unsigned() && value_->get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX);
    if (!value_->is_number_integer() || too_large) fail("is not an integer");
    const auto value = value_->get<std::int64_t>();
    if (value < least || value > most) fail(fmt::format("is {}, which cannot be", value));
    return value;
  }
  std::vector<std::int64_t> integers() const {
    std::vector<std::int64_t> values;
    for (const JsonNode& item : items()) values.push_back(item.integer());
    return values;
  }
  std::vector<std::string> texts() const {
    std::vector<std::string> values;
    for (const JsonNode& item : items()) values.push_back(item.text());
    return values;
  }
  /// An object, as text.
  std::string object() const {
    if (!value_->is_object()) fail("is not an object");
    return value_->dump();
  }
  const std::string& origin() const { return origin_; }
  const std::string& path() const { return path_; }

 private:
  const Json* value_;
  std::string origin_;
  std::string path_;
};

/// Throws CheckpointError naming `origin`.
inline Json parse_json(std::string_view text, std::string_view origin) {
  try {
    return Json::parse(text);
  } catch (const nlohmann::json::exception& problem) {
    throw CheckpointError(fmt::format("{} is not valid JSON: {}", origin, problem.what()));
  }
}

}  // namespace tranche::checkpoint
