#include "training/added_tokens.h"

#include <algorithm>
#include <utility>

namespace tranche::training {

std::int32_t AddedTokens::number_of(std::string_view text, std::optional<std::int32_t> known,
                                    std::int64_t base) const {
  if (const auto there = find(text)) return *there;
  return known ? *known : static_cast<std::int32_t>(std::max(base, after_last_));
}

std::int32_t AddedTokens::add(const std::string& text, bool normalized, std::optional<std::int32_t> known,
                              std::int64_t base) {
  const std::int32_t number = number_of(text, known, base);
  const auto [place, is_new] = places_.try_emplace(text, tokens_.size());
  if (is_new) tokens_.push_back({text, number, normalized});
  tokens_[place->second].normalized = normalized;
  after_last_ = std::max<std::int64_t>(after_last_, std::int64_t{number} + 1);
  return number;
}

std::optional<std::int32_t> AddedTokens::find(std::string_view text) const {
  const auto place = places_.find(std::string(text));
  if (place == places_.end()) return std::nullopt;
  return tokens_[place->second].token;
}

AddedTokenFinder::AddedTokenFinder(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  std::erase_if(tokens_, [](const AddedToken& token) { return token.text.empty(); });
  std::stable_sort(tokens_.begin(), tokens_.end(),
                   [](const AddedToken& a, const AddedToken& b) { return a.text < b.text; });
  for (const AddedToken& token : tokens_) ++by_first_byte_[static_cast<unsigned char>(token.text[0]) + 1U];
  for (std::size_t byte = 1; byte < by_first_byte_.size(); ++byte)
    by_first_byte_[byte] += by_first_byte_[byte - 1];
}

const AddedToken* AddedTokenFinder::longest(std::string_view text) const {
  if (text.empty()) return nullptr;
  const auto first_byte = static_cast<unsigned char>(text[0]);
  // The range of tokens that begin with the first `length` bytes of the text; the shortest comes first.
  std::size_t begin = by_first_byte_[first_byte], end = by_first_byte_[first_byte + 1U];
  const AddedToken* found = nullptr;
  for (std::size_t length = 1; begin < end; ++length) {
    if (tokens_[begin].text.size() == length) {
      found = &tokens_[begin];
      while (begin < end && tokens_[begin].text.size() == length) ++begin;
    }
    if (begin == end || length == text.size()) break;
    const auto byte_of = [&](std::size_t place) {
      return static_cast<unsigned char>(tokens_[place].text[length]);
    };
    const auto next = static_cast<unsigned char>(text[length]);
    if (byte_of(begin) == next && byte_of(end - 1) == next) continue;
    const auto place_of = [&](unsigned least) {  // the first token whose next byte is not below `least`
      const auto from = tokens_.begin() + static_cast<std::ptrdiff_t>(begin);
      const auto to = tokens_.begin() + static_cast<std::ptrdiff_t>(end);
      const auto place = std::partition_point(from, to, [&](const AddedToken& token) {
        return static_cast<unsigned char>(token.text[length]) < least;
      });
      return static_cast<std::size_t>(place - tokens_.begin());
    };
    end = place_of(next + 1U);
    begin = place_of(next);
  }
  return found;
}

}  // namespace tranche::training
