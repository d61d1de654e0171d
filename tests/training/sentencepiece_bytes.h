#pragma once
/// Small SentencePiece models, written field by field as bytes.

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tranche::training::test {

inline std::string varint(std::uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes += static_cast<char>(value | 0x80);
  return bytes + static_cast<char>(value);
}
inline std::string field(unsigned id, std::uint64_t value) {
  return varint(id << 3) + varint(value);
}
inline std::string field(unsigned id, std::string_view bytes) {
  return varint(id << 3 | 2) + varint(bytes.size()) + std::string(bytes);
}
/// Types are 1 normal, 2 unknown, 3 control, 4 user-defined, 6 byte.
inline std::string piece(std::string_view text, float score, unsigned type = 1) {
  std::string number;
  for (unsigned shift = 0; shift < 32; shift += 8)
    number += static_cast<char>(std::bit_cast<std::uint32_t>(score) >> shift);
  return field(1, field(1, text) + varint(2 << 3 | 5) + number + field(3, type));
}

struct SmallModel {
  /// Pieces 0 to 2 are "<unk>", "<s>" and "</s>"; then follow these control pieces, 256 bytes, words,
  /// letters, a space, and user-defined pieces.
  std::vector<std::string> control{"[INST]"}, user_defined;
  unsigned byte_pieces = 256;
  std::vector<std::string> words{"\u2581h", "he",         "ll",    "\u2581he",
                                 "hell",    "\u2581hell", "hello", "\u2581hello"};
  std::string letters = "abcdefghijklmnopqrstuvwxyz<>/[]INST|_";
  std::string trainer = field(3, 2) + field(35, 1), normalizer = field(1, "identity") + field(4, 0);

  std::string bytes() const {
    std::string all = piece("<unk>", 0, 2) + piece("<s>", 0, 3) + piece("</s>", 0, 3);
    for (const std::string& name : control) all += piece(name, 0, 3);
    for (unsigned byte = 0; byte < byte_pieces; ++byte) {
      constexpr std::string_view digits = "0123456789ABCDEF";
      all += piece(std::string("<0x") + digits[byte / 16] + digits[byte % 16] + ">", 0, 6);
    }
    float score = 0;
    for (const std::string& word : words) all += piece(word, score -= 1);
    std::string seen;
    for (const char letter : letters) {
      if (seen.find(letter) == std::string::npos) all += piece(std::string(1, letter), score -= 1);
      seen += letter;
    }
    all += piece("\u2581", score - 1);
    for (const std::string& name : user_defined) all += piece(name, 0, 4);
    return all + field(2, trainer) + field(3, normalizer);
  }
};

}  // namespace tranche::training::test
