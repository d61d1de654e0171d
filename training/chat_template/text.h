#pragma once
/// Texts in UTF-8 as Python treats them: sequences of characters.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tranche::training {

/// The bytes of the blank with which a text begins, by Python's str.isspace(); 0 if there is none.
std::size_t blank_bytes(std::string_view text);
/// The text without blanks at its begin or end.
std::string_view without_blanks(std::string_view text, bool front = true, bool behind = true);

namespace jinja {

/// The bytes of a text's first character; 1 for a byte that is not UTF-8.
std::size_t character_bytes(std::string_view text);
/// The number of characters of a text.
std::size_t characters(std::string_view text);
bool is_ascii(std::string_view text);
bool is_utf8(std::string_view text);
/// Appends a character as UTF-8. Returns false if it does not exist.
bool append_character(std::string& text, std::uint32_t character);
/// The result of Python's repr() for a text.
std::string python_quoted(std::string_view text);

}  // namespace jinja
}  // namespace tranche::training
