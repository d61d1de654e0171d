#include "models/config_json.h"

#include <fmt/format.h>

#include <limits>
#include <nlohmann/json.hpp>

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

nlohmann::json shortest_number(float value) {
  return nlohmann::json::parse(fmt::format("{}", value)).get<double>();
}

}  // namespace tranche::models
