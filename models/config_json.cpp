#include "models/config_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/closest_match.h"
#include "core/json.h"

namespace tranche::models {

void require_value(const detail::JsonNode& node, const nlohmann::ordered_json& wanted,
                   std::string_view because) {
  if (!node || node.json() == wanted) return;
  node.fail(fmt::format("is {}: {}; only {} can be trained here", detail::brief_json(node.json()), because,
                        wanted.dump()));
}

void refuse_quantized(const detail::JsonNode& root) {
  const detail::JsonNode node = root["quantization_config"];
  if (node)
    node.fail("is there: quantized weights cannot be trained here; take the model's weights in bf16 or fp32");
}

float float_or(float otherwise, const detail::JsonNode& node) {
  constexpr double most = std::numeric_limits<float>::max();
  return static_cast<float>(node.number_or(otherwise, -most, most));
}

std::map<std::string, std::string> read_token_ids(const detail::JsonNode& root) {
  std::map<std::string, std::string> ids;
  for (const auto& [key, value] : root.members()) {
    const nlohmann::ordered_json& json = value.json();
    const bool numbers =
        std::all_of(json.begin(), json.end(), [](const auto& one) { return one.is_number_integer(); });
    // Training does not use them, so others, such as the text of a token, are not refused.
    if (key.ends_with("_token_id") && !json.is_object() && (json.is_null() || numbers))
      ids[key] = json.dump();
  }
  return ids;
}

std::vector<std::string> notes_on_keys(std::string_view text, std::string_view file,
                                       std::string_view written) {
  // Readers know these names too, but do not write them for every model.
  std::vector<std::string> names{"rope_parameters",     "head_dim",    "sliding_window",
                                 "attention_bias",      "mlp_bias",    "num_hidden_layers",
                                 "num_attention_heads", "hidden_size", "max_position_embeddings"};
  const auto known = detail::parse_json(written);
  for (const auto& [key, value] : known.items()) names.push_back(key);
  const auto json = detail::parse_json(text);
  std::vector<std::string> notes;
  for (const auto& [key, value] : json.items()) {
    if (std::find(names.begin(), names.end(), key) != names.end() || key.ends_with("_token_id")) continue;
    const std::string closest = detail::closest_match(key, names);
    // Many keys of other settings are nearly as close as misspelt ones.
    const bool close = detail::edit_distance(key, closest) <= 2 ||
                       (key.starts_with(closest) && key.size() <= closest.size() + 4);
    if (!closest.empty() && close && !json.contains(closest))
      notes.push_back(fmt::format("{}: the key '{}' is not read; did you mean '{}'?", file, key, closest));
  }
  return notes;
}

nlohmann::json shortest_number(float value) {
  return nlohmann::json::parse(fmt::format("{}", value)).get<double>();
}

}  // namespace tranche::models
