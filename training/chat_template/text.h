#pragma once
/// Texts in UTF-8 as Python sees them: a row of characters.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tranche::training {

/// The bytes of the blank that a text begins with, by Python's str.isspace(); 0: it begins with none.
std::size_t blank_bytes(std::string_view text);
/// The text without blanks in front or behind.
std::string_view without_blanks(std::string_view text, bool front = true, bool behind = true);

namespace jinja {

/// The bytes of the character that a text begins with; 1 for a byte that is no UTF-8.
std::size_t character_bytes(std::string_view text);
/// How many characters a text has.
std::size_t characters(std::string_view text);
bool is_ascii(std::string_view text);
bool is_utf8(std::string_view text);
/// Writes a character as UTF-8. False where there is no such character.
bool append_character(std::string& text, std::uint32_t character);
/// A text as Python's repr() writes it.
std::string python_quoted(std::string_view text);

}  // namespace jinja
}  // namespace tranche::training
