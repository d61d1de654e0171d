#pragma once
/// Reading and writing of Hugging Face's config.json, shared by the architectures.

#include <nlohmann/json_fwd.hpp>
#include <string_view>

#include "core/json_node.h"

namespace tranche::models {

/// Refuses a key of config.json unless it is absent, null or `wanted`.
void require_value(const detail::JsonNode& node, const nlohmann::ordered_json& wanted,
                   std::string_view because);

/// A finite float; `otherwise` where the value is null or not there.
float float_or(float otherwise, const detail::JsonNode& node);

/// The number that is written as the shortest decimal that reads back as the value, so 0.1f is 0.1; with a
/// point, so 0 is 0.0.
nlohmann::json shortest_number(float value);

}  // namespace tranche::models
