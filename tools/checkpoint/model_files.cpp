#include "tools/checkpoint/model_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "checkpoint/storage.h"
#include "core/json.h"
#include "core/json_node.h"
#include "core/text_file.h"
#include "tools/checkpoint/checkpoint_source.h"
#include "tools/train/config_changes.h"
#include "tranche/core/error.h"

namespace tranche::tools {

using checkpoint::Companion;
using checkpoint::Companions;
using detail::JsonNode;

namespace {

constexpr std::array<std::string_view, 11> tokenizer_names{"tokenizer.json",
                                                           "tokenizer.model",
                                                           "vocab.json",
                                                           "merges.txt",
                                                           "added_tokens.json",
                                                           "special_tokens_map.json",
                                                           "tokenizer_config.json",
                                                           "chat_template.jinja",
                                                           "chat_template.json",
                                                           "tekken.json",
                                                           "tokenizer.model.v3"};
constexpr std::string_view adapter_config_name = "adapter_config.json";

bool is_tokenizer_file(std::string_view name) {
  return std::find(tokenizer_names.begin(), tokenizer_names.end(), name) != tokenizer_names.end();
}

bool travels(std::string_view name) {
  return name == config_name || name == generation_config_name || name == adapter_config_name ||
         is_tokenizer_file(name);
}

bool holds_weights(std::string_view name) {
  return name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json");
}

/// The target of a link in the folder, if it is neither in the folder nor among the files that the snapshots
/// of a download share (../../blobs); otherwise empty.
std::string strange_target(const std::string& folder, const std::string& path) {
  std::error_code problem;
  if (!std::filesystem::is_symlink(path, problem)) return {};
  const std::filesystem::path home = std::filesystem::canonical(folder, problem);
  const std::filesystem::path target = std::filesystem::weakly_canonical(path, problem);
  const auto lies_in = [&](const std::filesystem::path& outer) {
    return std::mismatch(outer.begin(), outer.end(), target.begin(), target.end()).first == outer.end();
  };
  if (lies_in(home) || lies_in((home / "../../blobs").lexically_normal())) return {};
  return target.string();
}

/// The reason why a file cannot be a companion; empty: its content is in `bytes`.
std::string read_one(detail::FileSystem& files, const std::string& folder, const std::string& path,
                     std::string& bytes) {
  if (const std::string target = strange_target(folder, path); !target.empty())
    return fmt::format("is a link that leads out of the folder, to {}", target);
  try {
    bytes = files.read_file(path, checkpoint::companion_limit);
  } catch (const IoError& problem) {
    return fmt::format("cannot be read ({})", problem.message());
  }
  if (detail::is_lfs_pointer(bytes)) throw CheckpointError(fmt::format("{} {}", path, detail::lfs_advice));
  return {};
}

void add_tokens(std::string_view text, const std::string& origin, std::vector<std::int32_t>& tokens) {
  if (text.empty()) return;
  const JsonNode found = JsonNode::read<ConfigurationError>(text, origin)["eos_token_id"];
  if (!found) return;
  const auto add = [&](const JsonNode& node) {
    // Some files use -1 for "none"; other values must be valid tokens.
    const auto token = node.integer<std::int64_t>(-1, INT32_MAX);
    if (token >= 0) tokens.push_back(static_cast<std::int32_t>(token));
  };
  if (!found.json().is_array()) return add(found);
  for (const JsonNode& node : found.items()) add(node);
}

std::string text_of(const Companions& companions, std::string_view name) {
  const Companion* found = checkpoint::find_companion(companions, name);
  return found == nullptr ? std::string() : found->bytes;
}

}  // namespace

Companions read_model_files(detail::FileSystem& files, const std::string& folder,
                            std::vector<std::string>& notes) {
  Companions companions;
  checkpoint::with_reason("cannot import " + folder, [&] {
    std::vector<std::string> left;
    for (const detail::DirectoryEntry& entry : files.list(folder)) {
      if (holds_weights(entry.name) || entry.name.starts_with('.')) continue;
      if (!travels(entry.name)) {
        left.push_back(entry.name);
        continue;
      }
      Companion companion{entry.name, {}};
      const std::string path = detail::join_path(folder, entry.name);
      const std::string problem = read_one(files, folder, path, companion.bytes);
      if (problem.empty()) {
        companions.push_back(std::move(companion));
      } else {
        notes.push_back(fmt::format(
            "{} {}: it does not travel with the checkpoint; put a copy in its place and import again", path,
            problem));
      }
    }
    if (!left.empty()) {
      notes.push_back(
          fmt::format("left behind in {}: {} (weights, configuration, tokenizer and chat template are taken)",
                      folder, some_of(left)));
    }
    (void)end_tokens(text_of(companions, generation_config_name), text_of(companions, config_name), folder);
  });
  const std::string origin = std::filesystem::absolute(folder).lexically_normal().string();
  companions.push_back(
      {std::string(origin_name),
       nlohmann::json{{"folder", origin}}.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) +
           "\n"});
  return companions;
}

Companions files_to_export(const Companions& companions, bool settings) {
  Companions chosen;
  for (const Companion& companion : companions) {
    if (is_tokenizer_file(companion.name) || (settings && companion.name == generation_config_name))
      chosen.push_back(companion);
  }
  return chosen;
}

bool have_tokenizer(const Companions& companions) {
  const auto has = [&](std::string_view name) {
    return checkpoint::find_companion(companions, name) != nullptr;
  };
  return has("tokenizer.json") || has("tokenizer.model") || (has("vocab.json") && has("merges.txt"));
}

std::string config_to_export(const models::LanguageModel& model, const models::ModelRegistry& models,
                             const Companions& companions, DataType dtype, bool unties_head,
                             std::vector<std::string>& notes) {
  auto json = nlohmann::ordered_json::parse(model.to_json());
  if (const Companion* carried = checkpoint::find_companion(companions, config_name)) {
    nlohmann::ordered_json theirs, adjusted;
    try {
      theirs = nlohmann::ordered_json::parse(models.from_json(carried->bytes, carried->name)->to_json());
    } catch (const ConfigurationError&) {  // an unknown architecture
    }
    // A run may have other dropouts and epsilons than the folder, whose token numbers fit its tokenizer.
    for (const auto& [key, value] : json.items()) {
      if (is_token_id(key)) {
        if (!value.is_null() && !theirs.contains(key)) adjusted[key] = value;
      } else if (is_adjustable(key) && theirs.contains(key) && theirs[key] != value) {
        theirs[key] = adjusted[key] = value;
      }
    }
    const auto without_token_ids = [](const nlohmann::ordered_json& all) {
      nlohmann::ordered_json others;
      for (const auto& [key, value] : all.items()) {
        if (!is_token_id(key)) others[key] = value;
      }
      return others;
    };
    if (without_token_ids(theirs) == without_token_ids(json)) {
      json = detail::parse_json(carried->bytes);
      if (!adjusted.is_null()) json.update(adjusted);
    } else {
      notes.emplace_back(
          "config.json of the imported folder describes another model than this one: the keys that it has "
          "besides are left out");
    }
  }
  const char* const name = dtype == DataType::float32 ? "float32" : "bfloat16";
  if (json.contains("dtype")) json["dtype"] = name;
  if (json.contains("torch_dtype") || !json.contains("dtype")) json["torch_dtype"] = name;
  if (unties_head) json["tie_word_embeddings"] = false;
  return json.dump(2) + "\n";
}

std::vector<std::int32_t> end_tokens(std::string_view generation_config, std::string_view config,
                                     const std::string& folder) {
  std::vector<std::int32_t> tokens;
  add_tokens(generation_config, detail::join_path(folder, std::string(generation_config_name)), tokens);
  if (tokens.empty()) add_tokens(config, detail::join_path(folder, std::string(config_name)), tokens);
  std::sort(tokens.begin(), tokens.end());
  tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
  return tokens;
}

std::vector<std::int32_t> end_tokens_of_folder(const std::string& folder) {
  const auto text = [&](std::string_view name) {
    const std::string path = detail::join_path(folder, std::string(name));
    std::error_code ignored;
    if (!std::filesystem::exists(path, ignored)) return std::string();
    return detail::read_text_file(path, "a model's " + std::string(name));
  };
  return end_tokens(text(generation_config_name), text(config_name), folder);
}

}  // namespace tranche::tools
