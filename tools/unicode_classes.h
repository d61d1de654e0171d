#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace tranche::tools {

/// The class of a code point for the splitting of text in words: general categories L* and N*, White_Space,
/// the rest; of Unicode 14.
enum class CharacterClass : std::uint8_t { letter, number, space, other };
CharacterClass class_of(char32_t character);

/// The first character of UTF-8 text that is not empty, and its bytes; a byte that begins none is U+FFFD of
/// one byte.
struct Decoded {
  char32_t character = 0;
  std::size_t bytes = 1;
};
Decoded decode_utf8(std::string_view text);
/// A character as UTF-8.
void append_utf8(char32_t character, std::string& text);

}  // namespace tranche::tools
