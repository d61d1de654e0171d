#pragma once
/// Regular expressions that split text into words, as given in tokenizer files.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tranche::training {

/// GPT-2's pattern, which its files do not contain.
inline constexpr std::string_view gpt2_pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

/// The pattern of Qwen 2 and 3, which the class of their tokenizers implies.
inline constexpr std::string_view qwen2_pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

/// A pattern in the syntax of Oniguruma, which Hugging Face's tokenizers use, run by PCRE2 with Unicode
/// properties.
class WordPattern {
 public:
  /// Throws InvalidArgument with the reason for a pattern that PCRE2 cannot compile, that can match nothing,
  /// or that has an escape or an operation that the two libraries may interpret differently.
  explicit WordPattern(std::string_view pattern);
  /// The remaining steps of PCRE2's matcher for a text. Failed attempts also cost steps.
  struct Budget {
    std::int64_t steps = 0;
  };
  /// A budget in proportion to the text: far more than the published patterns need for any text.
  static Budget budget_for(std::size_t bytes) noexcept;
  /// Calls `visit` with the words of a text in UTF-8, in order: each match, and the text between two matches.
  /// Together they are the text. Throws InvalidArgument when the steps are used up.
  void split(std::string_view text, Budget& budget, const std::function<void(std::string_view)>& visit) const;
  /// True if a match begins at the first byte of a text in UTF-8. Throws as split() does.
  bool begins(std::string_view text, Budget& budget) const;

 private:
  struct Code;
  std::shared_ptr<const Code> code_;
};

/// The length in bytes of the longest valid UTF-8 at a text's beginning.
std::size_t utf8_prefix(std::string_view text);
/// The text in normalization form C, if it is UTF-8.
std::string normalization_form_c(std::string_view text);

/// A byte of a text in normalization form C, and the corresponding byte of the original text.
struct Place {
  std::size_t normalized = 0, original = 0;
};
/// The positions at which composition moves bytes, in order. The offset is constant between two of them,
/// except within composed characters. The time is linear in the text.
std::vector<Place> places_of_form_c(std::string_view text);

}  // namespace tranche::training
