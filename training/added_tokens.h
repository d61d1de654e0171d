#pragma once
/// Tokens that are found in a text before all others: "<|endoftext|>".

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
  bool normalized = false;  ///< it is searched in the normalized text
};

inline constexpr std::int32_t largest_token = (1 << 24) - 1;
/// Longer added tokens are refused, because this bounds the search time at each byte of a text.
inline constexpr std::size_t longest_added_token = 256;

/// A list of added tokens, with the numbers that Hugging Face's tokenizers give them.
class AddedTokens {
 public:
  /// The number of a token that is added now: its number in the list or in the vocabulary (`known`), else the
  /// first free one beyond a vocabulary of `base` tokens.
  std::int32_t number_of(std::string_view text, std::optional<std::int32_t> known, std::int64_t base) const;
  /// Adds a token with that number, or gives an existing one its flags.
  std::int32_t add(const std::string& text, bool normalized, std::optional<std::int32_t> known,
                   std::int64_t base);
  std::optional<std::int32_t> find(std::string_view text) const;
  const std::vector<AddedToken>& tokens() const noexcept { return tokens_; }

 private:
  std::vector<AddedToken> tokens_;
  std::unordered_map<std::string, std::size_t> places_;
  std::int64_t after_last_ = 0;  ///< the largest number plus one
};

/// Finds added tokens in a text, the longest at each position.
class AddedTokenFinder {
 public:
  AddedTokenFinder() = default;
  /// Tokens without text are never found.
  explicit AddedTokenFinder(std::vector<AddedToken> tokens);

  /// The longest token with which a text begins; null if there is none. The time grows with the logarithm of
  /// the number of tokens.
  const AddedToken* longest(std::string_view text) const;

  /// Calls `visit_text(piece, begin)` with nonempty text between tokens, and `visit_token(token, begin)` with
  /// the tokens, in order.
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
  std::vector<AddedToken> tokens_;                ///< sorted by their bytes
  std::array<std::size_t, 257> by_first_byte_{};  ///< positions in `tokens_`
};

}  // namespace tranche::training
