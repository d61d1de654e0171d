#include "core/printable.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string_view>
#include <vector>

namespace tranche {
namespace {

using detail::printable;
using detail::PrintableBuffer;
using detail::whole_characters;
using detail::write_unchanged;

TEST(Printable, KeepsLettersOfAllWritings) {
  for (const char* text :
       {"", "a\tb\nc", "caf\u00e9 \u20ac \u4e2d\u6587 \u05d0\u0628 \U0001f600", "\\x1b \\u001b"}) {
    EXPECT_EQ(printable(text), text);
  }
}

TEST(Printable, ShowsControlCharacters) {
  EXPECT_EQ(printable("\x1b]52;c;aGk=\x07\x1b[2J"), "\\u001b]52;c;aGk=\\u0007\\u001b[2J");
  EXPECT_EQ(printable("done\rnot "), "done\\u000dnot ");
  EXPECT_EQ(printable(std::string_view("a\0b\x7f", 4)), "a\\u0000b\\u007f");
  EXPECT_EQ(printable("\u0080\u009b31m\u009f\u00a0"), "\\u0080\\u009b31m\\u009f\u00a0") << "C1";
}

TEST(Printable, ShowsWhatTurnsTheDirectionOfWriting) {
  EXPECT_EQ(printable("\u2029\u202a\u202e\u202f"), "\u2029\\u202a\\u202e\u202f");
  EXPECT_EQ(printable("\u2065\u2066\u2069\u206a"), "\u2065\\u2066\\u2069\u206a");
}

TEST(Printable, ShowsBytesThatAreNoUtf8) {
  EXPECT_EQ(printable("x\xffy\x80"), "x\\xffy\\x80");
  EXPECT_EQ(printable("\xc0\x9b"), "\\xc0\\x9b") << "a longer form of an escape";
  EXPECT_EQ(printable("\xe0\x82\x9b"), "\\xe0\\x82\\x9b");
  EXPECT_EQ(printable("\xf0\x80\x82\x9b"), "\\xf0\\x80\\x82\\x9b");
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80") << "a surrogate";
  EXPECT_EQ(printable("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80") << "beyond the last character";
  EXPECT_EQ(printable("a\xe2\x82"), "a\\xe2\\x82") << "cut";
  EXPECT_EQ(printable("\xe2\x1b[2J"), "\\xe2\\u001b[2J") << "nothing hides behind a lead byte";
  EXPECT_EQ(printable("\xed\x9f\xbf\xf4\x8f\xbf\xbf"), "\xed\x9f\xbf\xf4\x8f\xbf\xbf")
      << "the last valid ones";
}

TEST(Printable, JsonStaysTheSameJson) {
  const nlohmann::json value = {{"name\x1b[2J\x7f", "\u009b \u202e \n caf\u00e9"}};
  const std::string shown = printable(value.dump());
  EXPECT_EQ(nlohmann::json::parse(shown), value);
  EXPECT_EQ(shown.find("\u202e"), std::string::npos);
}

TEST(Printable, ATextIsCutBetweenCharacters) {
  const std::string_view text = "a\xc3\xa9\xe2\x82\xac";
  const std::vector<std::size_t> cuts{0, 1, 1, 3, 3, 3, 6, 6};
  for (std::size_t most = 0; most < cuts.size(); ++most)
    EXPECT_EQ(whole_characters(text, most), text.substr(0, cuts[most])) << most;
  EXPECT_EQ(whole_characters("\x80\x80\x80\x80\x80\x80", 5).size(), 2u) << "no UTF-8";
}

TEST(PrintableBuffer, CharactersMayComeByteByByte) {
  std::ostringstream to;
  {
    PrintableBuffer buffer(*to.rdbuf());
    std::ostream out(&buffer);
    for (const char byte : std::string("\u00e9\u20ac\U0001f600\x1b\xff.\xe2\x82")) out << byte << std::flush;
    EXPECT_EQ(to.str(), "\u00e9\u20ac\U0001f600\\u001b\\xff.");
    EXPECT_TRUE(out.good());
    EXPECT_EQ(buffer.error(), 0);
  }
  EXPECT_EQ(to.str(), "\u00e9\u20ac\U0001f600\\u001b\\xff.\\xe2\\x82") << "at the end at the latest";
}

TEST(PrintableBuffer, AProgramsOwnCodesPass) {
  std::ostringstream to;
  PrintableBuffer buffer(*to.rdbuf());
  std::ostream out(&buffer);
  out << "a\xe2";
  write_unchanged(out, "\r\xff");
  out << "\rb";
  EXPECT_EQ(to.str(), "a\\xe2\r\xff\\u000db");
  std::ostringstream plain;
  write_unchanged(plain, "\x1b");
  EXPECT_EQ(plain.str(), "\x1b");
}

/// A buffer with room for only a few bytes.
class FullBuffer : public std::streambuf {
 protected:
  std::streamsize xsputn(const char*, std::streamsize size) override {
    if (size <= room_) return room_ -= static_cast<int>(size), size;
    errno = ENOSPC;
    return 0;
  }
  int sync() override { return errno = EDQUOT, -1; }

 private:
  int room_ = 3;
};

TEST(PrintableBuffer, KeepsTheFirstFailure) {
  FullBuffer full;
  PrintableBuffer buffer(full);
  std::ostream out(&buffer);
  out << "abc";
  EXPECT_EQ(buffer.error(), 0);
  out << "d" << std::flush;
  EXPECT_TRUE(out.bad());
  EXPECT_EQ(buffer.error(), ENOSPC);
  FullBuffer lost;
  PrintableBuffer flushed(lost);
  std::ostream late(&flushed);
  late << "a" << std::flush;
  EXPECT_TRUE(late.bad());
  EXPECT_EQ(flushed.error(), EDQUOT);
  PrintableBuffer bytes(full);
  std::ostream unchanged(&bytes);
  write_unchanged(unchanged, "x");
  EXPECT_TRUE(unchanged.bad());
  EXPECT_EQ(bytes.error(), ENOSPC);
}

}  // namespace
}  // namespace tranche
