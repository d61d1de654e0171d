#include "data/bpe_tokenizer.h"

#include <algorithm>
#include <deque>
#include <unordered_map>
#include <utility>

#include "tranche/core/error.h"

namespace tranche::data {

namespace {

/// Longer words are hardly ever there twice.
constexpr std::size_t longest_kept_word = 64;

}  // namespace

/// The state of one call of encode().
struct BpeTokenizer::Call {
  std::vector<std::int32_t> tokens;
  PairEncoding::Scratch scratch;
  std::deque<std::string> texts;  ///< that `known` refers to
  /// By word that was encoded before: its first token's place in `tokens`, and how many it has.
  std::unordered_map<std::string_view, std::pair<std::size_t, std::size_t>> known;
};

BpeTokenizer::BpeTokenizer(BpeDefinition definition) : parts_(std::move(definition)) {
  set_special(parts_.special);
  for (AddedToken token : parts_.added) {
    if (token.text.empty()) continue;
    if (token.normalized && parts_.composes) token.text = normalization_form_c(token.text);
    Finder& finder = token.normalized ? normalized_ : raw_;
    finder[static_cast<unsigned char>(token.text[0])].push_back(std::move(token));
  }
  for (Finder* finder : {&raw_, &normalized_}) {
    for (auto& tokens : *finder) {
      std::stable_sort(tokens.begin(), tokens.end(), [](const AddedToken& a, const AddedToken& b) {
        return a.text.size() > b.text.size();
      });
    }
  }
}

template <typename Text, typename Token>
void BpeTokenizer::split_added(std::string_view text, const Finder& finder, const Text& visit_text,
                               const Token& visit_token) {
  std::size_t begin = 0;
  for (std::size_t at = 0; at < text.size();) {
    const auto& candidates = finder[static_cast<unsigned char>(text[at])];
    const auto found = std::find_if(candidates.begin(), candidates.end(), [&](const AddedToken& token) {
      return text.substr(at).starts_with(token.text);
    });
    if (found == candidates.end()) {
      ++at;
      continue;
    }
    if (at > begin) visit_text(text.substr(begin, at - begin), begin == 0);
    visit_token(found->token);
    at += found->text.size();
    begin = at;
  }
  if (begin < text.size()) visit_text(text.substr(begin), begin == 0);
}

void BpeTokenizer::encode_word(std::string_view word, Call& call) const {
  if (word.size() > longest_kept_word) {
    parts_.pairs.encode(word, parts_.whole_words, call.scratch, call.tokens);
    return;
  }
  const auto [known, added] = call.known.try_emplace(word, call.tokens.size(), 0);
  auto& [first, count] = known->second;
  if (added) {
    parts_.pairs.encode(word, parts_.whole_words, call.scratch, call.tokens);
    count = call.tokens.size() - first;
    return;
  }
  for (std::size_t i = 0; i < count; ++i) call.tokens.push_back(call.tokens[first + i]);
}

void BpeTokenizer::encode_words(std::string_view text, std::size_t pattern, Call& call) const {
  if (pattern == parts_.patterns.size()) {
    encode_word(text, call);
    return;
  }
  while (!text.empty()) {
    const std::size_t good = utf8_prefix(text);
    parts_.patterns[pattern].split(text.substr(0, good),
                                   [&](std::string_view word) { encode_words(word, pattern + 1, call); });
    text.remove_prefix(good);
    // Bytes that are not UTF-8 are a word of their own.
    std::size_t bad = 0;
    while (bad < text.size() && utf8_prefix(text.substr(bad, 4)) == 0) ++bad;
    if (bad > 0) encode_words(text.substr(0, bad), parts_.patterns.size(), call);
    text.remove_prefix(bad);
  }
}

void BpeTokenizer::encode_text(std::string_view text, bool first, Call& call) const {
  if (parts_.composes && utf8_prefix(text) == text.size()) {
    text = call.texts.emplace_back(normalization_form_c(text));
  }
  split_added(
      text, normalized_,
      [&](std::string_view piece, bool begins) {
        if (parts_.visible_spaces) {
          using Prefix = BpeDefinition::Prefix;
          std::string& spaced = call.texts.emplace_back();
          const bool there =
              parts_.space_once && (piece.starts_with(' ') || piece.starts_with(visible_space));
          if (!there && (parts_.space_before == Prefix::always ||
                         (parts_.space_before == Prefix::first && first && begins))) {
            spaced = visible_space;
          }
          for (const char c : piece) {
            if (c == ' ') spaced += visible_space;
            if (c != ' ') spaced += c;
          }
          piece = spaced;
        }
        encode_words(piece, 0, call);
      },
      [&](std::int32_t token) { call.tokens.push_back(token); });
}

std::vector<std::int32_t> BpeTokenizer::encode(std::string_view text) const {
  Call call;
  try {
    split_added(
        text, raw_, [&](std::string_view piece, bool first) { encode_text(piece, first, call); },
        [&](std::int32_t token) { call.tokens.push_back(token); });
  } catch (const InvalidArgument& problem) {
    throw ConfigurationError("the tokenizer's pattern cannot split the text: " + problem.message());
  }
  return std::move(call.tokens);
}

std::string BpeTokenizer::decode(std::span<const std::int32_t> tokens) const {
  std::string text;
  for (const std::int32_t token : tokens) text += decode(token);
  if (parts_.strips_space && text.starts_with(' ')) text.erase(0, 1);
  return text;
}

std::optional<std::int32_t> BpeTokenizer::find(std::string_view name) const {
  for (const AddedToken& token : parts_.added) {
    if (token.text == name) return token.token;
  }
  return std::nullopt;
}

}  // namespace tranche::data
