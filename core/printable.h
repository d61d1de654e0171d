#pragma once
/// Text with everything visible that a terminal would take for a command.

#include <cstddef>
#include <ios>
#include <ostream>
#include <streambuf>
#include <string>
#include <string_view>

namespace tranche::detail {

/// UTF-8 text for people. Newline, tab and what can be seen stay. Other control characters (C0, DEL, C1) and
/// those that turn the direction of writing become "\u001b", so that JSON stays the same JSON; bytes that are
/// no UTF-8 become "\xff".
std::string printable(std::string_view text);

/// The beginning of a text in UTF-8, of at most so many bytes, that cuts no character.
std::string_view whole_characters(std::string_view text, std::size_t most_bytes);

/// Passes text on to another buffer as printable() makes it. A character whose bytes come in several writes
/// passes when it is whole.
class PrintableBuffer final : public std::streambuf {
 public:
  /// `to` has to outlive this.
  explicit PrintableBuffer(std::streambuf& to) : to_(to) {}
  /// Passes on what there is of a character that did not end.
  ~PrintableBuffer() override;
  /// errno of the first write or flush that failed; 0 while none has.
  int error() const noexcept { return error_; }
  /// Passes text on as it is. Returns whether that went well.
  bool write_unchanged(std::string_view text);

 protected:
  int_type overflow(int_type character) override;
  std::streamsize xsputn(const char* text, std::streamsize size) override;
  int sync() override;

 private:
  bool pass(std::string_view text);
  std::streambuf& to_;
  std::string held_;  ///< the beginning of a character
  int error_ = 0;
};

/// Writes text to a stream of a PrintableBuffer as it is, and to any other stream as that does: for a
/// program's own codes, and for bytes that are no text.
void write_unchanged(std::ostream& out, std::string_view text);

}  // namespace tranche::detail
