#pragma once
/// Reads the files beside a tokenizer's vocabulary as transformers' AutoTokenizer (5.24) does.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/json_node.h"
#include "training/added_tokens.h"
#include "tranche/training/tokenizer.h"

namespace tranche::training {

/// Classes of transformers. All except `generic` split words in their own way, regardless of tokenizer.json.
enum class TokenizerClass : std::uint8_t {
  unnamed,  ///< no class is named: like generic
  generic,  ///< PreTrainedTokenizerFast: the vocabulary's file determines everything
  llama,
  gpt2,
  qwen2,
};

/// A token as a file gives it.
struct NamedToken {
  std::string text;
  bool normalized = false;
  std::optional<std::int32_t> token;     ///< the number in the file
  std::optional<detail::JsonNode> node;  ///< its position; nullopt: not from a JSON file

  /// Throws "FILE: KEY WHAT".
  [[noreturn]] void fail(const std::string& what) const;
};
/// Reads content, flags and, if present, id. Refuses unsupported flags.
NamedToken read_named_token(const detail::JsonNode& node);

struct TokenizerLayout {
  TokenizerClass kind = TokenizerClass::unnamed;
  std::string kind_name;  ///< for messages: "LlamaTokenizer"
  bool add_begin = false, add_end = false;
  std::optional<bool> prefix_space, legacy;
  bool has_decoder = false;        ///< tokenizer_config.json lists added tokens, so other lists are ignored
  std::vector<NamedToken> listed;  ///< added tokens with numbers
  /// bos_token and so on; nullopt if a file has null.
  std::vector<std::pair<std::string, std::optional<NamedToken>>> special;
  std::vector<NamedToken> extra;  ///< special tokens without a name
  bool has_extra = false;         ///< a file lists these, so those of a SentencePiece model are ignored

  /// Refuses tokens that are searched in normalized text and for which `refused` returns true.
  void require_raw(const std::function<bool(const std::string& text)>& refused, const std::string& why) const;
  /// The token of "bos_token" and the like; null if there is none.
  const NamedToken* find(std::string_view key) const;
  /// Sets a token unless a file sets it, or has null.
  void set_default(const std::string& key, const std::string& text);
};

/// Reads tokenizer_config.json, special_tokens_map.json, added_tokens.json and config.json. `json_tokens` are
/// the added tokens of tokenizer.json, `bytes` is true if it uses ByteLevel. Throws ConfigurationError naming
/// file and key.
TokenizerLayout read_layout(const TokenizerFiles& files, const std::string& folder,
                            const std::vector<NamedToken>& json_tokens, bool bytes);

/// A vocabulary without its added tokens.
struct BaseVocabulary {
  std::int64_t size = 0;
  std::function<std::optional<std::int32_t>(std::string_view)> find;
};
/// Adds the tokens of a layout in transformers' order, and returns the tokens around a text. Throws if a file
/// gives a token a different number than it gets, and if eos_token is not a token.
SpecialTokens add_tokens(const TokenizerLayout& layout, const BaseVocabulary& base, AddedTokens& added);

}  // namespace tranche::training
