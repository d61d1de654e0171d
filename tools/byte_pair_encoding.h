#pragma once
/// GPT-2's tokens: byte pairs merged within words (Sennrich et al., 2016, over bytes as Radford et al.,
/// 2019).

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace tranche::tools {

/// Reads vocab.json and merges.txt as Hugging Face's GPT2Tokenizer does. Any bytes can be encoded, and
/// decoding gives them back.
class BytePairEncoding {
 public:
  /// The files' texts; `origin` (their folder) is named in errors. Throws ConfigurationError for text that is
  /// neither, numbers that are there twice, bytes without a token, and merges whose result has none.
  BytePairEncoding(std::string_view vocabulary_json, std::string_view merges, std::string_view origin);
  /// Reads a folder's files; throws the same, also when a file is missing.
  static BytePairEncoding load(const std::string& folder);
  /// True when a folder has both files.
  static bool is_in(const std::string& folder);

  /// Largest token plus one.
  std::int64_t vocabulary() const noexcept { return static_cast<std::int64_t>(bytes_.size()); }
  /// "<|endoftext|>" is its own token where the vocabulary has it.
  std::vector<std::int32_t> encode(std::string_view text) const;
  /// Bytes of a token; empty for numbers that none has.
  std::string_view decode(std::int32_t token) const;
  std::string decode(std::span<const std::int32_t> tokens) const;

 private:
  void encode_word(std::string_view word, std::vector<std::int32_t>& tokens) const;

  struct Merge {
    std::int32_t rank = 0, token = 0;
  };
  std::vector<std::string> bytes_;                   ///< by token
  std::vector<std::int32_t> of_byte_;                ///< by byte
  std::unordered_map<std::uint64_t, Merge> merges_;  ///< by a pair of tokens
  std::int32_t end_of_text_ = -1;
};

/// The words of GPT-2's pattern: 's|'t|'re|'ve|'m|'ll|'d| ?letters| ?numbers| ?others|spaces, the last of
/// several spaces going with the word behind it. Together they are the text.
std::vector<std::string_view> split_words(std::string_view text);

}  // namespace tranche::tools
