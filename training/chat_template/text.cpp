#include "training/chat_template/text.h"

#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <array>

namespace tranche::training {

namespace {

/// The first character of a text, and its number of bytes; negative if it is not UTF-8.
utf8proc_ssize_t first_character(std::string_view text, utf8proc_int32_t& character) {
  return utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                          static_cast<utf8proc_ssize_t>(text.size()), &character);
}

/// True for a character that is printable according to Python's str.isprintable().
bool is_printable(utf8proc_int32_t character) {
  switch (utf8proc_get_property(character)->category) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
      return false;
    case UTF8PROC_CATEGORY_ZS:
      return character == ' ';
    default:
      return true;
  }
}

}  // namespace

std::size_t blank_bytes(std::string_view text) {
  utf8proc_int32_t character = -1;
  const utf8proc_ssize_t bytes = first_character(text, character);
  if (bytes <= 0) return 0;
  const utf8proc_property_t& property = *utf8proc_get_property(character);
  const bool blank =
      property.category == UTF8PROC_CATEGORY_ZS || property.bidi_class == UTF8PROC_BIDI_CLASS_WS ||
      property.bidi_class == UTF8PROC_BIDI_CLASS_B || property.bidi_class == UTF8PROC_BIDI_CLASS_S;
  return blank ? static_cast<std::size_t>(bytes) : 0;
}

std::string_view without_blanks(std::string_view text, bool front, bool behind) {
  while (front) {
    const std::size_t bytes = blank_bytes(text);
    if (bytes == 0) break;
    text.remove_prefix(bytes);
  }
  while (behind && !text.empty()) {
    std::size_t at = text.size();
    do --at;
    while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80);
    if (blank_bytes(text.substr(at)) != text.size() - at) break;
    text = text.substr(0, at);
  }
  return text;
}

namespace jinja {

std::size_t character_bytes(std::string_view text) {
  utf8proc_int32_t character = -1;
  return static_cast<std::size_t>(std::max<utf8proc_ssize_t>(1, first_character(text, character)));
}

std::size_t characters(std::string_view text) {
  return static_cast<std::size_t>(std::count_if(
      text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

bool is_ascii(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    utf8proc_int32_t character = -1;
    const utf8proc_ssize_t bytes = first_character(text, character);
    if (bytes <= 0) return false;
    text.remove_prefix(static_cast<std::size_t>(bytes));
  }
  return true;
}

bool append_character(std::string& text, std::uint32_t character) {
  if (character > 0x10FFFF || !utf8proc_codepoint_valid(static_cast<utf8proc_int32_t>(character)))
    return false;
  std::array<utf8proc_uint8_t, 4> bytes{};
  const utf8proc_ssize_t count = utf8proc_encode_char(static_cast<utf8proc_int32_t>(character), bytes.data());
  text.append(reinterpret_cast<const char*>(bytes.data()), static_cast<std::size_t>(count));
  return true;
}

std::string python_quoted(std::string_view text) {
  const bool has_single = text.find('\'') != std::string_view::npos;
  const char quote = has_single && text.find('"') == std::string_view::npos ? '"' : '\'';
  std::string result(1, quote);
  while (!text.empty()) {
    utf8proc_int32_t character = -1;
    const utf8proc_ssize_t bytes = first_character(text, character);
    const std::string_view own = text.substr(0, bytes <= 0 ? 1 : static_cast<std::size_t>(bytes));
    text.remove_prefix(own.size());
    if (character == quote || character == '\\') {
      result += '\\';
      result += own;
    } else if (character == '\n') {
      result += "\\n";
    } else if (character == '\r') {
      result += "\\r";
    } else if (character == '\t') {
      result += "\\t";
    } else if (bytes > 0 && is_printable(character)) {
      result += own;
    } else {
      const auto number = static_cast<std::uint32_t>(std::max(character, 0));
      result += number < 0x100     ? fmt::format("\\x{:02x}", number)
                : number < 0x10000 ? fmt::format("\\u{:04x}", number)
                                   : fmt::format("\\U{:08x}", number);
    }
  }
  return result + quote;
}

}  // namespace jinja
}  // namespace tranche::training
