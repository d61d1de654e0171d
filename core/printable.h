#pragma once
/// Text in which everything is visible that a terminal would interpret as a command.

#include <cstddef>
#include <ios>
#include <ostream>
#include <streambuf>
#include <string>
#include <string_view>

namespace tranche::detail {

/// Makes UTF-8 text safe to print. Newline, tab and visible characters stay. Other control characters (C0,
/// DEL, C1) and characters that turn the writing direction become "\u001b", which keeps JSON's meaning; bytes
/// that are not UTF-8 become "\xff".
std::string printable(std::string_view text);

/// The longest beginning of a text in UTF-8 that has at most so many bytes and cuts no character.
std::string_view whole_characters(std::string_view text, std::size_t most_bytes);

/// Forwards text to another buffer in the form of printable(). A character whose bytes come in several writes
/// is forwarded when it is complete.
class PrintableBuffer final : public std::streambuf {
 public:
  /// `to` has to outlive this.
  explicit PrintableBuffer(std::streambuf& to) : to_(to) {}
  /// Forwards the bytes of an incomplete character.
  ~PrintableBuffer() override;
  /// errno of the first write or flush that failed; 0 while none has.
  int error() const noexcept { return error_; }
  /// Forwards text unchanged. Returns true on success.
  bool write_unchanged(std::string_view text);

 protected:
  int_type overflow(int_type character) override;
  std::streamsize xsputn(const char* text, std::streamsize size) override;
  int sync() override;

 private:
  bool pass(std::string_view text);
  std::streambuf& to_;
  std::string held_;  ///< the beginning of an incomplete character
  int error_ = 0;
};

/// Writes text unchanged, to a stream with a PrintableBuffer or any other stream: for a program's own escape
/// codes, and for bytes that are not text.
void write_unchanged(std::ostream& out, std::string_view text);

}  // namespace tranche::detail
