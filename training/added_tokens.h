#pragma once
/// Tokens that are found in a text before any other: "<|endoftext|>".

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace tranche::training {

struct AddedToken {
  std::string text;
  std::int32_t token = 0;
  bool normalized = false;  ///< it is looked for in the normalized text
};

inline constexpr std::int32_t largest_token = (1 << 24) - 1;
/// Longer added tokens are refused: the time to look for one is bounded by this at each byte of a text.
inline constexpr std::size_t longest_added_token = 256;

/// A list of added tokens, with the numbers that Hugging Face's tokenizers give them.
class AddedTokens {
 public:
  /// The number of a token that is added now: its number in the list or in the vocabulary (`known`), else the
  /// first free one beyond a vocabulary of `base` tokens.
  std::int32_t number_of(std::string_view text, std::optional<std::int32_t> known, std::int64_t base) const;
  /// Adds a token with that number, or gives one that is there already its flags.
  std::int32_t add(const std::string& text, bool normalized, std::optional<std::int32_t> known,
                   std::int64_t base);
  std::optional<std::int32_t> find(std::string_view text) const;
  const std::vector<AddedToken>& tokens() const noexcept { return tokens_; }

 private:
  std::vector<AddedToken> tokens_;
  std::unordered_map<std::string, std::size_t> places_;
  std::int64_t after_last_ = 0;  ///< largest number plus one
};

/// Finds added tokens in a text, at each place the longest.
class AddedTokenFinder {
 public:
  AddedTokenFinder() = default;
  /// Tokens without text are never found.
  explicit AddedTokenFinder(std::vector<AddedToken> tokens);

  /// The longest token that a text begins with; null: none does. The time does not grow with the number of
  /// tokens but by its logarithm.
  const AddedToken* longest(std::string_view text) const;

  /// Calls `visit_text(piece, begin)` with what is between tokens, where it is not empty, and
  /// `visit_token(token, begin)` with the tokens, in order.
  template <typename Text, typename Token>
  void split(std::string_view text, const Text& visit_text, const Token& visit_token) const {
    std::size_t begin = 0;
    for (std::size_t at = 0; at < text.size();) {
      const AddedToken* const found = longest(text.substr(at));
      if (found == nullptr) {
        ++at;
        continue;
      }
      if (at > begin) visit_text(text.substr(begin, at - begin), begin);
      visit_token(found->token, at);
      at += found->text.size();
      begin = at;
    }
    if (begin < text.size()) visit_text(text.substr(begin), begin);
  }

 private:
  std::vector<AddedToken> tokens_;                ///< in the order of their bytes
  std::array<std::size_t, 257> by_first_byte_{};  ///< places in `tokens_`
};

}  // namespace tranche::training
