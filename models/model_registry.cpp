#include "tranche/models/model_registry.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "core/closest_match.h"
#include "core/json_node.h"
#include "core/text_file.h"
#include "tranche/core/error.h"
#include "tranche/models/gpt.h"
#include "tranche/models/llama.h"

namespace tranche::models {

namespace {

using detail::JsonNode;

/// " (did you mean "gpt2"?)", or empty.
std::string suggestion(std::string_view name, const std::vector<std::string>& names) {
  const std::string closest = detail::closest_match(name, names);
  return closest.empty() ? "" : fmt::format(" (did you mean \"{}\"?)", closest);
}

Architecture gpt2() {
  Architecture gpt{"GPT2LMHeadModel", "gpt2", [](std::string_view text, std::string_view file) {
                     return std::make_shared<const Gpt>(GptConfig::from_json(text, file));
                   }};
  for (const std::string& name : GptConfig::preset_names())
    gpt.presets.emplace_back(name, std::make_shared<const Gpt>(GptConfig::preset(name)));
  return gpt;
}

/// One architecture of the Llama family, with its presets.
Architecture llama(std::string name, std::string model_type) {
  Architecture llama{std::move(name), std::move(model_type),
                     [](std::string_view text, std::string_view file) {
                       return std::make_shared<const Llama>(LlamaConfig::from_json(text, file));
                     }};
  for (const std::string& preset : LlamaConfig::preset_names()) {
    const LlamaConfig config = LlamaConfig::preset(preset);
    if (config.architecture() == llama.name)
      llama.presets.emplace_back(preset, std::make_shared<const Llama>(config));
  }
  return llama;
}

}  // namespace

ModelRegistry ModelRegistry::with_builtin() {
  ModelRegistry registry;
  registry.add(gpt2());
  const std::vector<std::string> names = LlamaConfig::architectures(), types = LlamaConfig::model_types();
  for (std::size_t i = 0; i < names.size(); ++i) registry.add(llama(names[i], types[i]));
  return registry;
}

void ModelRegistry::add(Architecture architecture) {
  const auto refuse = [](std::string_view what, std::string_view name) {
    throw InvalidArgument(
        fmt::format("the registry already holds the {} \"{}\"; give this one another name", what, name));
  };
  const std::vector<std::string> taken = preset_names();
  for (const Architecture& held : architectures_) {
    if (held.name == architecture.name) refuse("architecture", held.name);
    if (held.model_type == architecture.model_type) refuse("model_type", held.model_type);
  }
  for (const auto& [name, model] : architecture.presets) {
    if (std::find(taken.begin(), taken.end(), name) != taken.end()) refuse("preset", name);
  }
  architectures_.push_back(std::move(architecture));
}

std::vector<std::string> ModelRegistry::architecture_names() const {
  std::vector<std::string> names;
  for (const Architecture& architecture : architectures_) names.push_back(architecture.name);
  return names;
}

std::vector<std::string> ModelRegistry::preset_names() const {
  std::vector<std::string> names;
  for (const Architecture& architecture : architectures_) {
    for (const auto& [name, model] : architecture.presets) names.push_back(name);
  }
  return names;
}

std::shared_ptr<const LanguageModel> ModelRegistry::preset(std::string_view wanted) const {
  for (const Architecture& architecture : architectures_) {
    for (const auto& [name, model] : architecture.presets) {
      if (name == wanted) return model;
    }
  }
  const std::vector<std::string> names = preset_names();
  throw ConfigurationError(
      fmt::format("no model preset \"{}\"{}; presets are {}, or give the path of a config.json", wanted,
                  suggestion(wanted, names), fmt::join(names, ", ")));
}

std::shared_ptr<const LanguageModel> ModelRegistry::from_json(std::string_view text,
                                                              std::string_view file) const {
  const JsonNode root = JsonNode::read<ConfigurationError>(text, file);
  const JsonNode listed = root["architectures"], type = root["model_type"];
  const std::vector<std::string> wanted = listed ? listed.texts() : std::vector<std::string>{};
  for (const std::string& name : wanted) {
    for (const Architecture& held : architectures_) {
      if (held.name == name) return held.from_json(text, file);
    }
  }
  const std::string model_type = type ? type.text() : "";
  for (const Architecture& held : architectures_) {
    if (type && held.model_type == model_type) return held.from_json(text, file);
  }
  const std::vector<std::string> names = architecture_names();
  if (!wanted.empty()) {
    // No closest match is given, because weights of another architecture are not a typing error.
    listed.fail(fmt::format("is \"{}\": another architecture than those that can be trained here: {}",
                            wanted.front(), fmt::join(names, ", ")));
  }
  std::vector<std::string> types;
  for (const Architecture& held : architectures_) types.push_back(held.model_type);
  if (!type) type.fail(fmt::format("is missing; known are {}", fmt::join(types, ", ")));
  type.fail(fmt::format("is \"{}\": another architecture than those that can be trained here: {}", model_type,
                        fmt::join(types, ", ")));
}

std::shared_ptr<const LanguageModel> ModelRegistry::resolve(const std::string& preset_or_path) const {
  std::error_code ignored;
  const bool path = preset_or_path.ends_with(".json") || preset_or_path.find('/') != std::string::npos ||
                    std::filesystem::is_regular_file(preset_or_path, ignored);
  const std::vector<std::string> presets = preset_names();
  if (std::find(presets.begin(), presets.end(), preset_or_path) == presets.end() &&
      std::filesystem::is_directory(preset_or_path, ignored)) {
    throw ConfigurationError(
        fmt::format("\"{0}\" is a folder; a model is named by its config.json, \"{0}{1}config.json\"",
                    preset_or_path, preset_or_path.ends_with('/') ? "" : "/"));
  }
  if (!path) return preset(preset_or_path);
  if (preset_or_path.ends_with(".safetensors")) {
    throw ConfigurationError(
        fmt::format("\"{}\" holds weights; a model is named by the config.json beside them", preset_or_path));
  }
  const std::size_t slash = preset_or_path.find('/');
  if (!preset_or_path.ends_with(".json") && slash == preset_or_path.rfind('/') && slash != 0 &&
      !std::filesystem::exists(preset_or_path, ignored) &&
      !std::filesystem::exists(preset_or_path.substr(0, slash), ignored)) {
    throw ConfigurationError(
        fmt::format("\"{}\" is no file; if it is a name on a hub of models: nothing is downloaded here: "
                    "fetch the folder, and name its config.json",
                    preset_or_path));
  }
  return from_json(detail::read_text_file(preset_or_path, "a model's config.json"), preset_or_path);
}

}  // namespace tranche::models
