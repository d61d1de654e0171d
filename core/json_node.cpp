#include "core/json_node.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/closest_match.h"
#include "core/json.h"
#include "core/relaxed_json.h"
#include "tranche/core/error.h"

namespace tranche::detail {
namespace {

using Json = nlohmann::ordered_json;
using Texts = std::initializer_list<std::string_view>;

std::string known_texts(std::string_view text, Texts texts) {
  std::string known;
  for (const std::string_view* each = texts.begin(); each != texts.end(); ++each) {
    known += (each == texts.begin() ? "" : each + 1 == texts.end() ? " and " : ", ") + std::string(*each);
  }
  const std::string closest = closest_match(text, {texts.begin(), texts.end()});
  return fmt::format("; known are {}{}", known,
                     closest.empty() ? "" : fmt::format("; did you mean '{}'?", closest));
}

}  // namespace

struct JsonNode::Source {
  Json root;
  std::string origin;
  Refuse refuse;
};

JsonNode JsonNode::read(std::string_view text, std::string_view origin, std::string_view path,
                        Refuse refuse) {
  JsonRemarks remarks;
  const auto source = std::make_shared<Source>(parse_json(text, &remarks), std::string(origin), refuse);
  if (source->root.is_discarded()) {
    refuse(fmt::format("{} is not JSON: {}: {}", origin, place_in(text, remarks.byte), remarks.problem));
  }
  const JsonNode root(source, &source->root, std::string(path));
  if (!remarks.duplicate.empty()) {
    const std::string prefix = path.empty() ? "" : std::string(path) + ".";
    refuse(fmt::format("{}: key '{}{}' is given twice; keep one", origin, prefix, remarks.duplicate));
  }
  return root;
}

void JsonNode::fail(std::string_view what) const {
  source_->refuse(fmt::format("{}{}{} {}", source_->origin, path_.empty() ? "" : ": ", path_, what));
  throw LogicError("a reader's error was not thrown");
}

void JsonNode::refuse_type(std::string_view type) const {
  fail(fmt::format("is not {}: {}", type, brief_json(json())));
}

JsonNode::operator bool() const {
  return value_ != nullptr && !value_->is_null();
}

const Json& JsonNode::json() const {
  if (value_ == nullptr) fail("is missing");
  return *value_;
}

const Json& JsonNode::block() const {
  if (!json().is_object()) refuse_type("an object");
  return *value_;
}

const Json& JsonNode::list() const {
  if (!json().is_array()) refuse_type("an array");
  return *value_;
}

JsonNode JsonNode::operator[](std::string_view key) const {
  const auto found = block().find(key);
  return {source_, found == value_->end() ? nullptr : &*found,
          path_.empty() ? std::string(key) : fmt::format("{}.{}", path_, key)};
}

std::vector<std::pair<std::string, JsonNode>> JsonNode::members() const {
  std::vector<std::pair<std::string, JsonNode>> nodes;
  for (const auto& [key, value] : block().items()) {
    nodes.emplace_back(key, JsonNode(source_, &value, path_.empty() ? key : path_ + "." + key));
  }
  return nodes;
}

void JsonNode::allow(Texts keys) const {
  for (const auto& [key, value] : block().items()) {
    if (std::find(keys.begin(), keys.end(), key) != keys.end()) continue;
    (*this)[key].fail("is an unknown key" + known_texts(key, keys));
  }
}

JsonNode JsonNode::item(std::size_t index) const {
  return {source_, &(*value_)[index], fmt::format("{}[{}]", path_, index)};
}

std::vector<JsonNode> JsonNode::items(std::size_t least, std::size_t most) const {
  const std::size_t count = list().size();
  if (count < least) fail(fmt::format("has {} entries; at least {} are needed", count, least));
  if (count > most) fail(fmt::format("has {} entries; at most {} are read", count, most));
  std::vector<JsonNode> nodes;
  for (std::size_t i = 0; i < count; ++i) nodes.push_back(item(i));
  return nodes;
}

std::string JsonNode::text() const {
  if (!json().is_string()) refuse_type("a string");
  return value_->get<std::string>();
}

std::string JsonNode::name() const {
  std::string value = text();
  if (value.empty()) fail("is an empty string");
  return value;
}

std::string JsonNode::choice(Texts texts) const {
  std::string value = text();
  if (std::find(texts.begin(), texts.end(), value) == texts.end()) {
    fail(fmt::format("is '{}'{}", value, known_texts(value, texts)));
  }
  return value;
}

bool JsonNode::boolean() const {
  if (!json().is_boolean()) {
    fail(fmt::format("is neither true nor false: {}", brief_json(*value_)));
  }
  return value_->get<bool>();
}

std::int64_t JsonNode::whole(std::int64_t least, std::int64_t most) const {
  const std::optional<std::int64_t> value = json_integer(json());
  if (!value) refuse_type(value_->is_number_integer() ? "an integer of 64 bits" : "an integer");
  if (*value < least || *value > most) {
    fail(fmt::format("is {}, which cannot be: from {} to {} is wanted", *value, least, most));
  }
  return *value;
}

double JsonNode::number(double least, double most) const {
  if (!json().is_number()) refuse_type("a number");
  const auto value = value_->get<double>();
  if (!(value >= least && value <= most)) {
    fail(fmt::format("is {:g}, which cannot be: from {:g} to {:g} is wanted", value, least, most));
  }
  return value;
}

std::vector<std::string> JsonNode::texts() const {
  std::vector<std::string> values;
  for (std::size_t i = 0; i < list().size(); ++i) values.push_back(item(i).text());
  return values;
}

std::vector<std::int64_t> JsonNode::integers(std::int64_t least, std::int64_t most) const {
  std::vector<std::int64_t> values;
  for (std::size_t i = 0; i < list().size(); ++i) values.push_back(item(i).whole(least, most));
  return values;
}

std::vector<double> JsonNode::numbers(double least, double most) const {
  std::vector<double> values;
  for (std::size_t i = 0; i < list().size(); ++i) values.push_back(item(i).number(least, most));
  return values;
}

std::string JsonNode::object() const {
  return block().dump();
}

}  // namespace tranche::detail
