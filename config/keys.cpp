#include "config/keys.h"

#include <fmt/core.h>

#include <algorithm>
#include <deque>
#include <nlohmann/json.hpp>

#include "config/names.h"
#include "core/closest_match.h"
#include "tranche/config/config.h"

namespace tranche::detail {
namespace {

/// The path's last name if the path is directly within `block`, otherwise "".
std::string_view name_within(std::string_view path, std::string_view block) {
  if (!block.empty()) {
    if (path.size() <= block.size() + 1 || !path.starts_with(block) || path[block.size()] != '.') return {};
    path.remove_prefix(block.size() + 1);
  }
  return path.find('.') == std::string_view::npos ? path : std::string_view{};
}

}  // namespace

std::string_view name_of(KeyClass key_class) {
  return name_in(key_class);
}
std::string_view name_of(ValueKind kind) {
  return name_in(kind);
}

namespace {

/// The default in the form used by the documentation.
std::string default_text(const ConfigKey& key) {
  const Json value = value_of(key, Config());
  return value.is_number_float() ? fmt::format("{}", value.get<double>()) : value.dump();
}

std::vector<ConfigKey> all_keys() {
  static std::deque<std::string> defaults;  // owns the texts that the rows refer to
  std::vector<ConfigKey> keys;
  for (const auto part : {training_keys(), deepspeed_keys()})
    keys.insert(keys.end(), part.begin(), part.end());
  for (ConfigKey& key : keys) {
    if (key.field != nullptr && key.default_value.empty())
      key.default_value = defaults.emplace_back(default_text(key));
  }
  return keys;
}

}  // namespace

std::span<const ConfigKey> configuration_keys() {
  static const std::vector<ConfigKey> all = all_keys();
  return all;
}

const ConfigKey* find_configuration_key(std::string_view path) {
  const auto keys = configuration_keys();
  const auto found =
      std::find_if(keys.begin(), keys.end(), [&](const ConfigKey& key) { return key.path == path; });
  return found == keys.end() ? nullptr : &*found;
}

std::vector<std::string> keys_within(std::string_view block) {
  std::vector<std::string> names;
  for (const ConfigKey& key : configuration_keys()) {
    const std::string_view name = name_within(key.path, block);
    if (!name.empty() && !name.ends_with("[]")) names.emplace_back(name);
  }
  return names;
}

std::string other_name_of_key(std::string_view block, std::string_view name) {
  // Other programs' names for keys of the same block.
  constexpr std::pair<std::string_view, std::string_view> synonyms[] = {{"learning_rate", "lr"},
                                                                        {"epsilon", "eps"},
                                                                        {"r", "rank"},
                                                                        {"lora_alpha", "alpha"},
                                                                        {"target_modules", "targets"},
                                                                        {"lora_dropout", "dropout"},
                                                                        {"use_rslora", "rslora"}};
  for (const auto& [other, ours] : synonyms) {
    const std::string path = fmt::format("{}.{}", block, ours);
    if (name == other && find_configuration_key(path) != nullptr) return path;
  }
  constexpr std::pair<std::string_view, std::string_view> at_the_top[] = {
      {"learning_rate", "optimizer.params.lr"},
      {"max_grad_norm", "gradient_clipping"},
      {"global_batch_size", "train_batch_size"}};
  for (const auto& [other, ours] : at_the_top) {
    if (block.empty() && name == other) return std::string(ours);
  }
  for (const ConfigKey& key : configuration_keys()) {  // the right name in the wrong block
    const std::size_t dot = key.path.rfind('.');
    const std::string_view last = dot == std::string_view::npos ? key.path : key.path.substr(dot + 1);
    if (last == name && key.key_class == KeyClass::honoured) return std::string(key.path);
  }
  return {};
}

std::string suggest_key(std::string_view block, std::string_view name) {
  if (std::string key = other_name_of_key(block, name); !key.empty()) return key;
  const std::string closest = closest_match(name, keys_within(block));
  if (closest.empty()) return {};
  return block.empty() ? closest : std::string(block) + "." + closest;
}

std::string mistyped_key(std::string_view name) {
  constexpr std::string_view prefix = "train_", suffix = "_per_gpu";
  constexpr std::size_t most_edits = 2, short_name = 4;
  std::string best;
  std::size_t least = most_edits + 1;
  for (const std::string& known : keys_within("")) {
    std::string_view core = known;
    if (core.starts_with(prefix)) {
      core.remove_prefix(prefix.size());
      if (name == core) return known;
      if (core.ends_with(suffix) && name == core.substr(0, core.size() - suffix.size())) return known;
    }
    const std::size_t edits = edit_distance(name, known);
    // Two edits can turn a short name into an unrelated one: "name" into "amp".
    const bool alike =
        edits < 2 || name.size() > short_name || edit_distance(name.substr(0, 1), known.substr(0, 1)) == 0;
    if (edits < least && alike) {
      best = known;
      least = edits;
    }
  }
  return best;
}

}  // namespace tranche::detail
