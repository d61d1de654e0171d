#include "training/bpe_tokenizer.h"

#include <algorithm>
#include <cstdint>
#include <deque>
#include <unordered_map>
#include <utility>

#include "tranche/core/error.h"

namespace tranche::training {

namespace {

/// Longer words hardly ever occur twice.
constexpr std::size_t longest_kept_word = 64;

}  // namespace

/// The state of one call of encode().
struct BpeTokenizer::Call {
  std::vector<std::int32_t> tokens;
  PairEncoding::Scratch scratch;
  WordPattern::Budget budget;
  std::deque<std::string> texts;  ///< to which the keys of `known` refer
  /// For each word that was encoded before, the position and number of its tokens in `tokens`.
  std::unordered_map<std::string_view, std::pair<std::size_t, std::size_t>> known;

  std::vector<std::size_t>* begins = nullptr;  ///< where each token begins in the text; null: not requested
  std::vector<Place> places;    ///< maps the normalized text to the text; empty: they are equal
  std::size_t offset = 0;       ///< of the normalized text's first byte in the text
  std::size_t piece_begin = 0;  ///< of the current piece, in the normalized text

  void add(std::int32_t token, std::size_t begin) {
    tokens.push_back(token);
    if (begins != nullptr) begins->push_back(place_of(begin));
  }
  /// The position in the text from which a byte of the normalized text comes.
  std::size_t place_of(std::size_t normalized) const {
    const auto after =
        std::upper_bound(places.begin(), places.end(), normalized,
                         [](std::size_t at, const Place& place) { return at < place.normalized; });
    if (after == places.begin()) return offset + normalized;
    const Place& before = *(after - 1);
    const std::size_t end = after == places.end() ? SIZE_MAX : after->original;
    return offset + std::min(before.original + (normalized - before.normalized), end);
  }
};

BpeTokenizer::BpeTokenizer(BpeDefinition definition) : parts_(std::move(definition)) {
  set_special(parts_.special);
  std::vector<AddedToken> raw, normalized;
  for (AddedToken token : parts_.added.tokens()) {
    if (token.normalized && parts_.composes) token.text = normalization_form_c(token.text);
    (token.normalized ? normalized : raw).push_back(std::move(token));
  }
  raw_ = AddedTokenFinder(std::move(raw));
  normalized_ = AddedTokenFinder(std::move(normalized));
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
    parts_.patterns[pattern].split(text.substr(0, good), call.budget,
                                   [&](std::string_view word) { encode_words(word, pattern + 1, call); });
    text.remove_prefix(good);
    // Bytes that are not UTF-8 form a separate word.
    std::size_t bad = 0;
    while (bad < text.size() && utf8_prefix(text.substr(bad, 4)) == 0) ++bad;
    if (bad > 0) encode_words(text.substr(0, bad), parts_.patterns.size(), call);
    text.remove_prefix(bad);
  }
}

void BpeTokenizer::encode_piece(std::string_view piece, bool first, Call& call) const {
  const std::size_t from = call.tokens.size();
  const std::string_view original = piece;
  bool prefixed = false;
  if (parts_.visible_spaces) {
    using Prefix = BpeDefinition::Prefix;
    std::string& spaced = call.texts.emplace_back();
    const bool there = parts_.space_once && (piece.starts_with(' ') || piece.starts_with(visible_space));
    prefixed =
        !there && (parts_.space_before == Prefix::always || (parts_.space_before == Prefix::first && first));
    if (prefixed) spaced = visible_space;
    for (const char c : piece) {
      if (c == ' ') spaced += visible_space;
      if (c != ' ') spaced += c;
    }
    piece = spaced;
  } else if (parts_.blank_before && !piece.starts_with(' ')) {
    prefixed = true;
    piece = call.texts.emplace_back(" " + std::string(piece));
  }
  encode_words(piece, 0, call);
  if (call.begins == nullptr) return;
  // The tokens have the bytes of the piece after the prepended space, where U+2581 is one byte.
  std::size_t at = 0;
  const std::size_t begin = call.piece_begin;
  for (std::size_t i = from; i < call.tokens.size(); ++i) {
    call.begins->push_back(call.place_of(begin + at));
    for (std::size_t left = decode(call.tokens[i]).size(); left > 0; --left) {
      if (prefixed) {
        prefixed = false;
      } else {
        at +=
            parts_.visible_spaces && original.substr(std::min(at, original.size())).starts_with(visible_space)
                ? visible_space.size()
                : 1;
      }
    }
  }
}

void BpeTokenizer::encode_text(std::string_view text, std::size_t begin, Call& call) const {
  call.offset = begin;
  call.places.clear();
  if (parts_.composes && utf8_prefix(text) == text.size()) {
    const std::string& composed = call.texts.emplace_back(normalization_form_c(text));
    if (call.begins != nullptr && composed != text) call.places = places_of_form_c(text);
    text = composed;
  }
  normalized_.split(
      text,
      [&](std::string_view piece, std::size_t at) {
        call.piece_begin = at;
        encode_piece(piece, begin == 0 && at == 0, call);
      },
      [&](std::int32_t token, std::size_t at) { call.add(token, at); });
}

void BpeTokenizer::encode(std::string_view text, Call& call) const {
  call.budget = WordPattern::budget_for(text.size());
  try {
    raw_.split(
        text, [&](std::string_view piece, std::size_t begin) { encode_text(piece, begin, call); },
        [&](std::int32_t token, std::size_t begin) {
          call.places.clear();
          call.offset = 0;
          call.add(token, begin);
        });
  } catch (const InvalidArgument& problem) {
    throw ConfigurationError("the tokenizer's pattern cannot split the text: " + problem.message());
  }
}

std::vector<std::int32_t> BpeTokenizer::encode(std::string_view text) const {
  Call call;
  encode(text, call);
  return std::move(call.tokens);
}

std::vector<std::int32_t> BpeTokenizer::encode(std::string_view text,
                                               std::vector<std::size_t>& begins) const {
  Call call;
  begins.clear();
  call.begins = &begins;
  encode(text, call);
  return std::move(call.tokens);
}

std::string BpeTokenizer::decode(std::span<const std::int32_t> tokens) const {
  std::string text;
  for (const std::int32_t token : tokens) text += decode(token);
  if (parts_.strips_space && text.starts_with(' ')) text.erase(0, 1);
  return text;
}

std::optional<std::int32_t> BpeTokenizer::find(std::string_view name) const {
  return parts_.added.find(name);
}

}  // namespace tranche::training
