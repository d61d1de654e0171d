#include "tranche/training/token_file.h"

#include <gmock/gmock.h>

#include <chrono>
#include <numeric>

#include "tests/tools/temporary.h"
#include "tranche/core/error.h"
#include "tranche/kernels/cross_entropy.h"
#include "tranche/training/sampler.h"

namespace tranche::training {
namespace {

using testing::AllOf;
using testing::EndsWith;
using testing::HasSubstr;
using tools::test::llmc_tokens;
using tools::test::message_of;
using tools::test::nanogpt_tokens;
using tools::test::TemporaryFolder;

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
  std::string text;
  file.read_text(1, 3, [&](auto piece) { text.append(piece.begin(), piece.end()); });
  EXPECT_EQ(text, "b\xff\n");
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

template <typename Integer>
std::string bytes_of(const std::vector<Integer>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Integer)};
}

/// Tokens of 32 bits in llm.c's format.
std::string wide_llmc(const std::vector<std::uint32_t>& tokens, std::int32_t version = 7) {
  std::vector<std::int32_t> header(256, 0);
  header[0] = 20240801;
  header[1] = version;
  header[2] = static_cast<std::int32_t>(tokens.size());
  return bytes_of(header) + bytes_of(tokens);
}

TEST(TokenFile, ReadsTokensOf32Bits) {
  const TemporaryFolder folder;
  const std::vector<std::uint32_t> tokens{0, 65536, 128255, 7, 151935};
  const TokenFile llmc(folder.write("a.bin", wide_llmc(tokens)));
  EXPECT_EQ(llmc.format(), DataFormat::llmc);
  EXPECT_EQ(llmc.width(), 4);
  const TokenFile plain(folder.write("b.bin", bytes_of(tokens)), DataFormat::uint32);
  for (const TokenFile* file : {&llmc, &plain}) {
    EXPECT_EQ(file->size(), 5);
    std::vector<std::int32_t> read_back(4);
    file->read(1, read_back, 151936);
    EXPECT_EQ(read_back, (std::vector<std::int32_t>{65536, 128255, 7, 151935}));
    file->require_within(151936);
    EXPECT_THAT(message_of<ConfigurationError>([&] { file->require_within(151935); }),
                AllOf(HasSubstr(file->path()), HasSubstr("token 151935 at position 4"),
                      HasSubstr("vocabulary is 151935")));
  }
  const TokenFile negative(folder.write("c.bin", bytes_of<std::uint32_t>({1, 0xffffffff})),
                           DataFormat::uint32);
  EXPECT_THAT(message_of<ConfigurationError>([&] { negative.require_within(INT32_MAX); }),
              HasSubstr("token 4294967295 at position 1"));
}

TEST(TokenFile, RefusesWideFilesThatAreNotWhatTheyShouldBe) {
  const TemporaryFolder folder;
  const auto open = [&](const std::string& path, DataFormat format = DataFormat::automatic) {
    return message_of<ConfigurationError>([&] { TokenFile(path, format); });
  };
  EXPECT_THAT(open(folder.write("v.bin", wide_llmc({1, 2}, 1))),
              HasSubstr("version 1; version 7 (uint32 tokens)"));
  EXPECT_THAT(open(folder.write("cut.bin", wide_llmc({1, 2, 3}).substr(0, 1034))),
              HasSubstr("says that it holds 3 tokens, but there are 10 bytes"));
  EXPECT_THAT(open(folder.write("odd.bin", "abcdef"), DataFormat::uint32),
              HasSubstr("holds 6 bytes, no multiple of 4"));
  const TokenFile file(folder.write("plain.bin", nanogpt_tokens({1, 0, 2, 0})));
  file.require_within(65536);
  EXPECT_THAT(message_of<ConfigurationError>([&] { file.require_within(128256); }),
              AllOf(HasSubstr("plain.bin"), HasSubstr("16 bits (nanogpt) or 32 (uint32)")));
  const TokenFile said(folder.path("plain.bin"), DataFormat::nanogpt);
  said.require_within(128256);
}

/// Arrays in safetensors' form: name, type, bytes per element, content.
struct Array {
  std::string name, type;
  std::size_t width;
  std::string bytes;
};
std::string safetensors(const std::vector<Array>& arrays) {
  std::string header = "{", content;
  for (const Array& array : arrays) {
    header += (header.size() > 1 ? "," : "") + ("\"" + array.name) + R"(":{"dtype":")" + array.type +
              R"(","shape":[)" + std::to_string(array.bytes.size() / array.width) + R"(],"data_offsets":[)" +
              std::to_string(content.size()) + "," + std::to_string(content.size() + array.bytes.size()) +
              "]}";
    content += array.bytes;
  }
  header += "}";
  return bytes_of<std::uint64_t>({header.size()}) + header + content;
}
Array ends_of(const std::vector<std::int64_t>& ends) {
  return {"document_ends", "I64", 8, bytes_of(ends)};
}
Array tokens_of(const std::vector<std::uint32_t>& tokens) {
  return {"tokens", "U32", 4, bytes_of(tokens)};
}

TEST(TokenFile, ReadsDocumentsAndWhatIsLearned) {
  const TemporaryFolder folder;
  const TokenFile file(folder.write(
      "a.safetensors", safetensors({ends_of({2, 5}),
                                    tokens_of({9, 70000, 7, 6, 5}),
                                    {"targets", "U8", 1, bytes_of<std::uint8_t>({0, 1, 0, 0, 1})}})));
  EXPECT_EQ(file.format(), DataFormat::safetensors);
  EXPECT_EQ(file.size(), 5);
  std::vector<std::int32_t> tokens(3);
  file.read(1, tokens, 70001);
  EXPECT_EQ(tokens, (std::vector<std::int32_t>{70000, 7, 6}));
  EXPECT_THAT(file.document_ends(), testing::ElementsAre(2, 5));
  std::vector<std::uint8_t> learned(4);
  file.read_targets(1, learned);
  EXPECT_THAT(learned, testing::ElementsAre(1, 0, 0, 1));
  EXPECT_THAT(message_of<ConfigurationError>([&] { file.require_within(70000); }),
              HasSubstr("token 70000 at position 1"));

  const TokenFile narrow(
      folder.write("b.safetensors", safetensors({{"tokens", "U16", 2, bytes_of<std::uint16_t>({3, 4})}})));
  EXPECT_TRUE(narrow.document_ends().empty());
  narrow.read_targets(0, std::span(learned).first(2));
  EXPECT_EQ(learned[1], 1);
}

TEST(TokenFile, RefusesSafetensorsThatAreNoTokens) {
  const TemporaryFolder folder;
  const auto refused = [&](const std::string& content) {
    const std::string path = folder.write("a.safetensors", content);
    return message_of<ConfigurationError>([&] { TokenFile{path}; });
  };
  EXPECT_THAT(refused("text"), AllOf(HasSubstr("a.safetensors"), HasSubstr("is no safetensors file")));
  EXPECT_THAT(refused(safetensors({ends_of({1})})), HasSubstr("has no array \"tokens\" of U8, U16 or U32"));
  EXPECT_THAT(refused(safetensors({{"tokens", "F32", 4, bytes_of<float>({1})}})), HasSubstr("has no array"));
  EXPECT_THAT(refused(safetensors({tokens_of({1, 2}), {"targets", "U8", 1, "x"}})),
              HasSubstr("has other \"targets\" than a U8 a token"));
  EXPECT_THAT(refused(safetensors({tokens_of({1, 2}), {"document_ends", "U8", 1, "x"}})),
              HasSubstr("has other \"document_ends\" than I64"));
  EXPECT_THAT(refused(safetensors({tokens_of({1, 2}), ends_of({1})})),
              HasSubstr("has 2 tokens, but its last document ends at 1"));
  EXPECT_THAT(refused(safetensors({tokens_of({1, 2}), ends_of({2, 2})})),
              HasSubstr("has a document that ends at 2 behind one that ends at 2"));
  EXPECT_THAT(refused(safetensors({tokens_of({1, 2}), ends_of({2})}).substr(0, 100)),
              HasSubstr("is no safetensors file"));
}

TEST(TokenFile, RowsTellTheirDocuments) {
  const TemporaryFolder folder;
  const TokenFile file(
      folder.write("a.safetensors",
                   safetensors({ends_of({3, 4, 9}),
                                tokens_of({10, 11, 12, 20, 30, 31, 32, 33, 34}),
                                {"targets", "U8", 1, bytes_of<std::uint8_t>({1, 1, 1, 1, 1, 0, 1, 1, 1})}})));
  const Windows windows({&file, 0, 9}, 4, "training");
  std::vector<std::int32_t> inputs, targets;
  RowDocuments documents;
  read_windows(windows, {0, 1, -1}, 100, inputs, targets, &documents);
  constexpr std::int32_t none = kernels::ignored_label;
  EXPECT_THAT(inputs, testing::ElementsAre(10, 11, 12, 20, 30, 31, 32, 33, 0, 0, 0, 0));
  EXPECT_THAT(targets, testing::ElementsAre(11, 12, none, none, none, 32, 33, 34, none, none, none, none));
  EXPECT_THAT(documents.begin, testing::ElementsAre(0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0));
  EXPECT_THAT(documents.positions, testing::ElementsAre(0, 1, 2, 0, 0, 1, 2, 3, 0, 1, 2, 3));
}

TEST(TokenFile, WindowsTellWhetherTheyHaveATarget) {
  const TemporaryFolder folder;
  const TokenFile file(
      folder.write("a.safetensors",
                   safetensors({ends_of({4, 9}),
                                tokens_of({10, 11, 12, 13, 20, 21, 22, 23, 24}),
                                {"targets", "U8", 1, bytes_of<std::uint8_t>({1, 0, 0, 0, 1, 0, 0, 0, 1})}})));
  const Windows windows({&file, 0, 9}, 2, "training");
  EXPECT_FALSE(has_target(windows, 0));
  EXPECT_FALSE(has_target(windows, 1)) << "the first token of a document is no target, learned or not";
  EXPECT_FALSE(has_target(windows, 2));
  EXPECT_TRUE(has_target(windows, 3));
  const TokenFile text(folder.write("a.txt", "some words"));
  EXPECT_TRUE(has_target(Windows({&text, 0, 10}, 4, "training"), 1));
}

TEST(TokenFile, AFileIsWhatItContains) {
  const TemporaryFolder folder;
  const auto open = [&](const std::string& name, const std::string& content,
                        DataFormat format = DataFormat::automatic) {
    const std::string path = folder.write(name, content);
    return message_of<ConfigurationError>([&] { TokenFile{path, format}; });
  };
  const std::string gzip("\x1f\x8b\x08\0\0\0\0\0\0\x03", 10);
  for (const char* name : {"a.txt.gz", "a.txt", "a.bin", "a.safetensors"}) {
    EXPECT_THAT(open(name, gzip),
                AllOf(HasSubstr(std::string(name) + "' is compressed by gzip; unpack it first: zcat"),
                      HasSubstr("--data-format text, nanogpt or uint32 takes its bytes as they are")));
  }
  EXPECT_EQ(open("a.txt.gz", gzip, DataFormat::text), "");
  EXPECT_EQ(open("a.bin", gzip, DataFormat::nanogpt), "");
  EXPECT_THAT(
      open("chat.txt", "{\"text\": \"a\"}\n"),
      AllOf(HasSubstr("chat.txt' is JSON lines, each a document; make tokens of them first: tranche tokenize "
                      "--data '"),
            HasSubstr("--data-format text takes every byte of the file as a token all the same")));
  EXPECT_EQ(open("chat.jsonl", "{\"text\": \"a\"}\n", DataFormat::text), "");
  EXPECT_THAT(open("table.csv", "id,text\n1,words\n"),
              AllOf(HasSubstr("table.csv' is a table with commas"), HasSubstr("pandas.read_csv(")));
  EXPECT_EQ(open("table.csv", "id,text\n1,words\n", DataFormat::text), "");
  std::vector<std::int64_t> longs(20);
  std::iota(longs.begin(), longs.end(), 3);
  const std::string wide =
      "is numbers of 64 bits by their look: every second number of 32 bits is 0; write them ";
  EXPECT_THAT(
      open("i64.bin", bytes_of(longs)),
      AllOf(HasSubstr(wide), EndsWith("; --data-format text takes its bytes as they are all the same")));
  for (const auto format : {DataFormat::uint32, DataFormat::nanogpt})
    EXPECT_THAT(open("i64.bin", bytes_of(longs), format), HasSubstr(wide));
  EXPECT_EQ(open("i64.bin", bytes_of(longs), DataFormat::text), "");
  const TokenFile hidden(folder.write("tokens.txt", safetensors({tokens_of({1, 2})})));
  EXPECT_EQ(hidden.format(), DataFormat::safetensors);
}

TEST(TokenFile, RefusesFilesThatAreNotWhatTheyShouldBe) {
  const TemporaryFolder folder;
  const auto open = [&](const std::string& path, DataFormat format = DataFormat::automatic) {
    return message_of<ConfigurationError>([&] { TokenFile(path, format); });
  };
  const std::string missing = folder.path("missing.txt");
  EXPECT_THAT(open(missing), AllOf(HasSubstr(missing), HasSubstr("cannot be opened")));
  EXPECT_THAT(open(folder.write("empty.txt", "")), AllOf(HasSubstr("empty.txt"), HasSubstr("is empty")));
  EXPECT_THAT(open(folder.path(".")),
              HasSubstr("is not a file but a folder; a pattern names its files, such as '" +
                        folder.path("./*.bin") + "'"));
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
  EXPECT_THROW(file.read_text(1, 3, [](auto) {}), InvalidArgument);
  const TokenFile tokens(folder.write("a.bin", nanogpt_tokens({1, 2})));
  EXPECT_THAT(message_of<InvalidArgument>([&] { tokens.read_text(0, 1, [](auto) {}); }),
              HasSubstr("holds tokens, not text"));
}

/// Overwrites bytes of a file without replacing the file, as an editor or `cp` may.
void overwrite(const std::string& path, std::int64_t offset, const std::string& bytes) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(offset);
  file << bytes;
}

/// Moves the time of the last change by some seconds, because within one tick of the system's clock it would
/// not change.
void age(const std::string& path, int seconds) {
  namespace fs = std::filesystem;
  fs::last_write_time(path, fs::last_write_time(path) + std::chrono::seconds(seconds));
}

TEST(TokenFileInUse, ThatWasCutOffIsAnErrorWhereverItIsRead) {
  const TemporaryFolder folder;
  for (const std::int64_t left : {0, 3, 7}) {
    const std::string path = folder.write("a.txt", "abcdefgh");
    const TokenFile file(path);
    std::filesystem::resize_file(path, static_cast<std::uintmax_t>(left));
    const auto says = AllOf(HasSubstr("data file '" + path + "' was cut off while it was in use"),
                            HasSubstr("it had 8 bytes, and byte"));
    for (const std::int64_t first : {0, 6}) {
      EXPECT_THAT(message_of<ConfigurationError>([&] { read(file, first, 2); }), says) << left;
      EXPECT_THAT(message_of<ConfigurationError>([&] { file.read_text(first, 2, [](auto) {}); }), says);
    }
    EXPECT_THAT(message_of<ConfigurationError>([&] { file.require_within(200); }), says);
  }
}

TEST(TokenFileInUse, ThatWasWrittenToIsAnError) {
  const TemporaryFolder folder;
  const std::string path = folder.write("a.txt", "abcdefgh");
  const TokenFile file(path);
  overwrite(path, 6, "x");
  age(path, 2);
  const std::string digest = TokenFile(path).digest();
  EXPECT_THAT(message_of<ConfigurationError>([&] { read(file, 0, 2); }),
              AllOf(HasSubstr("data file '" + path + "' was written to while it was in use"),
                    HasSubstr("was " + file.digest() + " and now is " + digest)))
      << "also where other bytes are read";
}

TEST(TokenFileInUse, ThatIsWrittenToAtTheMomentOfItsLastChangeIsAnError) {
  const TemporaryFolder folder;
  const std::string path = folder.write("a.txt", "abcdefgh");
  const TokenFile file(path);
  const auto time = std::filesystem::last_write_time(path);
  read(file, 0, 2);
  overwrite(path, 6, "x");
  std::filesystem::last_write_time(path, time);
  EXPECT_THAT(message_of<ConfigurationError>([&] { read(file, 0, 2); }),
              HasSubstr("was written to while it was in use"));
}

TEST(TokenFileInUse, MayBeReplacedByNameOrTouchedOrGrow) {
  const TemporaryFolder folder;
  const std::string path = folder.write("a.txt", "abcdefgh");
  const TokenFile file(path);
  age(path, 2);
  EXPECT_EQ(read(file, 1, 1), std::vector<std::int32_t>{'b'}) << "another time, the same bytes";
  overwrite(path, 8, "more");
  age(path, 4);
  EXPECT_EQ(file.size(), 8);
  EXPECT_EQ(read(file, 7, 1), std::vector<std::int32_t>{'h'}) << "what was there is as it was";
  std::filesystem::rename(folder.write("new.txt", "ABCDEFGHI"), path);
  EXPECT_EQ(read(file, 2, 1), std::vector<std::int32_t>{'c'}) << "the file that was opened";
  EXPECT_EQ(read(TokenFile(path), 2, 1), std::vector<std::int32_t>{'C'});
}

TEST(TokenFileDigest, IsOfAllBytesAndTheSizeOfSmallFiles) {
  const TemporaryFolder folder;
  const auto digest = [&](const std::string& content) {
    return TokenFile(folder.write("a.txt", content)).digest();
  };
  const std::string text(3'000'000, 'a');
  const std::string of_text = digest(text);
  EXPECT_EQ(of_text.size(), 16u);
  EXPECT_EQ(digest(text), of_text);
  for (const std::size_t position : {std::size_t{0}, std::size_t{1'234'567}, text.size() - 1}) {
    std::string other = text;
    other[position] = 'b';
    EXPECT_NE(digest(other), of_text) << position;
  }
  EXPECT_NE(digest(text + "a"), of_text);
}

TEST(TokenFileDigest, IsOfTheSizeAndOfSpreadPagesOfLargeFiles) {
  const TemporaryFolder folder;
  const std::string path = folder.write("large.txt", "");
  const std::int64_t size = largest_whole_digest + 12'345;
  std::filesystem::resize_file(path, static_cast<std::uintmax_t>(size));  // zeros that use no space
  const std::string digest = TokenFile(path, DataFormat::text).digest();
  const std::int64_t middle = (size - 4096) * 31 / 63;
  for (const std::int64_t seen : {std::int64_t{0}, middle, middle + 4095, size - 1}) {
    overwrite(path, seen, "x");
    EXPECT_NE(TokenFile(path, DataFormat::text).digest(), digest) << seen;
    overwrite(path, seen, std::string(1, '\0'));
  }
  EXPECT_EQ(TokenFile(path, DataFormat::text).digest(), digest);
  overwrite(path, middle + 4096, "x");
  EXPECT_EQ(TokenFile(path, DataFormat::text).digest(), digest) << "between two pages";
  std::filesystem::resize_file(path, static_cast<std::uintmax_t>(size - 1));
  EXPECT_NE(TokenFile(path, DataFormat::text).digest(), digest);
}

TEST(DataFormat, IsReadWithTheNearestNameOnError) {
  EXPECT_EQ(parse_data_format("llmc"), DataFormat::llmc);
  EXPECT_THAT(message_of<ConfigurationError>([] { parse_data_format("txt"); }),
              HasSubstr("did you mean text?"));
}

}  // namespace
}  // namespace tranche::training
