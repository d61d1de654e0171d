#include "training/file_content.h"

#include <gmock/gmock.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/tools/temporary.h"
#include "tranche/core/error.h"

namespace tranche::training {
namespace {

using namespace std::string_view_literals;
using testing::AllOf;
using testing::HasSubstr;
using tools::test::message_of;
using Kind = FileContent::Kind;

FileContent content(std::string_view path, std::string_view head) {
  return content_of(path, head, static_cast<std::int64_t>(head.size()));
}

std::string repeated(std::string_view text, int times) {
  std::string all;
  for (int i = 0; i < times; ++i) all += text;
  return all;
}

TEST(FileContent, ContainersAreKnownByTheirBytesWhateverTheirName) {
  struct Case {
    std::string_view head, what, remedy;
  };
  const std::string tar = std::string(257, 'a') + std::string(
                                                      "ustar\0"
                                                      "00",
                                                      8);
  const std::string torch = "PK\x03\x04" + std::string(26, '\0') + "archive/data.pkl";
  const std::string arrays = "PK\x03\x04" + std::string(26, '\0') + "arr_0.npy";
  const std::vector<Case> cases{
      {"\x1f\x8b\x08\0\0\0\0\0\0\x03"sv, "compressed by gzip", "zcat 'c.txt' > 'c.txt.txt'"},
      {"\x28\xb5\x2f\xfd\x04"sv, "compressed by zstd", "zstdcat 'c.txt'"},
      {"\xfd"
       "7zXZ\0\0"sv,
       "compressed by xz", "xzcat 'c.txt'"},
      {"BZh91AY&SY"sv, "compressed by bzip2", "bzcat 'c.txt'"},
      {"\x04\x22\x4d\x18"sv, "compressed by lz4", "lz4cat 'c.txt'"},
      {"PK\x03\x04\x14\0\0\0"sv, "a zip archive", "unzip 'c.txt'"},
      {torch, "a file of torch.save()", "as JSON lines first, or its tokens by numpy's tofile()"},
      {arrays, "an archive of numpy", "numpy.load('c.txt')[NAME].tofile('tokens.bin')"},
      {"7z\xbc\xaf\x27\x1c"sv, "a 7z archive", "7z x 'c.txt'"},
      {tar, "a tar archive", "tar -xf 'c.txt'"},
      {"PAR1\x15\x04"sv, "a parquet file", "pandas.read_parquet('c.txt').to_json('c.txt.txt.jsonl'"},
      {"ARROW1\0\0"sv, "an arrow file", "pandas.read_feather('c.txt')"},
      {"\xff\xff\xff\xff\x28\1\0\0\x10\0\0\0\0"sv, "a stream of arrow",
       "datasets.Dataset.from_file('c.txt')"},
      {"Obj\1\x04"sv, "an Avro file", "avro-tools tojson 'c.txt'"},
      {"\x93NUMPY\1\0v\0{"sv, "an array of numpy",
       "numpy.load('c.txt').astype('uint32').tofile('c.txt.txt.bin')"},
      {"\x89HDF\r\n\x1a\n"sv, "an HDF5 file", "an object like {\"text\": \"...\"} a line"},
      {"\x80\x04\x95\4\0\0\0\0\0\0\0abcdefgh"sv, "a pickle of Python", "JSON lines first"},
      {"\x80\x02\x8a\x0al\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."sv, "a file of torch.save()",
       "JSON lines first"},
      {"%PDF-1.7\n"sv, "a PDF document", "pdftotext 'c.txt' 'c.txt.txt.txt'"},
      {"SQLite format 3\0"sv, "a database of SQLite", "JSON lines first"},
      {"GGUF\3\0\0\0"sv, "weights of llama.cpp", "name a file of text or tokens"},
      {"MMIDIDX\0\0"sv, "Megatron's index of documents", "name the .bin file beside it"},
      {"version https://git-lfs.github.com/spec/v1\noid sha256:00\n"sv, "a pointer of Git LFS",
       "git lfs pull"},
      {"\x89PNG\r\n"sv, "an image", "only text and tokens are learned"}};
  for (const Case& each : cases) {
    const FileContent found = content("c.txt", each.head);
    EXPECT_EQ(found.kind, Kind::other) << each.what;
    EXPECT_THAT(found.what, HasSubstr(std::string(each.what)));
    EXPECT_THAT(found.remedy, HasSubstr(std::string(each.remedy)));
    EXPECT_EQ(content("tokens.bin", each.head).what, found.what)
        << "also where nanoGPT's tokens are expected";
  }
  EXPECT_THAT(content("corpus.txt.gz", "\x1f\x8b\x08"sv).remedy,
              HasSubstr("zcat 'corpus.txt.gz' > 'corpus.txt'"));
  EXPECT_EQ(content("c.txt", "a\0b"sv).what, "no text: byte 1 is zero");
  EXPECT_EQ(content("c.txt", "\x80\x03}q\0."sv).what, "a pickle of Python");
}

TEST(FileContent, TablesOfTextAreKnownByTheirName) {
  const FileContent commas = content("a.CSV", "id,text\n1,\"words\"\n");
  EXPECT_EQ(commas.kind, Kind::other);
  EXPECT_EQ(commas.what, "a table with commas between its columns, by its name");
  EXPECT_EQ(commas.remedy,
            "write it as JSON lines first: python3 -c \"import pandas; "
            "pandas.read_csv('a.CSV').to_json('a.jsonl', orient='records', lines=True)\"");
  const FileContent tabs = content("a.tsv", "id\ttext\n");
  EXPECT_EQ(tabs.what, "a table with tabs between its columns, by its name");
  EXPECT_THAT(tabs.remedy, HasSubstr("pandas.read_csv('a.tsv', sep='\\t').to_json('a.jsonl'"));
  EXPECT_EQ(content("a.csv", "{\"text\": \"a\"}\n").kind, Kind::json_lines) << "whatever its name";
}

TEST(FileContent, TextIsTextAlsoWhereItLooksLikeJsonAtFirst) {
  for (const std::string_view text : {"words"sv,
                                      "{"sv,
                                      "{\n"sv,
                                      "{% for m in messages %}"sv,
                                      "{\\rtf1"sv,
                                      "{ int x; }"sv,
                                      "{\"quoted\" words}"sv,
                                      "[1] A reference"sv,
                                      "[INST] Hi [/INST]"sv,
                                      "[[A link]]"sv,
                                      "[\"A quote\" he said]"sv,
                                      "\"a\": 1"sv,
                                      "null"sv,
                                      "7"sv,
                                      "\xc3\xa9t\xc3\xa9"sv,
                                      "\xe9t\xe9"sv,
                                      "PK is short"sv,
                                      "BZhello"sv,
                                      "custard"sv,
                                      "ORC"sv,
                                      "\xef\xbb\xbfwords"sv})
    EXPECT_EQ(content("c.txt", text).kind, Kind::text) << text;
  EXPECT_EQ(content("c.txt", std::string(254, 'a') + "custard and more").kind, Kind::text);
}

TEST(FileContent, JsonLinesAreKnownByTheirFirstObject) {
  for (const char* name : {"c.txt", "c.JSONL", "c.jsonlines", "c.jsonl.txt", "c.json", "c", "c.ndjson"}) {
    for (const std::string_view text :
         {"{\"text\": \"a\"}\n{\"text\": \"b\"}\n"sv, "{\"text\": \"a\"}"sv,
          "\xef\xbb\xbf{\"text\": \"a\"}\r\n"sv, "\n\n {\"a\":{\"b\":[1,\n"sv.substr(0, 12),
          "{\"text\": \"} \\\" {\"}\n"sv, "{}\n"sv, "{\"a\": 1} trailing"sv,
          "{\"text\": 'mistake'}\n{\"text\": \"b\"}\n"sv})
      EXPECT_EQ(content(name, text).kind, Kind::json_lines) << name << ": " << text;
  }
  const std::string long_line = "{\"text\": \"" + std::string(content_head_bytes, 'x');
  EXPECT_EQ(content_of("c.txt", long_line.substr(0, content_head_bytes), 1 << 20).kind, Kind::json_lines);
  for (const char* name : {"c.jsonl", "c.NDJSON", "c.jsonl.txt"}) {
    EXPECT_TRUE(is_named_as_json_lines(name));
    EXPECT_EQ(content(name, "words").kind, Kind::json_lines) << "the reader says what is wrong with line 1";
  }
  EXPECT_FALSE(is_named_as_json_lines("jsonl.txt.gz"));
}

TEST(FileContent, OtherJsonIsRefusedByName) {
  for (const std::string_view text : {"[{\"text\": \"a\"}]"sv, "[\n  {\n    \"text\": \"a\""sv,
                                      "[[{\"role\":"sv, "[\"a\", \"b\"]"sv, "[{}]"sv}) {
    const FileContent found = content("c.json", text);
    EXPECT_EQ(found.what, "one array of JSON") << text;
    EXPECT_THAT(found.remedy, HasSubstr("jq -c '.[]' 'c.json' > 'c.jsonl'"));
  }
  EXPECT_EQ(content("c.json", "[1, 2]").what, "one array of JSON");
  EXPECT_EQ(content("c.jsonl", "[1, 2]\n").what, "one array of JSON");
  EXPECT_THAT(content("c.jsonl", "[{\"a\": 1}]\n").remedy, HasSubstr("> 'c.jsonl.jsonl'"))
      << "not onto itself";
  for (const std::string_view text :
       {"{\n  \"text\": \"a\"\n}\n"sv, "{\"messages\": [\n {"sv, "{\"a\": 1, \r\n \"b\": 2}"sv}) {
    const FileContent found = content("c.txt", text);
    EXPECT_EQ(found.what, "an object of JSON over several lines") << text;
    EXPECT_THAT(found.remedy, HasSubstr("jq -c '.' 'c.txt' > 'c.txt.jsonl'"));
  }
}

TEST(FileContent, TextOfWiderCharactersIsRefusedByName) {
  const auto what = [](std::string_view head) { return content("c.txt", head).what; };
  EXPECT_EQ(what("\xff\xfe"
                 "a\0b\0"sv),
            "text in UTF-16, not in UTF-8");
  EXPECT_EQ(what("\xfe\xff\0a\0b"sv), "text in UTF-16, not in UTF-8");
  EXPECT_EQ(what("\xff\xfe\0\0a\0\0\0"sv), "text in UTF-32, not in UTF-8");
  EXPECT_EQ(what("w\0o\0r\0d\0s\0"sv), "text in UTF-16LE, not in UTF-8");
  EXPECT_EQ(what("\0w\0o\0r\0d\0s"sv), "text in UTF-16BE, not in UTF-8");
  EXPECT_THAT(content("c.txt",
                      "\xff\xfe"
                      "a\0"sv)
                  .remedy,
              HasSubstr("iconv -f UTF-16 -t UTF-8 'c.txt' > 'c.utf8.txt'"));
}

TEST(FileContent, TokensAreKnownByTheirHeaderAndElseByTheEndingBin) {
  const std::string llmc = tools::test::llmc_tokens({1, 2, 3});
  EXPECT_EQ(content("c.txt", llmc).kind, Kind::llmc);
  const std::string numbers = tools::test::nanogpt_tokens(
      {464, 3290, 318, 1336, 13, 198, 40, 1842, 340, 13, 198, 11, 464, 3290, 318, 1336, 13, 198});
  EXPECT_EQ(content("c.bin", numbers).kind, Kind::numbers);
  EXPECT_THAT(content("c.bin", repeated(std::string("\x12\x34\0\0", 4), 20)).what,
              HasSubstr("numbers of 32 bits by their look"));
  EXPECT_EQ(content("c.bin", repeated(std::string("\x12\x34\0\0", 4), 4)).kind, Kind::numbers);
  const std::string longs = repeated(std::string("\x12\x34\0\0\0\0\0\0", 8), 20);
  for (const char* name : {"c.bin", "c.dat"})
    EXPECT_EQ(content(name, longs).what,
              "numbers of 64 bits by their look: every second number of 32 bits is 0");
  EXPECT_EQ(content("c.bin", longs).remedy,
            "write them in 32 bits first: python3 -c \"import numpy; numpy.fromfile('c.bin', "
            "'int64').astype('uint32').tofile('c.uint32.bin')\", and --data-format uint32");
  EXPECT_THAT(content("c.bin", longs + std::string("\1\0\0\0", 4)).what, HasSubstr("numbers of 32 bits"));
  EXPECT_THAT(content("c.bin", std::string(160, '\0')).what, HasSubstr("numbers of 32 bits"));
  EXPECT_EQ(content("c.bin", "ab").kind, Kind::numbers) << "two bytes may be any token";
  EXPECT_THAT(content("c.bin", repeated("A text. \xc3\xa9", 10)).what,
              HasSubstr("text, though its name ends in .bin"));
  const FileContent latin = content("c.bin", repeated("Un caf\xe9 \xe0 la cr\xe8me.\r\n", 4));
  EXPECT_THAT(latin.what,
              HasSubstr("text by its look, in another encoding than UTF-8, though its name ends"));
  EXPECT_EQ(latin.remedy, "convert it first: iconv -f LATIN1 -t UTF-8 'c.bin' > 'c.txt'");
  const std::string quoted = "\x93Words\x94 \x97 and more. ";  // Windows-1252
  EXPECT_THAT(content("c.bin", repeated(quoted, 13)).what, HasSubstr("text by its look"));
  EXPECT_EQ(content("c.bin", repeated(quoted, 2)).kind, Kind::numbers) << "so few may be tokens";
  EXPECT_EQ(content("c.bin", repeated("\xe9\xe8", 200)).kind, Kind::numbers) << "text has blanks";
  EXPECT_EQ(content("c.bin", repeated("Un caf\xe9 \1 ", 40)).kind, Kind::numbers);
  const std::string table = "{\"tokens\":{}}   ";
  const std::string safetensors = std::string("\x10\0\0\0\0\0\0\0", 8) + table;
  EXPECT_EQ(content("c.txt", safetensors).kind, Kind::safetensors);
  EXPECT_EQ(content("c.safetensors", "anything").kind, Kind::safetensors);
  EXPECT_EQ(content("c.safetensors", "\x1f\x8b\x08"sv).what, "compressed by gzip");
}

TEST(FileContent, WhatIsNoTextIsRefusedWithTheFlagThatTakesIt) {
  const auto lines = [](const std::string& path, std::string_view head, TextFormat format) {
    return holds_json_lines("data file", path, head, static_cast<std::int64_t>(head.size()), format,
                            "--data-format");
  };
  EXPECT_EQ(
      message_of<ConfigurationError>([&] { (void)lines("c.gz", "\x1f\x8b\x08"sv, TextFormat::automatic); }),
      "data file 'c.gz' is compressed by gzip; unpack it first: zcat 'c.gz' > 'c'; --data-format text takes "
      "its "
      "bytes as text all the same");
  EXPECT_THAT(message_of<ConfigurationError>(
                  [&] { (void)lines("c.txt", tools::test::llmc_tokens({1}), TextFormat::automatic); }),
              AllOf(HasSubstr("is a file of tokens"), HasSubstr("tranche train takes it as it is")));
  EXPECT_FALSE(lines("c.jsonl", "{\"a\": 1}", TextFormat::text));
  EXPECT_TRUE(lines("c.txt", "words", TextFormat::json_lines));
  EXPECT_EQ(parse_text_format("jsonl", "--data-format"), TextFormat::json_lines);
  EXPECT_EQ(message_of<ConfigurationError>([] { (void)parse_text_format("json", "--data-format"); }),
            "--data-format 'json' is not one of auto, text, jsonl; did you mean jsonl?");
  EXPECT_THAT(message_of<ConfigurationError>([] { (void)read_head("data file", "/nowhere/x"); }),
              HasSubstr("data file '/nowhere/x' cannot be opened: No such file"));
}

}  // namespace
}  // namespace tranche::training
