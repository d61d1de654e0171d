#include "tranche/tools/text_stream.h"

#include <gtest/gtest.h>

#include <vector>

namespace tranche::tools {
namespace {

/// What is written when the bytes come one at a time.
std::vector<std::string> written(bool terminal, const std::string& bytes) {
  std::vector<std::string> pieces;
  TextStream stream(terminal, [&](std::string_view text) { pieces.emplace_back(text); });
  for (const char byte : bytes) stream.add({&byte, 1});
  stream.finish();
  return pieces;
}

using Pieces = std::vector<std::string>;

TEST(TextStream, FilesGetBytesAsTheyAre) {
  EXPECT_EQ(written(false, "a\xc3\x07"), (Pieces{"a", "\xc3", "\x07"}));
}

TEST(TextStream, TerminalsGetWholeCharacters) {
  EXPECT_EQ(written(true, "a\u00e9\u20ac\U0001f600."), (Pieces{"a", "\u00e9", "\u20ac", "\U0001f600", "."}));
}

TEST(TextStream, TerminalsGetNothingThatWouldConfuseThem) {
  EXPECT_EQ(written(true, "\x1b[2J\n"), (Pieces{"?", "[", "2", "J", "\n"}));
  EXPECT_EQ(written(true, "\xff"), (Pieces{"\ufffd"}));
  EXPECT_EQ(written(true, "\x80z"), (Pieces{"\ufffd", "z"}));
}

TEST(TextStream, CharactersThatDoNotEndAreToldAsSuch) {
  const auto joined = [](const Pieces& pieces) {
    std::string all;
    for (const std::string& piece : pieces) all += piece;
    return all;
  };
  EXPECT_EQ(joined(written(true, "a\xe2\x82")).substr(0, 4), "a\ufffd");
  EXPECT_EQ(joined(written(true, "\xf0\x9f b")).substr(0, 3), "\ufffd");
  EXPECT_TRUE(joined(written(true, "\xf0\x9f b")).ends_with(" b"));
}

TEST(TextStream, SeveralBytesAtOnce) {
  std::string all;
  TextStream stream(true, [&](std::string_view text) { all += text; });
  stream.add("na\xc3");
  EXPECT_EQ(all, "na");
  stream.add("\xafve");
  stream.finish();
  EXPECT_EQ(all, "na\u00efve");
}

}  // namespace
}  // namespace tranche::tools
