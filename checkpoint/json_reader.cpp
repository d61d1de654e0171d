#include "checkpoint/json_reader.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "tranche/core/error.h"

namespace tranche::checkpoint {

void JsonNode::fail(std::string_view what) const {
  throw CheckpointError(fmt::format("{}: {} {}", origin_, path_.empty() ? "the whole" : path_, what));
}

JsonNode JsonNode::operator[](const char* key) const {
  if (!value_->is_object()) fail("is not an object");
  const auto found = value_->find(key);
  const std::string path = path_.empty() ? key : path_ + "." + key;
  if (found == value_->end()) JsonNode(*value_, origin_, path).fail("is missing");
  return {*found, origin_, path};
}

bool JsonNode::has(const char* key) const {
  return value_->is_object() && value_->contains(key);
}

std::vector<JsonNode> JsonNode::items() const {
  if (!value_->is_array()) fail("is not an array");
  std::vector<JsonNode> nodes;
  for (std::size_t i = 0; i < value_->size(); ++i) {
    nodes.emplace_back((*value_)[i], origin_, fmt::format("{}[{}]", path_, i));
  }
  return nodes;
}

std::string JsonNode::text() const {
  if (!value_->is_string()) fail("is not a string");
  return value_->get<std::string>();
}

bool JsonNode::boolean() const {
  if (!value_->is_boolean()) fail("is neither true nor false");
  return value_->get<bool>();
}

std::int64_t JsonNode::integer(std::int64_t least, std::int64_t most) const {
  const bool too_large =
      value_->is_number_unsigned() && value_->get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX);
  if (!value_->is_number_integer() || too_large) fail("is not an integer");
  const auto value = value_->get<std::int64_t>();
  if (value < least || value > most) fail(fmt::format("is {}, which cannot be", value));
  return value;
}

std::vector<std::int64_t> JsonNode::integers() const {
  std::vector<std::int64_t> values;
  for (const JsonNode& item : items()) values.push_back(item.integer());
  return values;
}

std::vector<std::string> JsonNode::texts() const {
  std::vector<std::string> values;
  for (const JsonNode& item : items()) values.push_back(item.text());
  return values;
}

std::string JsonNode::object() const {
  if (!value_->is_object()) fail("is not an object");
  return value_->dump();
}

}  // namespace tranche::checkpoint
