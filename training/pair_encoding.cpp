#include "training/pair_encoding.h"

#include <utf8proc.h>

#include <algorithm>
#include <charconv>

namespace tranche::training {

namespace {

/// The byte that each character represents, up to the last such character; -1: none.
std::array<int, 324> bytes_by_character() {
  std::array<int, 324> bytes{};
  bytes.fill(-1);
  std::size_t next = 256;
  for (std::size_t byte = 0; byte < 256; ++byte) {
    const bool visible = (byte >= 33 && byte <= 126) || (byte >= 161 && byte != 173);
    bytes[visible ? byte : next++] = static_cast<int>(byte);
  }
  return bytes;
}

std::uint64_t key_of(std::int32_t left, std::int32_t right) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 |
         static_cast<std::uint32_t>(right);
}

/// The first character and its number of bytes; -1 and one byte if it is not UTF-8.
std::pair<utf8proc_int32_t, std::size_t> first_character(std::string_view text) {
  utf8proc_int32_t character = -1;
  const utf8proc_ssize_t bytes = utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                                  static_cast<utf8proc_ssize_t>(text.size()), &character);
  if (bytes <= 0) return {-1, 1};
  return {character, static_cast<std::size_t>(bytes)};
}

/// True when `a` comes after `b`: the heap's front is the earliest merge, and among equal ones the leftmost.
bool later(const PairEncoding::Scratch::Candidate& a, const PairEncoding::Scratch::Candidate& b) {
  return a.rank != b.rank ? a.rank > b.rank : a.place > b.place;
}

}  // namespace

int byte_of_name(std::string_view text) {
  int byte = -1;
  if (text.size() != 6 || !text.starts_with("<0x") || text.back() != '>') return -1;
  const auto [end, error] = std::from_chars(text.data() + 3, text.data() + 5, byte, 16);
  return error == std::errc() && end == text.data() + 5 ? byte : -1;
}

std::string with_spaces(std::string_view text) {
  std::string spaced;
  for (std::size_t at = 0; at < text.size();) {
    const bool space = text.substr(at).starts_with(visible_space);
    spaced += space ? ' ' : text[at];
    at += space ? visible_space.size() : 1;
  }
  return spaced;
}

bool to_bytes(std::string_view visible, std::string& bytes) {
  static const std::array<int, 324> by_character = bytes_by_character();
  bytes.clear();
  while (!visible.empty()) {
    const auto [character, size] = first_character(visible);
    if (character < 0 || static_cast<std::size_t>(character) >= by_character.size()) return false;
    const int byte = by_character[static_cast<std::size_t>(character)];
    if (byte < 0) return false;
    bytes.push_back(static_cast<char>(byte));
    visible.remove_prefix(size);
  }
  return true;
}

bool PairEncoding::add_token(std::string_view text, std::int32_t token) {
  if (token >= vocabulary()) bytes_.resize(static_cast<std::size_t>(token) + 1);
  std::string& place = bytes_[static_cast<std::size_t>(token)];
  if (!place.empty()) return false;
  ++base_;
  std::string bytes;
  if (symbols_ == Symbols::bytes) {
    if (!to_bytes(text, bytes)) {
      place = text;  // the text of an added token; it matches no word
      never_words_.emplace(text, token);
      return true;
    }
    if (bytes.size() == 1) of_byte_[static_cast<unsigned char>(bytes[0])] = token;
    tokens_.emplace(bytes, token);
  } else {
    const int byte = byte_of_name(text);
    if (byte >= 0) of_byte_[static_cast<std::size_t>(byte)] = token;
    bytes = byte >= 0 ? std::string(1, static_cast<char>(byte)) : with_spaces(text);
    tokens_.emplace(text, token);
  }
  place = std::move(bytes);
  return true;
}

bool PairEncoding::add_special(std::string_view text, std::int32_t token) {
  if (token >= vocabulary()) bytes_.resize(static_cast<std::size_t>(token) + 1);
  std::string& place = bytes_[static_cast<std::size_t>(token)];
  std::string bytes;
  const bool same =
      place.empty() || place == text ||
      (symbols_ == Symbols::bytes ? to_bytes(text, bytes) && place == bytes : place == with_spaces(text));
  if (same) place = text;
  return same;
}

std::optional<std::int32_t> PairEncoding::find(std::string_view text) const {
  const auto found = tokens_.find(text);
  if (found == tokens_.end()) return std::nullopt;
  return found->second;
}

std::optional<std::int32_t> PairEncoding::token_of(std::string_view text) const {
  std::string bytes;
  if (symbols_ == Symbols::characters) return find(text);
  if (to_bytes(text, bytes)) return find(bytes);
  const auto found = never_words_.find(text);
  if (found == never_words_.end()) return std::nullopt;
  return found->second;
}

bool PairEncoding::add_merge(std::string_view left, std::string_view right) {
  std::string left_text(left), right_text(right);
  if (symbols_ == Symbols::bytes && (!to_bytes(left, left_text) || !to_bytes(right, right_text)))
    return false;
  const auto a = find(left_text), b = find(right_text), whole = find(left_text + right_text);
  if (!a || !b || !whole) return false;
  merges_.insert_or_assign(key_of(*a, *b), Merge{next_rank_++, *whole});
  return true;
}

int PairEncoding::byte_without_token() const {
  const auto* const missing = std::find(of_byte_.begin(), of_byte_.end(), -1);
  return missing == of_byte_.end() ? -1 : static_cast<int>(missing - of_byte_.begin());
}

std::string_view PairEncoding::bytes_of(std::int32_t token) const {
  if (token < 0 || token >= vocabulary()) return {};
  return bytes_[static_cast<std::size_t>(token)];
}

void PairEncoding::split(std::string_view word, Scratch& scratch) const {
  scratch.symbols.clear();
  const auto add = [&](std::int32_t token) {
    const auto place = static_cast<std::int32_t>(scratch.symbols.size());
    scratch.symbols.push_back({token, place - 1, place + 1});
  };
  for (std::size_t at = 0; at < word.size();) {
    std::size_t size = 1;
    std::optional<std::int32_t> token;
    if (symbols_ == Symbols::characters) {
      size = first_character(word.substr(at)).second;
      token = find(word.substr(at, size));
    }
    if (token) add(*token);
    for (std::size_t i = at; !token && i < at + size; ++i) {
      add(of_byte_[static_cast<unsigned char>(word[i])]);
    }
    at += size;
  }
  if (!scratch.symbols.empty()) scratch.symbols.back().after = -1;
}

void PairEncoding::push(std::int32_t place, Scratch& scratch) const {
  if (place < 0) return;
  const Scratch::Symbol& left = scratch.symbols[static_cast<std::size_t>(place)];
  if (left.after < 0) return;
  const auto found =
      merges_.find(key_of(left.token, scratch.symbols[static_cast<std::size_t>(left.after)].token));
  if (found == merges_.end()) return;
  scratch.heap.push_back({found->second.rank, place, found->second.token});
  std::push_heap(scratch.heap.begin(), scratch.heap.end(), later);
}

void PairEncoding::encode(std::string_view word, bool whole, Scratch& scratch,
                          std::vector<std::int32_t>& tokens) const {
  if (const auto token = whole ? find(word) : std::nullopt) {
    tokens.push_back(*token);
    return;
  }
  split(word, scratch);
  std::vector<Scratch::Symbol>& symbols = scratch.symbols;
  scratch.heap.clear();
  for (std::size_t i = 0; i + 1 < symbols.size(); ++i) push(static_cast<std::int32_t>(i), scratch);
  while (!scratch.heap.empty()) {
    std::pop_heap(scratch.heap.begin(), scratch.heap.end(), later);
    const Scratch::Candidate best = scratch.heap.back();
    scratch.heap.pop_back();
    Scratch::Symbol& left = symbols[static_cast<std::size_t>(best.place)];
    if (left.token < 0 || left.after < 0) continue;
    Scratch::Symbol& right = symbols[static_cast<std::size_t>(left.after)];
    // One of the two may have been merged with its other neighbour meanwhile.
    const auto found = merges_.find(key_of(left.token, right.token));
    if (found == merges_.end() || found->second.token != best.token) continue;
    left.token = best.token;
    left.after = right.after;
    right.token = -1;
    if (left.after >= 0) symbols[static_cast<std::size_t>(left.after)].before = best.place;
    push(left.before, scratch);
    push(best.place, scratch);
  }
  for (const Scratch::Symbol& symbol : symbols) {
    if (symbol.token >= 0) tokens.push_back(symbol.token);
  }
}

}  // namespace tranche::training
