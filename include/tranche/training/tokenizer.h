#pragma once
/// Encodes text as a model's tokens, as defined by the files beside its weights.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tranche::training {

/// Tokens that the model expects around a text.
struct SpecialTokens {
  std::vector<std::int32_t> before, after;  ///< from the tokenizer's files, such as "<s>" before
  std::optional<std::int32_t> end;          ///< of a document: the files' eos_token, or a usual name
};

/// All functions may be called from several threads at once.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  Tokenizer() = default;
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  /// The largest token plus one.
  virtual std::int64_t vocabulary() const = 0;
  /// The tokens of a text alone, without SpecialTokens around it. Names of added tokens in the text
  /// ("<|endoftext|>") become these tokens. Bytes that are not UTF-8 are encoded one by one.
  virtual std::vector<std::int32_t> encode(std::string_view text) const = 0;
  /// The same, and for each token the byte of the text at which it begins. By default it is the sum of the
  /// bytes of the tokens before it.
  virtual std::vector<std::int32_t> encode(std::string_view text, std::vector<std::size_t>& begins) const;
  /// The bytes of a token, possibly a part of a character; empty for numbers without a token.
  virtual std::string_view decode(std::int32_t token) const = 0;
  /// The text of several tokens: the bytes of each, without the first space if the files define that it is
  /// added.
  virtual std::string decode(std::span<const std::int32_t> tokens) const = 0;
  /// The token with a name such as "<|im_end|>"; nullopt if there is none.
  virtual std::optional<std::int32_t> find(std::string_view name) const = 0;
  const SpecialTokens& special() const noexcept { return special_; }
  void set_special(SpecialTokens special) { special_ = std::move(special); }

 private:
  SpecialTokens special_;
};

/// Identifies the tokenizer that made a file of tokens. Empty texts: it is unknown, or every token is a byte.
struct TokenizerStamp {
  std::string vocabulary;  ///< its vocabulary_digest()
  std::string files;       ///< the tokenizer_digest() of its folder
};

/// A digest of the bytes of every token, in 16 hexadecimal digits: equal if all numbers mean the same text.
std::string vocabulary_digest(const Tokenizer& tokenizer);

/// Makes a tokenizer for which every byte is a token; vocabulary 256.
std::unique_ptr<Tokenizer> make_byte_tokenizer();
/// Reads tokenizer.json of Hugging Face's tokenizers: BPE over bytes (GPT-2, Llama 3, Qwen) and over
/// characters with byte_fallback (Llama 2, Mistral). `origin` is named in errors. Throws ConfigurationError
/// naming key and value for unsupported settings that would change tokens, and for files that contradict
/// themselves.
std::unique_ptr<Tokenizer> read_tokenizer_json(std::string_view text, std::string_view origin);
/// Reads vocab.json and merges.txt as GPT2Tokenizer does. Throws ConfigurationError as read_tokenizer_json().
std::unique_ptr<Tokenizer> read_vocabulary_and_merges(std::string_view vocabulary_json,
                                                      std::string_view merges, std::string_view origin);
/// Reads a SentencePiece model (tokenizer.model). Its control pieces ("<s>") are found in a text, and each
/// part between them is encoded as a separate text. Throws ConfigurationError for other contents.
std::unique_ptr<Tokenizer> read_sentencepiece(std::string_view model, std::string_view origin);

/// The text files of a tokenizer's folder; nullopt for missing ones.
struct TokenizerFiles {
  std::optional<std::string> tokenizer_json, tokenizer_model, vocabulary, merges;
  std::optional<std::string> tokenizer_config, special_tokens_map, added_tokens;
  std::optional<std::string> model_config;  ///< config.json, whose model_type determines the class
};
/// Reads a tokenizer from the first of tokenizer.json, tokenizer.model, and vocab.json with merges.txt, and
/// from the other files its class (which determines how words are split), added tokens, tokens around a text,
/// and the end token. The tokens equal those of transformers' AutoTokenizer (5.24). `folder` is named in
/// errors. Throws ConfigurationError naming file and key for unsupported settings that would change tokens.
std::unique_ptr<Tokenizer> read_tokenizer(const TokenizerFiles& files, const std::string& folder);

/// True when a folder has tokenizer.json, tokenizer.model, or both vocab.json and merges.txt.
bool has_tokenizer(const std::string& folder);
/// Reads the files of a folder as read_tokenizer() does. Throws ConfigurationError naming the files if there
/// are none.
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& folder);

}  // namespace tranche::training
