#include "tranche/tools/text_stream.h"

#include "tranche/tools/terminal.h"

namespace tranche::tools {

namespace {

/// Bytes of the character that a byte begins; 1 for what begins none.
std::size_t length_of(unsigned char lead) {
  if (lead >= 0xf0 && lead < 0xf8) return 4;
  if (lead >= 0xe0 && lead < 0xf0) return 3;
  return lead >= 0xc2 && lead < 0xe0 ? 2 : 1;
}

bool continues(unsigned char byte) {
  return (byte & 0xc0) == 0x80;
}

/// Bytes at the end of the text that begin a character which more bytes may complete.
std::size_t open_end(std::string_view text) {
  for (std::size_t back = 1; back <= 3 && back <= text.size(); ++back) {
    const auto byte = static_cast<unsigned char>(text[text.size() - back]);
    if (!continues(byte)) return length_of(byte) > back ? back : 0;
  }
  return 0;
}

}  // namespace

void TextStream::add(std::string_view bytes) {
  held_ += bytes;
  flush(held_.size() - (terminal_ ? open_end(held_) : 0));
}

void TextStream::finish() {
  flush(held_.size());
}

void TextStream::flush(std::size_t bytes) {
  if (bytes == 0) return;
  const std::string ready = held_.substr(0, bytes);
  held_.erase(0, bytes);
  write_(terminal_ ? printable(ready) : ready);
}

}  // namespace tranche::tools
