#include "core/printable.h"

#include <fmt/format.h>

#include <cerrno>
#include <iterator>

namespace tranche::detail {

namespace {

/// The character at the beginning of a text.
struct Character {
  enum class Kind { whole, cut, invalid };
  Kind kind;
  std::size_t bytes;  ///< of a complete character
  unsigned code;      ///< of a complete character
};

Character first_character(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned>(static_cast<unsigned char>(text[i])); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return {Character::Kind::whole, 1, lead};
  if (lead < 0xc2 || lead > 0xf4) return {Character::Kind::invalid, 0, 0};
  const std::size_t length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  unsigned code = lead & (0x7f >> length);
  for (std::size_t i = 1; i < length; ++i) {
    if (i == text.size()) return {Character::Kind::cut, 0, 0};
    // The second byte's lower bound excludes overlong forms, surrogates and numbers beyond the last code
    // point.
    const unsigned least = i > 1 ? 0x80 : lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    const unsigned most = i > 1 ? 0xbf : lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    if (byte(i) < least || byte(i) > most) return {Character::Kind::invalid, 0, 0};
    code = code << 6 | (byte(i) & 0x3f);
  }
  return {Character::Kind::whole, length, code};
}

bool can_be_seen(unsigned code) {
  if (code < 0x20) return code == '\n' || code == '\t';
  const bool control = code >= 0x7f && code <= 0x9f;
  const bool turns = (code >= 0x202a && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069);
  return !control && !turns;
}

/// Appends `text` in printable form; returns the bytes of an incomplete character at its end.
std::string_view append_printable(std::string& out, std::string_view text) {
  while (!text.empty()) {
    const Character character = first_character(text);
    if (character.kind == Character::Kind::cut) return text;
    std::size_t bytes = 1;
    if (character.kind == Character::Kind::invalid) {
      fmt::format_to(std::back_inserter(out), "\\x{:02x}", static_cast<unsigned char>(text[0]));
    } else if (bytes = character.bytes; can_be_seen(character.code)) {
      out += text.substr(0, bytes);
    } else {
      fmt::format_to(std::back_inserter(out), "\\u{:04x}", character.code);
    }
    text.remove_prefix(bytes);
  }
  return {};
}

/// Appends the bytes of a character that stays incomplete.
void append_bytes(std::string& out, std::string_view cut) {
  for (const char byte : cut) {
    fmt::format_to(std::back_inserter(out), "\\x{:02x}", static_cast<unsigned char>(byte));
  }
}

}  // namespace

std::string printable(std::string_view text) {
  std::string out;
  append_bytes(out, append_printable(out, text));
  return out;
}

PrintableBuffer::~PrintableBuffer() {
  write_unchanged({});
}

bool PrintableBuffer::pass(std::string_view text) {
  errno = 0;
  const auto size = static_cast<std::streamsize>(text.size());
  if (to_.sputn(text.data(), size) == size) return true;
  if (error_ == 0) error_ = errno != 0 ? errno : EIO;
  return false;
}

bool PrintableBuffer::write_unchanged(std::string_view text) {
  std::string out;
  append_bytes(out, held_);
  held_.clear();
  return pass(out += text);
}

std::string_view whole_characters(std::string_view text, std::size_t most_bytes) {
  if (text.size() <= most_bytes) return text;
  std::size_t end = most_bytes;
  while (end > 0 && most_bytes - end < 3 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  return text.substr(0, end);
}

std::streamsize PrintableBuffer::xsputn(const char* text, std::streamsize size) {
  held_.append(text, static_cast<std::size_t>(size));
  std::string out;
  held_ = std::string(append_printable(out, held_));
  return pass(out) ? size : 0;
}

PrintableBuffer::int_type PrintableBuffer::overflow(int_type character) {
  if (traits_type::eq_int_type(character, traits_type::eof())) return traits_type::not_eof(character);
  const char byte = traits_type::to_char_type(character);
  return xsputn(&byte, 1) == 1 ? character : traits_type::eof();
}

int PrintableBuffer::sync() {
  errno = 0;
  if (to_.pubsync() == 0) return 0;
  if (error_ == 0) error_ = errno != 0 ? errno : EIO;
  return -1;
}

void write_unchanged(std::ostream& out, std::string_view text) {
  auto* const buffer = dynamic_cast<PrintableBuffer*>(out.rdbuf());
  if (buffer == nullptr) {
    out << text;
  } else if (out && !buffer->write_unchanged(text)) {
    out.setstate(std::ios::badbit);
  }
}

}  // namespace tranche::detail
