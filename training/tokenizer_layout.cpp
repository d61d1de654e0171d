#include "training/tokenizer_layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>

#include "core/json.h"
#include "tranche/core/error.h"

namespace tranche::training {

namespace {

using detail::JsonNode;

constexpr std::array<std::string_view, 7> names{"bos_token", "eos_token", "unk_token", "sep_token",
                                                "pad_token", "cls_token", "mask_token"};

std::optional<JsonNode> read(const std::optional<std::string>& text, const std::string& folder,
                             const char* name) {
  if (!text) return std::nullopt;
  auto root = JsonNode::read<ConfigurationError>(*text, folder + "/" + name);
  (void)root.members();  // checks that it is an object
  return root;
}

bool has(const JsonNode& root, const char* key) {
  return root.json().contains(key);
}

void require_short(std::string_view text, const JsonNode& node) {
  if (text.size() <= longest_added_token) return;
  node.fail(fmt::format("has {} bytes, which is too long: added tokens have at most {}", text.size(),
                        longest_added_token));
}

/// Reads a special token: a text, or an object.
NamedToken read_special(const JsonNode& node) {
  if (node.json().is_object()) {
    NamedToken token = read_named_token(node);
    token.token.reset();
    token.normalized = node["normalized"] && node["normalized"].boolean();
    return token;
  }
  NamedToken token{node.text(), false, std::nullopt, node};
  require_short(token.text, node);
  return token;
}

class LayoutReader {
 public:
  LayoutReader(const TokenizerFiles& files, const std::string& folder)
      : config_(read(files.tokenizer_config, folder, "tokenizer_config.json")),
        map_(read(files.special_tokens_map, folder, "special_tokens_map.json")),
        added_(read(files.added_tokens, folder, "added_tokens.json")),
        model_(read(files.model_config, folder, "config.json")),
        has_json_(files.tokenizer_json.has_value()) {}

  TokenizerLayout read_all(const std::vector<NamedToken>& json_tokens, bool bytes) {
    read_class(bytes);
    if (config_) read_config(*config_);
    if (!layout_.has_decoder) {
      if (map_) read_map(*map_);
      read_lists(json_tokens);
    }
    std::stable_sort(layout_.listed.begin(), layout_.listed.end(),
                     [](const NamedToken& a, const NamedToken& b) { return *a.token < *b.token; });
    if (layout_.kind == TokenizerClass::qwen2 && layout_.prefix_space.value_or(false))
      (*config_)["add_prefix_space"].fail("is true, which is not supported for Qwen2Tokenizer");
    add_defaults();
    return std::move(layout_);
  }

 private:
  /// Determines the class from tokenizer_config.json or config.json; some model types override it.
  void read_class(bool bytes) {
    std::string name, type;
    std::optional<JsonNode> node;
    for (const auto* root : {&config_, &model_}) {
      if (!*root || !name.empty() || !(**root)["tokenizer_class"]) continue;
      node = (**root)["tokenizer_class"];
      name = node->name();
    }
    if (model_ && (*model_)["model_type"]) type = (*model_)["model_type"].text();
    const std::string whole = name;
    if (name != "PreTrainedTokenizerFast" && name.ends_with("Fast")) name.resize(name.size() - 4);
    static const std::map<std::string, TokenizerClass, std::less<>> classes{
        {"LlamaTokenizer", TokenizerClass::llama},
        {"GPT2Tokenizer", TokenizerClass::gpt2},
        {"Qwen2Tokenizer", TokenizerClass::qwen2},
        {"PreTrainedTokenizerFast", TokenizerClass::generic},
        {"PreTrainedTokenizer", TokenizerClass::generic},
        {"TokenizersBackend", TokenizerClass::generic}};
    const auto known = classes.find(name);
    if (node && known == classes.end()) {
      node->fail(
          fmt::format("is \"{}\", which is not supported: LlamaTokenizer, GPT2Tokenizer, Qwen2Tokenizer "
                      "and PreTrainedTokenizerFast are, and tokenizer.json with the last of them says "
                      "by itself how text is split",
                      whole));
    }
    TokenizerClass kind = node ? known->second : TokenizerClass::unnamed;
    const bool mistral = type == "mistral" || type == "mixtral";
    const bool llama3 =
        kind == TokenizerClass::llama && bytes;  // sometimes declared with the name of Llama 2's class
    if (type == "qwen2" || (kind == TokenizerClass::unnamed && type == "qwen3")) {
      kind = TokenizerClass::qwen2;
    } else if (mistral || llama3) {
      kind = TokenizerClass::generic;
    } else if (kind == TokenizerClass::unnamed && type == "gpt2") {
      kind = TokenizerClass::gpt2;
    }
    // For other types transformers often reads tokenizer.json as it is, or uses a specific class, whatever
    // class is named.
    static const std::set<std::string, std::less<>> types{"llama", "mistral", "mixtral",
                                                          "qwen2", "qwen3",   "gpt2"};
    if (!type.empty() && !types.contains(type) && kind != TokenizerClass::generic) {
      (*model_)["model_type"].fail(fmt::format(
          "is \"{}\", for which transformers may take another tokenizer than {}: name "
          "PreTrainedTokenizerFast as tokenizer_class if tokenizer.json says by itself how text is split",
          type, node ? "the class that is named, " + whole : "that of the files"));
    }
    layout_.kind = kind;
    layout_.kind_name = kind == TokenizerClass::llama   ? "LlamaTokenizer"
                        : kind == TokenizerClass::gpt2  ? "GPT2Tokenizer"
                        : kind == TokenizerClass::qwen2 ? "Qwen2Tokenizer"
                                                        : "PreTrainedTokenizerFast";
  }

  std::optional<bool> flag(const char* key) const {
    if (!(*config_)[key]) return std::nullopt;
    return (*config_)[key].boolean();
  }

  void read_config(const JsonNode& root) {
    if (const JsonNode map = root["auto_map"]) {
      const JsonNode code = map.json().is_object() ? map["AutoTokenizer"] : map;
      if (code) code.fail("names a tokenizer in Python of the folder's own, which is not run here");
    }
    for (const char* key : {"split_special_tokens", "fast_tokenizer_files"}) {
      const JsonNode node = root[key];
      if (node && (!node.json().is_boolean() || node.boolean()))
        node.fail("is not supported: remove the key");
    }
    if (!has_json_) {  // otherwise tokenizer.json defines the tokens around a text
      layout_.add_begin = flag("add_bos_token").value_or(false);
      layout_.add_end = flag("add_eos_token").value_or(false);
    }
    layout_.prefix_space = flag("add_prefix_space");
    layout_.legacy = flag("legacy");
    if (has(root, "legacy") && !layout_.legacy) layout_.legacy = false;  // null means false
    for (const std::string_view key : names) set_special(std::string(key), root);
    for (const auto& [key, value] : root.members()) {
      const bool more = key.ends_with("_token") && std::find(names.begin(), names.end(), key) == names.end();
      if (more && (value.json().is_string() || value.json().is_object())) set_special(key, root);
    }
    const JsonNode extra = root["extra_special_tokens"], additional = root["additional_special_tokens"];
    if (extra && extra.json().is_object()) {
      for (const auto& [key, value] : extra.members()) set_special(key, extra);
    } else {
      const bool some = extra && !extra.json().empty();
      layout_.has_extra = has(root, "extra_special_tokens") || has(root, "additional_special_tokens");
      read_extra(some ? extra : additional ? additional : extra);
    }
    layout_.has_decoder = has(root, "added_tokens_decoder");
    if (!layout_.has_decoder) return;
    for (const auto& [key, value] : root["added_tokens_decoder"].members()) {
      NamedToken token = read_named_token(value);
      const bool number =
          !key.empty() && key.size() < 9 && key.find_first_not_of("0123456789") == std::string::npos;
      if (!number || std::stoi(key) > largest_token) value.fail("does not stand under the number of a token");
      token.token = std::stoi(key);
      layout_.listed.push_back(std::move(token));
    }
  }

  void read_extra(const JsonNode& list) {
    if (!list) return;
    for (const JsonNode& each : list.items()) layout_.extra.push_back(read_special(each));
  }

  /// Sets a special token by its name; later calls take precedence.
  void set_special(const std::string& key, const JsonNode& root) {
    if (!has(root, key.c_str())) return;
    std::optional<NamedToken> token;
    if (const JsonNode node = root[key]) token = read_special(node);
    const auto [place, is_new] = places_.try_emplace(key, layout_.special.size());
    if (is_new) layout_.special.emplace_back(key, std::nullopt);
    layout_.special[place->second].second = std::move(token);
  }

  void read_map(const JsonNode& root) {
    for (const auto& [key, value] : root.members()) {
      if (key == "additional_special_tokens" || key == "extra_special_tokens") {
        // If tokenizer_config.json has extra tokens, they replace those of other files.
        if (layout_.has_extra && (key[0] == 'a' || !layout_.extra.empty())) continue;
        layout_.has_extra = layout_.has_extra || key[0] == 'e';
        read_extra(value);
      } else {
        set_special(key, root);
      }
    }
  }

  /// Reads added_tokens.json, and then tokenizer.json's list, which takes precedence.
  void read_lists(const std::vector<NamedToken>& json_tokens) {
    std::map<std::int32_t, NamedToken> by_number;
    if (added_) {
      std::set<std::string_view> special;
      for (const NamedToken& token : layout_.extra) special.insert(token.text);
      for (const auto& [name, token] : layout_.special) {
        if (token) special.insert(token->text);
      }
      for (const auto& [text, number] : added_->members()) {
        const auto token = number.integer<std::int32_t>(0, largest_token);
        require_short(text, number);
        if (!by_number.try_emplace(token, NamedToken{text, special.count(text) == 0, token, number}).second)
          number.fail(fmt::format("is {}, which is the number of another token", token));
      }
    }
    for (const NamedToken& token : json_tokens) by_number.insert_or_assign(*token.token, token);
    for (auto& [number, token] : by_number) layout_.listed.push_back(std::move(token));
  }

  void add_defaults() {
    if (layout_.kind == TokenizerClass::llama) {
      layout_.set_default("bos_token", "<s>");
      layout_.set_default("eos_token", "</s>");
      layout_.set_default("unk_token", "<unk>");
    }
    if (layout_.kind == TokenizerClass::gpt2) layout_.set_default("bos_token", "<|endoftext|>");
    if (layout_.kind == TokenizerClass::qwen2) layout_.set_default("pad_token", "<|endoftext|>");
    if (layout_.kind == TokenizerClass::gpt2 || layout_.kind == TokenizerClass::qwen2) {
      layout_.set_default("eos_token", "<|endoftext|>");
      layout_.set_default("unk_token", "<|endoftext|>");
    }
  }

  std::optional<JsonNode> config_, map_, added_, model_;
  bool has_json_;
  std::map<std::string, std::size_t> places_;  ///< names' positions in the layout's list of special tokens
  TokenizerLayout layout_;
};

}  // namespace

void NamedToken::fail(const std::string& what) const {
  if (node) node->fail(what);
  throw ConfigurationError(fmt::format("token '{}' {}", text, what));
}

NamedToken read_named_token(const JsonNode& node) {
  NamedToken token;
  token.node = node;
  token.text = node["content"].text();
  require_short(token.text, node["content"]);
  for (const char* flag : {"single_word", "lstrip", "rstrip"}) {
    const JsonNode value = node[flag];
    if (value && value.boolean())
      value.fail(
          fmt::format("is {}, which is not supported: only false is", detail::brief_json(value.json())));
  }
  const bool special = node["special"] && node["special"].boolean();
  token.normalized = node["normalized"] ? node["normalized"].boolean() : !special;
  if (node["id"]) token.token = node["id"].integer<std::int32_t>(0, largest_token);
  return token;
}

void TokenizerLayout::require_raw(const std::function<bool(const std::string& text)>& refused,
                                  const std::string& why) const {
  const auto check = [&](const NamedToken& token) {
    if (token.normalized && refused(token.text))
      token.fail(
          fmt::format("'{}' is looked for in normalized text, which is not supported {}", token.text, why));
  };
  for (const NamedToken& token : listed) check(token);
  for (const auto& [name, token] : special) {
    if (token) check(*token);
  }
  for (const NamedToken& token : extra) check(token);
}

const NamedToken* TokenizerLayout::find(std::string_view key) const {
  for (const auto& [name, token] : special) {
    if (name == key) return token ? &*token : nullptr;
  }
  return nullptr;
}

void TokenizerLayout::set_default(const std::string& key, const std::string& text) {
  const bool there =
      std::any_of(special.begin(), special.end(), [&](const auto& each) { return each.first == key; });
  if (!there) special.emplace_back(key, NamedToken{text, false, std::nullopt, std::nullopt});
}

TokenizerLayout read_layout(const TokenizerFiles& files, const std::string& folder,
                            const std::vector<NamedToken>& json_tokens, bool bytes) {
  return LayoutReader(files, folder).read_all(json_tokens, bytes);
}

SpecialTokens add_tokens(const TokenizerLayout& layout, const BaseVocabulary& base, AddedTokens& added) {
  const auto token_of = [&](const std::string& text) {
    const auto token = added.find(text);
    return token ? token : base.find(text);
  };
  const auto add = [&](const NamedToken& token, bool normalized) {
    if (token.text.empty()) return;
    const auto known = base.find(token.text);
    const std::int32_t number = added.number_of(token.text, known, base.size);
    if (token.token && *token.token != number) {
      token.fail(
          fmt::format("gives '{}' the number {}, but {} {}, and transformers takes that one: correct the "
                      "number, or remove the token",
                      token.text, *token.token,
                      known || added.find(token.text) ? "it is token" : "the next free number is", number));
    }
    if (number > largest_token) token.fail("is beyond the largest number of a token");
    (void)added.add(token.text, normalized, known, base.size);
  };
  for (const NamedToken& token : layout.listed) add(token, token.normalized);
  const NamedToken* const end = layout.find("eos_token");
  if (end != nullptr && !token_of(end->text)) {
    if (end->node) end->fail(fmt::format("is '{}', which the tokenizer does not have", end->text));
  }
  // Tokens with a name come first, sorted by name, then the others.
  std::vector<const NamedToken*> special;
  for (const std::string_view name : names) special.push_back(layout.find(name));
  for (const auto& [name, token] : layout.special) {
    if (token && std::find(names.begin(), names.end(), name) == names.end()) special.push_back(&*token);
  }
  for (const NamedToken& token : layout.extra) special.push_back(&token);
  std::erase(special, nullptr);
  for (const NamedToken* const token : special) {
    if (!added.find(token->text)) add(*token, token->normalized);
  }
  if (layout.kind == TokenizerClass::qwen2) {
    for (const NamedToken* const token : special) add(*token, false);
  }

  SpecialTokens around;
  if (end != nullptr) around.end = token_of(end->text);
  const NamedToken* const begin = layout.find("bos_token");
  if (layout.add_begin && begin != nullptr) around.before = {*token_of(begin->text)};
  if (layout.add_end && around.end) around.after = {*around.end};
  for (const char* name : {"<|endoftext|>", "<|end_of_text|>", "</s>"}) {
    if (!around.end) around.end = token_of(name);
  }
  return around;
}

}  // namespace tranche::training
