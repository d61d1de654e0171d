#include "tools/byte_pair_encoding.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <sstream>

#include "core/json_node.h"
#include "core/text_file.h"
#include "tools/unicode_classes.h"
#include "tranche/core/error.h"

namespace tranche::tools {

namespace {

constexpr std::string_view end_of_text = "<|endoftext|>";

/// The visible characters that stand for bytes in both files: printable bytes for themselves, the others for
/// U+0100 onward in order.
std::array<char32_t, 256> byte_characters() {
  std::array<char32_t, 256> characters{};
  char32_t next = 256;
  for (char32_t byte = 0; byte < 256; ++byte) {
    const bool visible = (byte >= 33 && byte <= 126) || (byte >= 161 && byte != 173);
    characters[byte] = visible ? byte : next++;
  }
  return characters;
}

class Alphabet {
 public:
  Alphabet() {
    const std::array<char32_t, 256> characters = byte_characters();
    for (std::size_t byte = 0; byte < 256; ++byte) bytes_.emplace(characters[byte], static_cast<char>(byte));
  }
  /// False when a character stands for no byte.
  bool to_bytes(std::string_view visible, std::string& bytes) const {
    bytes.clear();
    while (!visible.empty()) {
      const Decoded decoded = decode_utf8(visible);
      const auto found = bytes_.find(decoded.character);
      if (found == bytes_.end()) return false;
      bytes.push_back(found->second);
      visible.remove_prefix(decoded.bytes);
    }
    return true;
  }

 private:
  std::unordered_map<char32_t, char> bytes_;
};

std::uint64_t key_of(std::int32_t left, std::int32_t right) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 |
         static_cast<std::uint32_t>(right);
}

CharacterClass class_at(std::string_view text, std::size_t at) {
  return class_of(decode_utf8(text.substr(at)).character);
}

/// The end of the run of characters of one class that begins at `at`.
std::size_t end_of_run(std::string_view text, std::size_t at) {
  const CharacterClass run = class_at(text, at);
  while (at < text.size()) {
    const Decoded next = decode_utf8(text.substr(at));
    if (class_of(next.character) != run) break;
    at += next.bytes;
  }
  return at;
}

std::size_t end_of_contraction(std::string_view text, std::size_t at) {
  for (const std::string_view ending : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"}) {
    if (text.substr(at).starts_with(ending)) return at + ending.size();
  }
  return at;
}

/// All of the spaces that begin at `at`, but for the last when a word follows them and they are several.
std::size_t end_of_spaces(std::string_view text, std::size_t at) {
  const std::size_t end = end_of_run(text, at);
  if (end == text.size()) return end;
  std::size_t last = at;
  for (std::size_t next = at; next < end; next += decode_utf8(text.substr(next)).bytes) last = next;
  return last > at ? last : end;
}

}  // namespace

std::vector<std::string_view> split_words(std::string_view text) {
  std::vector<std::string_view> words;
  for (std::size_t at = 0; at < text.size();) {
    std::size_t end = end_of_contraction(text, at);
    if (end == at && class_at(text, at) != CharacterClass::space) {
      end = end_of_run(text, at);
    } else if (end == at && text[at] == ' ' && at + 1 < text.size() &&
               class_at(text, at + 1) != CharacterClass::space) {
      end = end_of_run(text, at + 1);
    } else if (end == at) {
      end = end_of_spaces(text, at);
    }
    words.push_back(text.substr(at, end - at));
    at = end;
  }
  return words;
}

BytePairEncoding::BytePairEncoding(std::string_view vocabulary_json, std::string_view merges,
                                   std::string_view origin)
    : of_byte_(256, -1) {
  const auto refuse = [&](const std::string& what) {
    throw ConfigurationError(fmt::format("{}: {}", origin, what));
  };
  const detail::JsonNode vocabulary =
      detail::JsonNode::read<ConfigurationError>(vocabulary_json, fmt::format("{}: vocab.json", origin));
  const Alphabet alphabet;
  std::unordered_map<std::string, std::int32_t> tokens;
  std::string bytes;
  constexpr std::int32_t most = (1 << 24) - 1;
  for (const auto& [visible, number] : vocabulary.members()) {
    const auto token = number.integer<std::int32_t>(0, most);
    if (!alphabet.to_bytes(visible, bytes)) bytes = visible;  // added tokens are written as they are
    if (visible == end_of_text) end_of_text_ = token;
    if (static_cast<std::size_t>(token) >= bytes_.size()) bytes_.resize(static_cast<std::size_t>(token) + 1);
    std::string& place = bytes_[static_cast<std::size_t>(token)];
    if (!place.empty()) refuse(fmt::format("vocab.json: two tokens have the number {}", token));
    place = bytes;
    tokens.emplace(bytes, token);
    if (bytes.size() == 1) of_byte_[static_cast<unsigned char>(bytes[0])] = token;
  }
  for (std::size_t byte = 0; byte < of_byte_.size(); ++byte) {
    if (of_byte_[byte] < 0) refuse(fmt::format("vocab.json: byte {} has no token", byte));
  }
  std::istringstream lines{std::string(merges)};
  std::string line;
  for (std::int32_t number = 1; std::getline(lines, line); ++number) {
    if (line.ends_with('\r')) line.pop_back();
    if (line.empty() || (number == 1 && line.starts_with("#version"))) continue;
    const std::size_t blank = line.find(' ');
    const auto token_of = [&](std::string_view visible) {
      if (!alphabet.to_bytes(visible, bytes)) return -1;
      const auto found = tokens.find(bytes);
      return found == tokens.end() ? -1 : found->second;
    };
    const std::int32_t left = blank == std::string::npos ? -1 : token_of(line.substr(0, blank));
    const std::int32_t right = blank == std::string::npos ? -1 : token_of(line.substr(blank + 1));
    const auto whole =
        left < 0 || right < 0
            ? tokens.end()
            : tokens.find(bytes_[static_cast<std::size_t>(left)] + bytes_[static_cast<std::size_t>(right)]);
    if (whole == tokens.end()) {
      refuse(fmt::format("merges.txt, line {}: '{}' is not two tokens whose union is one in vocab.json",
                         number, line));
    }
    merges_.emplace(key_of(left, right), Merge{number, whole->second});
  }
}

bool BytePairEncoding::is_in(const std::string& folder) {
  std::error_code none;
  return std::filesystem::is_regular_file(folder + "/vocab.json", none) &&
         std::filesystem::is_regular_file(folder + "/merges.txt", none);
}

BytePairEncoding BytePairEncoding::load(const std::string& folder) {
  constexpr const char* what = "tokenizer file";
  return {detail::read_text_file(folder + "/vocab.json", what),
          detail::read_text_file(folder + "/merges.txt", what), folder};
}

void BytePairEncoding::encode_word(std::string_view word, std::vector<std::int32_t>& tokens) const {
  std::vector<std::int32_t> parts;
  for (const char c : word) parts.push_back(of_byte_[static_cast<unsigned char>(c)]);
  while (parts.size() > 1) {
    // The pair that was merged first when the tokens were made, everywhere in the word.
    const Merge* best = nullptr;
    std::pair<std::int32_t, std::int32_t> pair;
    for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
      const auto found = merges_.find(key_of(parts[i], parts[i + 1]));
      if (found == merges_.end() || (best != nullptr && best->rank <= found->second.rank)) continue;
      best = &found->second;
      pair = {parts[i], parts[i + 1]};
    }
    if (best == nullptr) break;
    std::size_t to = 0;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const bool merges = i + 1 < parts.size() && parts[i] == pair.first && parts[i + 1] == pair.second;
      parts[to++] = merges ? best->token : parts[i];
      if (merges) ++i;
    }
    parts.resize(to);
  }
  tokens.insert(tokens.end(), parts.begin(), parts.end());
}

std::vector<std::int32_t> BytePairEncoding::encode(std::string_view text) const {
  std::vector<std::int32_t> tokens;
  while (!text.empty()) {
    const std::size_t mark = end_of_text_ >= 0 ? text.find(end_of_text) : std::string_view::npos;
    for (const std::string_view word : split_words(text.substr(0, mark))) encode_word(word, tokens);
    if (mark == std::string_view::npos) break;
    tokens.push_back(end_of_text_);
    text.remove_prefix(mark + end_of_text.size());
  }
  return tokens;
}

std::string_view BytePairEncoding::decode(std::int32_t token) const {
  if (token < 0 || static_cast<std::size_t>(token) >= bytes_.size()) return {};
  return bytes_[static_cast<std::size_t>(token)];
}

std::string BytePairEncoding::decode(std::span<const std::int32_t> tokens) const {
  std::string text;
  for (const std::int32_t token : tokens) text += decode(token);
  return text;
}

}  // namespace tranche::tools
