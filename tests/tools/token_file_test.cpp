#include "tranche/tools/token_file.h"

#include <gmock/gmock.h>

#include "tranche/core/error.h"
#include "tranche/tests/tools/temporary.h"

namespace tranche::tools {
namespace {

using test::llmc_tokens;
using test::message_of;
using test::nanogpt_tokens;
using test::TemporaryFolder;
using testing::AllOf;
using testing::HasSubstr;

std::vector<std::int32_t> read(const TokenFile& file, std::int64_t first, std::size_t count) {
  std::vector<std::int32_t> tokens(count);
  file.read(first, tokens, 1 << 16);
  return tokens;
}

TEST(TokenFile, ReadsTextAsBytes) {
  const TemporaryFolder folder;
  const TokenFile file(folder.write("a.txt", "ab\xff\n"));
  EXPECT_EQ(file.format(), DataFormat::text);
  EXPECT_EQ(file.size(), 4);
  EXPECT_EQ(read(file, 0, 4), (std::vector<std::int32_t>{97, 98, 255, 10}));
  EXPECT_EQ(file.bytes().size(), 4u);
}

TEST(TokenFile, KnowsFilesOfTokensByMagicAndEnding) {
  const TemporaryFolder folder;
  const std::vector<std::uint16_t> tokens{0, 1, 65535, 7, 50256};
  const TokenFile llmc(folder.write("a.bin", llmc_tokens(tokens)));
  EXPECT_EQ(llmc.format(), DataFormat::llmc);
  EXPECT_EQ(llmc.size(), 5);
  EXPECT_EQ(read(llmc, 1, 4), (std::vector<std::int32_t>{1, 65535, 7, 50256}));
  const TokenFile nanogpt(folder.write("b.bin", nanogpt_tokens(tokens)));
  EXPECT_EQ(nanogpt.format(), DataFormat::nanogpt);
  EXPECT_EQ(nanogpt.size(), 5);
  EXPECT_EQ(read(nanogpt, 2, 1), (std::vector<std::int32_t>{65535}));
  const TokenFile asked(folder.write("c.dat", nanogpt_tokens(tokens)), DataFormat::nanogpt);
  EXPECT_EQ(asked.size(), 5);
  const TokenFile text(folder.path("b.bin"), DataFormat::text);
  EXPECT_EQ(text.size(), 10);
}

TEST(TokenFile, RefusesFilesThatAreNotWhatTheyShouldBe) {
  const TemporaryFolder folder;
  const auto open = [&](const std::string& path, DataFormat format = DataFormat::automatic) {
    return message_of<ConfigurationError>([&] { TokenFile(path, format); });
  };
  const std::string missing = folder.path("missing.txt");
  EXPECT_THAT(open(missing), AllOf(HasSubstr(missing), HasSubstr("cannot be opened")));
  EXPECT_THAT(open(folder.write("empty.txt", "")), AllOf(HasSubstr("empty.txt"), HasSubstr("is empty")));
  EXPECT_THAT(open(folder.path(".")), HasSubstr("is not a file"));
  EXPECT_THAT(open(folder.write("odd.bin", "abc")), HasSubstr("holds 3 bytes, an odd number"));
  EXPECT_THAT(open(folder.write("v.bin", llmc_tokens({1, 2}, 7))), HasSubstr("version 7; version 1"));
  const std::string cut = llmc_tokens({1, 2, 3}).substr(0, 1028);
  EXPECT_THAT(open(folder.write("cut.bin", cut)),
              HasSubstr("says that it holds 3 tokens, but there are 4 bytes"));
  EXPECT_THAT(open(folder.write("head.bin", cut.substr(0, 100))), HasSubstr("ends within llm.c's header"));
  EXPECT_THAT(open(folder.write("t.txt", "some text"), DataFormat::llmc), HasSubstr("magic number 20240520"));
}

TEST(TokenFile, NamesFilePositionAndValueOfATokenBeyondTheVocabulary) {
  const TemporaryFolder folder;
  std::vector<std::uint16_t> tokens(40000, 3);
  tokens[33333] = 300;
  const TokenFile file(folder.write("t.bin", nanogpt_tokens(tokens)));
  const auto says =
      AllOf(HasSubstr("t.bin"), HasSubstr("token 300 at position 33333"), HasSubstr("vocabulary is 256"));
  EXPECT_THAT(message_of<ConfigurationError>([&] { file.require_within(256); }), says);
  EXPECT_THAT(message_of<ConfigurationError>([&] {
                std::vector<std::int32_t> some(10);
                file.read(33330, some, 256);
              }),
              says);
  file.require_within(301);
  file.require_within(256, 33333);
  EXPECT_NE(message_of<ConfigurationError>([&] { file.require_within(300, 33334); }), "");
}

TEST(TokenFile, RefusesPositionsOutsideOfTheFile) {
  const TemporaryFolder folder;
  const TokenFile file(folder.write("a.txt", "abc"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { read(file, 1, 3); }),
              HasSubstr("3 from 1 on are not among them"));
  EXPECT_THROW(read(file, -1, 1), InvalidArgument);
  EXPECT_THROW(file[3], InvalidArgument);
  EXPECT_EQ(file[2], 'c');
}

TEST(DataFormat, IsReadWithTheNearestNameOnError) {
  EXPECT_EQ(parse_data_format("llmc"), DataFormat::llmc);
  EXPECT_THAT(message_of<ConfigurationError>([] { parse_data_format("txt"); }),
              HasSubstr("did you mean text?"));
}

}  // namespace
}  // namespace tranche::tools
