#include "tools/byte_pair_encoding.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "tests/tools/temporary.h"
#include "tools/unicode_classes.h"
#include "tranche/core/error.h"
#include "tranche/core/random.h"

namespace tranche::tools {
namespace {

using test::message_of;
using testing::ElementsAre;
using testing::HasSubstr;

/// The character that stands for a byte in the files: GPT-2 keeps printable ones and counts the others up
/// from U+0100.
std::string visible(const std::string& bytes) {
  std::string text;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    const auto printable = [](unsigned b) { return (b > 32 && b < 127) || (b > 160 && b < 256 && b != 173); };
    char32_t character = byte;
    if (!printable(byte)) {
      character = 256;
      for (unsigned b = 0; b < byte; ++b) character += printable(b) ? 0 : 1;
    }
    append_utf8(character, text);
  }
  return text;
}

/// Tokens 0 to 255 are the bytes; then the merges in order, then "<|endoftext|>".
struct Files {
  std::vector<std::pair<std::string, std::string>> merges{{"h", "e"},    {"l", "l"},      {"he", "ll"},
                                                          {"hell", "o"}, {" ", "w"},      {" w", "o"},
                                                          {"o", "o"},    {"\xc3", "\xa9"}};
  nlohmann::json vocabulary = nlohmann::json::object();
  std::string merges_text = "#version: 0.2\n";

  Files() {
    for (int byte = 0; byte < 256; ++byte) vocabulary[visible({static_cast<char>(byte)})] = byte;
    int token = 256;
    for (const auto& [left, right] : merges) {
      vocabulary[visible(left + right)] = token++;
      merges_text += visible(left) + " " + visible(right) + "\n";
    }
    vocabulary["<|endoftext|>"] = token;
  }
  BytePairEncoding encoding() const { return {vocabulary.dump(), merges_text, "folder"}; }
};

TEST(BytePairEncoding, MergesInTheOrderOfTheFile) {
  const BytePairEncoding encoding = Files().encoding();
  EXPECT_EQ(encoding.vocabulary(), 265);
  EXPECT_THAT(encoding.encode("hello"), ElementsAre(259));
  EXPECT_THAT(encoding.encode("hell"), ElementsAre(258));
  EXPECT_THAT(encoding.encode("hello wool"), ElementsAre(259, 261, 'o', 'l'));
  EXPECT_THAT(encoding.encode("oooo"), ElementsAre(262, 262)) << "from the left";
  EXPECT_THAT(encoding.encode("ooo"), ElementsAre(262, 'o'));
  EXPECT_THAT(encoding.encode("h e"), ElementsAre('h', ' ', 'e')) << "not over words";
  EXPECT_THAT(encoding.encode("caf\u00e9"), ElementsAre('c', 'a', 'f', 263));
  EXPECT_THAT(encoding.encode(""), ElementsAre());
}

TEST(BytePairEncoding, TheEndOfTextIsOneToken) {
  EXPECT_THAT(Files().encoding().encode("a<|endoftext|>b<|endoftext|>"), ElementsAre('a', 264, 'b', 264));
  Files without;
  without.vocabulary.erase("<|endoftext|>");
  EXPECT_EQ(without.encoding().encode("<|endoftext|>").size(), 13u);
}

TEST(BytePairEncoding, DecodesWhatItEncodedWhateverTheBytes) {
  const BytePairEncoding encoding = Files().encoding();
  for (std::uint64_t round = 0; round < 200; ++round) {
    std::string text;
    for (std::uint64_t i = 0; i < round; ++i) {
      const double draw = random_uniform({round, RandomPurpose::sampling, 0}, i);
      text.push_back(round % 2 == 0 ? static_cast<char>(draw * 256)
                                    : "hello wo' s\n9"[static_cast<int>(draw * 13)]);
    }
    EXPECT_EQ(encoding.decode(encoding.encode(text)), text) << "round " << round;
  }
  EXPECT_EQ(encoding.decode(-1), "");
  EXPECT_EQ(encoding.decode(265), "");
}

TEST(BytePairEncoding, WordsAreThoseOfThePattern) {
  const auto words = [](std::string_view text) {
    std::string joined;
    for (const std::string_view word : split_words(text)) joined += "[" + std::string(word) + "]";
    return joined;
  };
  EXPECT_EQ(words("It's 12 o'clock, isn't it?"), "[It]['s][ 12][ o]['][clock][,][ isn]['t][ it][?]");
  EXPECT_EQ(words("we'll they've I'd I'm you're 'S"),
            "[we]['ll][ they]['ve][ I]['d][ I]['m][ you]['re][ '][S]");
  EXPECT_EQ(words("a  b   c"), "[a][ ][ b][  ][ c]");
  EXPECT_EQ(words("a\n\nb \n c  "), "[a][\n][\n][b][ \n][ c][  ]");
  EXPECT_EQ(words("x1y22z"), "[x][1][y][22][z]");
  EXPECT_EQ(words("!'s"), "[!'][s]");
  EXPECT_EQ(words("na\u00efve \u4e2d\u6587\u0663\u00b2"), "[na\u00efve][ \u4e2d\u6587][\u0663\u00b2]");
  EXPECT_EQ(words("a\u00a0b\u3000"), "[a][\u00a0][b][\u3000]");
  EXPECT_EQ(words("\xff\xfe"
                  "a"),
            "[\xff\xfe][a]");
}

TEST(BytePairEncoding, FilesThatAreWrong) {
  const auto refused = [](const std::function<void(Files&)>& change) {
    Files files;
    change(files);
    return message_of<ConfigurationError>([&] { (void)files.encoding(); });
  };
  EXPECT_EQ(message_of<ConfigurationError>([] { BytePairEncoding("[]", "", "folder"); }),
            "folder: vocab.json is not an object: a list of 0");
  EXPECT_EQ(refused([](Files& f) { f.vocabulary["a"] = "x"; }),
            "folder: vocab.json: a is not an integer: \"x\"");
  EXPECT_EQ(refused([](Files& f) { f.vocabulary["a"] = -1; }),
            "folder: vocab.json: a is -1, which cannot be: from 0 to 16777215 is wanted");
  EXPECT_EQ(refused([](Files& f) { f.vocabulary["a"] = 98; }),
            "folder: vocab.json: two tokens have the number 98");
  EXPECT_EQ(refused([](Files& f) { f.vocabulary.erase("a"); }), "folder: vocab.json: byte 97 has no token");
  EXPECT_THAT(
      refused([](Files& f) { f.merges_text += "x y\n"; }),
      HasSubstr("folder: merges.txt, line 10: 'x y' is not two tokens whose union is one in vocab.json"));
  EXPECT_THAT(refused([](Files& f) { f.merges_text += "xy\n"; }), HasSubstr("line 10: 'xy'"));
  test::TemporaryFolder folder;
  EXPECT_FALSE(BytePairEncoding::is_in(folder.path("")));
  EXPECT_THAT(message_of<ConfigurationError>([&] { (void)BytePairEncoding::load(folder.path("none")); }),
              HasSubstr("none/vocab.json' cannot be read: No such file"));
  folder.write("vocab.json", Files().vocabulary.dump());
  folder.write("merges.txt", Files().merges_text);
  EXPECT_TRUE(BytePairEncoding::is_in(folder.path("")));
  EXPECT_THAT(BytePairEncoding::load(folder.path("")).encode("hello"), ElementsAre(259));
}

TEST(Unicode, ClassesAndEncodings) {
  EXPECT_EQ(class_of('A'), CharacterClass::letter);
  EXPECT_EQ(class_of(0x10ffff), CharacterClass::other);
  EXPECT_EQ(class_of(0xbd), CharacterClass::number);
  EXPECT_EQ(class_of(0x2029), CharacterClass::space);
  EXPECT_EQ(class_of('\t'), CharacterClass::space);
  EXPECT_EQ(class_of(0x301), CharacterClass::other) << "a combining mark";
  EXPECT_EQ(class_of(0x3134a), CharacterClass::letter) << "the last letter of Unicode 14";
  for (const char32_t character :
       {U'a', U'\u00e9', U'\u20ac', U'\U0001f600', char32_t{0x7ff}, char32_t{0x800}, char32_t{0xffff},
        char32_t{0x10000}, char32_t{0x10ffff}}) {
    std::string text;
    append_utf8(character, text);
    const std::size_t bytes = text.size();
    EXPECT_EQ(decode_utf8(text + "x").character, character);
    EXPECT_EQ(decode_utf8(text + "x").bytes, bytes);
    if (bytes > 1) {
      EXPECT_EQ(decode_utf8(text.substr(0, bytes - 1)).character, 0xfffdu);
    }
  }
  for (const char* wrong :
       {"\xc0\x80", "\xed\xa0\x80", "\xf5\x80\x80\x80", "\xe0\x80\x80", "\x80", "\xf4\x90\x80\x80"}) {
    EXPECT_EQ(decode_utf8(wrong).character, 0xfffdu);
    EXPECT_EQ(decode_utf8(wrong).bytes, 1u);
  }
}

}  // namespace
}  // namespace tranche::tools
