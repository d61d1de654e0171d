#pragma once
/// Reads and writes Hugging Face's config.json, for all architectures.

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "core/json_node.h"

namespace tranche::models {

/// Throws for a key of config.json unless it is absent, null or `wanted`.
void require_value(const detail::JsonNode& node, const nlohmann::ordered_json& wanted,
                   std::string_view because);

/// Throws where `root` has quantization_config, as the config.json of quantized weights does.
void refuse_quantized(const detail::JsonNode& root);

/// A finite float; `otherwise` if the value is null or absent.
float float_or(float otherwise, const detail::JsonNode& node);

/// The shortest decimal that reads back as the same float, so 0.1f is written as 0.1; always with a point, so
/// 0 is written as 0.0.
nlohmann::json shortest_number(float value);

/// The keys that end in _token_id, each with its value as JSON text: null, a token or a list of tokens.
std::map<std::string, std::string> read_token_ids(const detail::JsonNode& root);

/// A line for each key of a config.json that nothing reads and that is written almost like one of the keys in
/// `written`, the model's own config.json, or in another of their names. Files of Hugging Face have many
/// other keys, which get none.
std::vector<std::string> notes_on_keys(std::string_view text, std::string_view file,
                                       std::string_view written);

}  // namespace tranche::models
