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

/// Classes of transformers. All but `generic` split words in their own way, whatever tokenizer.json says.
enum class TokenizerClass : std::uint8_t {
  unnamed,  ///< nothing names one: as generic
  generic,  ///< PreTrainedTokenizerFast: the vocabulary's file says everything
  llama,
  gpt2,
  qwen2,
};

/// A token as a file gives it.
struct NamedToken {
  std::string text;
  bool normalized = false;
  std::optional<std::int32_t> token;     ///< that the file says
  std::optional<detail::JsonNode> node;  ///< where; nothing: no JSON file does

  /// Throws "FILE: KEY WHAT".
  [[noreturn]] void fail(const std::string& what) const;
};
/// Reads content, flags and, where it is there, id. Refuses flags that are not supported.
NamedToken read_named_token(const detail::JsonNode& node);

struct TokenizerLayout {
  TokenizerClass kind = TokenizerClass::unnamed;
  std::string kind_name;  ///< as messages name it: "LlamaTokenizer"
  bool add_begin = false, add_end = false;
  std::optional<bool> prefix_space, legacy;
  bool has_decoder = false;        ///< tokenizer_config.json lists added tokens, so other lists do not count
  std::vector<NamedToken> listed;  ///< added tokens with numbers
  /// bos_token and so on; without a token where a file says null.
  std::vector<std::pair<std::string, std::optional<NamedToken>>> special;
  std::vector<NamedToken> extra;  ///< special tokens that have no name
  bool has_extra = false;         ///< a file lists these, so those of a SentencePiece model do not count

  /// Refuses tokens that are looked for in normalized text and for which `refused` says so.
  void require_raw(const std::function<bool(const std::string& text)>& refused, const std::string& why) const;
  /// The token of "bos_token" and the like; null where there is none.
  const NamedToken* find(std::string_view key) const;
  /// Names one unless a file does, or says null.
  void set_default(const std::string& key, const std::string& text);
};

/// Reads tokenizer_config.json, special_tokens_map.json, added_tokens.json and config.json. `json_tokens` are
/// the added tokens of tokenizer.json, `bytes` whether that is made of bytes (ByteLevel). Throws
/// ConfigurationError naming file and key.
TokenizerLayout read_layout(const TokenizerFiles& files, const std::string& folder,
                            const std::vector<NamedToken>& json_tokens, bool bytes);

/// A vocabulary without its added tokens.
struct BaseVocabulary {
  std::int64_t size = 0;
  std::function<std::optional<std::int32_t>(std::string_view)> find;
};
/// Adds the tokens of a layout in transformers' order, and gives the tokens around a text. Throws where a
/// file gives a token another number than it gets, and where eos_token is no token.
SpecialTokens add_tokens(const TokenizerLayout& layout, const BaseVocabulary& base, AddedTokens& added);

}  // namespace tranche::training
