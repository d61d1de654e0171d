#include "tools/checkpoint/peft_layers.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "training/word_pattern.h"

namespace tranche::tools {

using detail::JsonNode;

namespace {

/// A list of texts; empty for a single text, which is a pattern, and for null.
std::vector<std::string> texts_of(const JsonNode& node) {
  if (!node || node.json().is_string()) return {};
  if (!node.json().is_array()) node.fail("is neither a text nor a list of texts");
  return node.texts();
}

/// A list of numbers, or a single number.
std::vector<std::int64_t> layers_of(const JsonNode& node) {
  if (!node) return {};
  return node.json().is_array() ? node.integers() : std::vector<std::int64_t>{node.integer()};
}

}  // namespace

NamedLayers::NamedLayers(const JsonNode& config)
    : wanted_(config["target_modules"]),
      excluded_(config["exclude_modules"]),
      layers_(layers_of(config["layers_to_transform"])) {
  (void)texts_of(wanted_);
  (void)texts_of(excluded_);
  const JsonNode pattern = config["layers_pattern"];
  lists_ = texts_of(pattern);
  if (pattern && pattern.json().is_string()) lists_ = {pattern.text()};
}

std::vector<std::string> NamedLayers::targets() const {
  return texts_of(wanted_);
}

bool NamedLayers::has(const std::string& module, bool linear) const {
  if (matches(excluded_, module)) return false;
  if (wanted_.json() == "all-linear") return linear;
  if (!matches(wanted_, module)) return false;
  return wanted_.json().is_string() || layers_.empty() || is_in_layers(module);
}

bool NamedLayers::matches(const JsonNode& node, const std::string& module) {
  if (!node) return false;
  if (node.json().is_string()) {
    // Python's re.fullmatch, as PEFT does. The character behind it is there because a pattern here must not
    // match the empty text.
    training::WordPattern::Budget budget = training::WordPattern::budget_for(module.size());
    return training::WordPattern("(?=(?:" + node.text() + ")$).").begins(module, budget);
  }
  const std::vector<std::string> names = node.texts();
  return std::any_of(names.begin(), names.end(),
                     [&](const std::string& name) { return module == name || module.ends_with("." + name); });
}

/// True for example if "model.layers.3.self_attn.q_proj" is to be in layer 3 of the list "layers".
bool NamedLayers::is_in_layers(const std::string& module) const {
  constexpr std::size_t most_digits = 9;
  std::vector<std::string> parts;
  std::istringstream stream(module);
  for (std::string part; std::getline(stream, part, '.');) parts.push_back(part);
  for (std::size_t i = parts.size(); i-- > 2;) {
    const std::string& part = parts[i];
    const bool number = !part.empty() && part.size() <= most_digits &&
                        part.find_first_not_of("0123456789") == std::string::npos;
    if (!number || i + 1 == parts.size()) continue;
    if (!lists_.empty() && std::find(lists_.begin(), lists_.end(), parts[i - 1]) == lists_.end()) continue;
    return std::find(layers_.begin(), layers_.end(), std::stoll(part)) != layers_.end();
  }
  return false;
}

}  // namespace tranche::tools
