#pragma once
/// Regular expressions that split text in words, as tokenizer files give them.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tranche::training {

/// GPT-2's pattern, which its files do not say.
inline constexpr std::string_view gpt2_pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

/// The pattern of Qwen 2 and 3, which the class of their tokenizers implies.
inline constexpr std::string_view qwen2_pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

/// A pattern of Oniguruma, which Hugging Face's tokenizers run, on PCRE2 with Unicode properties.
class WordPattern {
 public:
  /// Throws InvalidArgument saying why for a pattern that PCRE2 cannot compile, that can match nothing, or
  /// that has an escape or an operation that the two libraries may understand differently.
  explicit WordPattern(std::string_view pattern);
  /// The steps of PCRE2's matcher that are left for a text. Tries that fail cost steps, too.
  struct Budget {
    std::int64_t steps = 0;
  };
  /// In proportion to the text: far more than the published patterns take for any text.
  static Budget budget_for(std::size_t bytes) noexcept;
  /// Calls `visit` with the words of a text in UTF-8, in order: each match, and what is between two matches.
  /// Together they are the text. Throws InvalidArgument when the steps are used up.
  void split(std::string_view text, Budget& budget, const std::function<void(std::string_view)>& visit) const;

 private:
  struct Code;
  std::shared_ptr<const Code> code_;
};

/// The longest UTF-8 that a text begins with, in bytes.
std::size_t utf8_prefix(std::string_view text);
/// The text in normalization form C, where it is UTF-8.
std::string normalization_form_c(std::string_view text);

/// A byte of a text in normalization form C, and the byte of the text that it comes from.
struct Place {
  std::size_t normalized = 0, original = 0;
};
/// The places at which composition moves bytes, in order. The distance stays the same between two of them,
/// except within characters that are composed. The time is linear in the text.
std::vector<Place> places_of_form_c(std::string_view text);

}  // namespace tranche::training
