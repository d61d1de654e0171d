#include "tools/text_layout.h"

#include <gtest/gtest.h>

namespace tranche::tools {
namespace {

TEST(TextLayout, WordsGoToTheNextLineWhereTheWidthEnds) {
  const std::string word(40, 'x');
  EXPECT_EQ(wrapped(word + " " + word + " " + word, 0, 4), word + " " + word + "\n    " + word);
  EXPECT_EQ(wrapped(word + " " + word, 19, 4), word + " " + word) << "100 columns are a whole line";
  EXPECT_EQ(wrapped(word + " " + word, 20, 4), word + "\n    " + word);
}

TEST(TextLayout, ALongWordHasALineOfItsOwn) {
  const std::string word(120, 'x');
  EXPECT_EQ(wrapped("a " + word + " b", 0, 2), "a\n  " + word + "\n  b");
  EXPECT_EQ(wrapped(word, 30, 30), word) << "there is nothing to put on the line above it";
}

TEST(TextLayout, LineBreaksStayAndBlanksDoNotCount) {
  EXPECT_EQ(wrapped("a  b\nc", 0, 2), "a b\n  c");
  EXPECT_EQ(wrapped("", 10, 2), "");
}

}  // namespace
}  // namespace tranche::tools
