// Selects the chat template: built in, from a tokenizer's folder, or from a file.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/json_node.h"
#include "core/text_file.h"
#include "training/chat_template/template.h"
#include "tranche/core/error.h"

namespace tranche::training {

namespace {

using detail::JsonNode;

constexpr const char* file_kind = "tokenizer file";

bool has_file(const std::string& path) {
  std::error_code none;
  return std::filesystem::exists(path, none);
}

JsonNode read_json(const std::string& path) {
  return JsonNode::read<ConfigurationError>(detail::read_text_file(path, file_kind), path);
}

/// The special tokens of a folder, as a JSON object with the names that templates use.
std::string special_tokens(const std::string& folder) {
  nlohmann::ordered_json tokens = nlohmann::ordered_json::object();
  for (const char* file : {"/tokenizer_config.json", "/special_tokens_map.json"}) {
    if (folder.empty() || !has_file(folder + file)) continue;
    const JsonNode root = read_json(folder + file);
    for (const char* key :
         {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}) {
      const JsonNode token = root[key];
      if (!token || tokens.contains(key)) continue;
      tokens[key] = token.json().is_object() ? token["content"].text() : token.text();
    }
  }
  return tokens.dump();
}

/// The texts of a folder's templates.
struct Texts {
  std::string text, origin;
  std::string with_tools, with_tools_origin;  ///< empty: no separate template for conversations with tools
};

Texts texts_of(const std::string& folder) {
  Texts texts;
  const std::string config = folder + "/tokenizer_config.json", file = folder + "/chat_template.jinja",
                    tools = folder + "/additional_chat_templates/tool_use.jinja";
  if (has_file(config)) {
    const JsonNode root = read_json(config);
    const JsonNode given = root["chat_template"];
    if (given && given.json().is_array()) {
      std::string names;
      for (const JsonNode& each : given.items(1)) {
        const std::string name = each["name"].text();
        names += (names.empty() ? "" : ", ") + name;
        if (name == "default") texts.text = each["template"].text();
        if (name == "tool_use") texts.with_tools = each["template"].text();
      }
      if (texts.text.empty() && !has_file(file))
        given.fail(fmt::format("has no template 'default', but {}", names));
      texts.origin = config + " (chat_template, default)";
      texts.with_tools_origin = config + " (chat_template, tool_use)";
    } else if (given) {
      texts.text = given.text();
      texts.origin = config + " (chat_template)";
    }
  }
  if (has_file(file)) texts = {detail::read_text_file(file, file_kind), file, "", ""};
  if (has_file(file) && has_file(tools)) {
    texts.with_tools = detail::read_text_file(tools, file_kind);
    texts.with_tools_origin = tools;
  }
  return texts;
}

void require_date(const std::string& date) {
  const auto digits = [&](std::size_t at, std::size_t count) {
    const std::string part = date.substr(at, count);
    return part.find_first_not_of("0123456789") == std::string::npos ? std::stoi(part) : -1;
  };
  bool good = date.size() == 10 && date[4] == '-' && date[7] == '-';
  if (good) {
    const int year = digits(0, 4), month = digits(5, 2), day = digits(8, 2);
    constexpr std::array<int, 12> days{31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
    const bool leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
    good = year > 0 && month >= 1 && month <= 12 && day >= 1;
    good = good && day <= days[static_cast<std::size_t>(month - 1)] + (leap && month == 2 ? 1 : 0);
  }
  if (!good)
    throw ConfigurationError(fmt::format("--chat-date is '{}', but must be a day like 2026-11-27", date));
}

}  // namespace

std::shared_ptr<const JinjaTemplate> read_jinja_template(std::string_view text, const std::string& origin,
                                                         std::string_view variables) {
  return std::make_shared<const JinjaTemplate>(text, origin, variables);
}

bool has_jinja_template(const std::string& folder) {
  return !folder.empty() && (has_file(folder + "/chat_template.jinja") ||
                             (has_file(folder + "/tokenizer_config.json") &&
                              read_json(folder + "/tokenizer_config.json")["chat_template"]));
}

std::shared_ptr<const JinjaTemplate> load_jinja_template(const std::string& folder, const std::string& file) {
  const std::string variables = special_tokens(folder);
  if (!file.empty())
    return read_jinja_template(detail::read_text_file(file, "--chat-template"), file, variables);
  if (!has_jinja_template(folder)) {
    throw ConfigurationError(
        fmt::format("'{}' has no chat template: neither chat_template.jinja nor \"chat_template\" in "
                    "tokenizer_config.json",
                    folder));
  }
  const Texts texts = texts_of(folder);
  auto own = std::make_shared<JinjaTemplate>(texts.text, texts.origin, variables);
  if (!texts.with_tools.empty())
    own->set_with_tools(read_jinja_template(texts.with_tools, texts.with_tools_origin, variables));
  return own;
}

ChatFormat chat_format(const std::string& name, const std::string& folder, const std::string& date) {
  ChatFormat format;
  if (!date.empty()) require_date(date);
  format.date = date;
  if (name.ends_with(".jinja")) {
    format.own = load_jinja_template(folder, name);
  } else if (name == "own") {
    if (folder.empty())
      throw ConfigurationError("--chat-template own is that of the tokenizer's folder: give --tokenizer");
    format.own = load_jinja_template(folder);
  } else if (!name.empty()) {
    format.built_in = parse_chat_template(name);
    if (has_jinja_template(folder)) format.own = load_jinja_template(folder);
  } else {
    try {
      if (has_jinja_template(folder)) format.own = load_jinja_template(folder);
    } catch (const ConfigurationError& error) {
      format.refused = error.message();
    }
  }
  return format;
}

std::string fingerprint(const ChatFormat& format) {
  return fmt::format("{} {} {}", static_cast<int>(format.built_in), format.date,
                     format.own ? format.own->fingerprint() : "");
}

}  // namespace tranche::training
