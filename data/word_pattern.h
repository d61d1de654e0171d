#pragma once
/// Regular expressions that split text in words, as tokenizer files give them.

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace tranche::data {

/// GPT-2's pattern, which its files do not say.
inline constexpr std::string_view gpt2_pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

/// A pattern of Oniguruma, which Hugging Face's tokenizers run, on PCRE2 with Unicode properties.
class WordPattern {
 public:
  /// Throws InvalidArgument saying why for a pattern that PCRE2 cannot compile, that can match nothing, or
  /// that has an escape or an operation that the two libraries may understand differently.
  explicit WordPattern(std::string_view pattern);
  /// Calls `visit` with the words of a text in UTF-8, in order: each match, and what is between two matches.
  /// Together they are the text. Throws InvalidArgument when PCRE2 gives up.
  void split(std::string_view text, const std::function<void(std::string_view)>& visit) const;

 private:
  struct Code;
  std::shared_ptr<const Code> code_;
};

/// The longest UTF-8 that a text begins with, in bytes.
std::size_t utf8_prefix(std::string_view text);
/// The text in normalization form C, where it is UTF-8.
std::string normalization_form_c(std::string_view text);

}  // namespace tranche::data
