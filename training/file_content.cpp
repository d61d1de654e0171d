#include "training/file_content.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <initializer_list>
#include <optional>

#include "training/word_pattern.h"
#include "tranche/core/error.h"

namespace tranche::training {

namespace {

using namespace std::string_view_literals;
using Kind = FileContent::Kind;

/// Bytes at an offset that identify a format. In a remedy {0} is the file, {1} a name for the converted file.
struct Magic {
  std::size_t place;
  std::string_view bytes;
  std::string_view what, remedy;
  bool long_enough = true;  ///< two 16-bit tokens hardly ever have these bytes by chance
};

constexpr std::string_view json_first =
    "write its text as JSON lines first, an object like {{\"text\": \"...\"}} a line";
constexpr std::string_view text_or_tokens =
    "write its text as JSON lines first, or its tokens by numpy's tofile()";
constexpr std::string_view by_pandas =
    "write it as JSON lines first: python3 -c \"import pandas; "
    "pandas.read_{2}('{0}'{3}).to_json('{1}.jsonl', orient='records', lines=True)\"";
constexpr std::string_view image = "an image", picture = "only text and tokens are learned";

constexpr std::array magics{
    Magic{0, "\x1f\x8b\x08"sv, "compressed by gzip", "unpack it first: zcat '{0}' > '{1}'"},
    Magic{0, "\x28\xb5\x2f\xfd"sv, "compressed by zstd", "unpack it first: zstdcat '{0}' > '{1}'"},
    Magic{0,
          "\xfd"
          "7zXZ\0"sv,
          "compressed by xz", "unpack it first: xzcat '{0}' > '{1}'"},
    Magic{4, "1AY&SY"sv, "compressed by bzip2", "unpack it first: bzcat '{0}' > '{1}'"},
    Magic{0, "\x04\x22\x4d\x18"sv, "compressed by lz4", "unpack it first: lz4cat '{0}' > '{1}'"},
    Magic{0, "7z\xbc\xaf\x27\x1c"sv, "a 7z archive", "unpack it first: 7z x '{0}'"},
    Magic{257, "ustar\0"sv, "a tar archive", "unpack it first: tar -xf '{0}'"},
    Magic{257, "ustar  \0"sv, "a tar archive", "unpack it first: tar -xf '{0}'"},
    Magic{0, "PAR1\x15"sv, "a parquet file", by_pandas},
    Magic{0, "ARROW1\0\0"sv, "an arrow file", by_pandas},
    Magic{0, "Obj\1"sv, "an Avro file",
          "write it as JSON lines first: avro-tools tojson '{0}' > '{1}.jsonl'"},
    Magic{0, "\x93NUMPY"sv, "an array of numpy",
          "if it holds tokens: python3 -c \"import numpy; "
          "numpy.load('{0}').astype('uint32').tofile('{1}.bin')\", and --data-format uint32"},
    Magic{0, "\x89HDF\r\n\x1a\n"sv, "an HDF5 file", json_first},
    Magic{0, "\x80\x02\x8a\x0al\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"sv, "a file of torch.save()",
          text_or_tokens},
    Magic{0, "%PDF-"sv, "a PDF document", "take its text first: pdftotext '{0}' '{1}.txt'"},
    Magic{0, "SQLite format 3\0"sv, "a database of SQLite", json_first},
    Magic{0, "GGUF\2\0\0\0"sv, "weights of llama.cpp", "name a file of text or tokens"},
    Magic{0, "GGUF\3\0\0\0"sv, "weights of llama.cpp", "name a file of text or tokens"},
    Magic{0, "MMIDIDX\0"sv, "Megatron's index of documents",
          "name the .bin file beside it, with --data-format nanogpt (16 bits a token) or uint32"},
    Magic{0, "version https://git-lfs.github.com/spec/"sv,
          "a pointer of Git LFS, without the file's own bytes", "fetch them first: git lfs pull"},
    Magic{0, "\x89PNG"sv, image, picture},
    Magic{0, "\xff\xd8\xff"sv, image, picture, false},
    Magic{0,
          "\x7f"
          "ELF"sv,
          "a program", picture}};

bool is_blank(char c) {
  return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

bool ends_with(std::string_view name, std::string_view ending) {
  return name.size() >= ending.size() &&
         std::equal(ending.begin(), ending.end(), name.end() - static_cast<std::ptrdiff_t>(ending.size()),
                    [](char a, char b) { return a == std::tolower(static_cast<unsigned char>(b)); });
}

FileContent other(std::string_view what, std::string remedy) {
  return {Kind::other, std::string(what), std::move(remedy)};
}

/// The name without the ending of its compression format.
std::string unpacked(std::string_view path) {
  for (const std::string_view ending : {".gz", ".zst", ".xz", ".bz2", ".lz4", ".parquet", ".arrow", ".avro",
                                        ".npy", ".pdf", ".csv", ".tsv"}) {
    if (ends_with(path, ending) && path.size() > ending.size())
      return std::string(path.substr(0, path.size() - ending.size()));
  }
  return fmt::format("{}.txt", path);
}

std::string filled(std::string_view remedy, std::string_view path, std::string_view what) {
  const std::string_view reader = what == "a parquet file" ? "parquet" : "feather";  // pandas' names
  return fmt::format(fmt::runtime(remedy), path, unpacked(path), reader, "");
}

FileContent table(std::string_view path, std::string_view between, std::string_view how) {
  return other(fmt::format("a table with {} between its columns, by its name", between),
               fmt::format(fmt::runtime(by_pandas), path, unpacked(path), "csv", how));
}

/// Identifies a zip archive by the name of its first entry.
FileContent zip_content(std::string_view path, std::string_view head) {
  const std::string_view name = head.size() > 30 ? head.substr(30, 60) : std::string_view();
  if (name.find("data.pkl") != std::string_view::npos) {
    return other("a file of torch.save()", std::string(text_or_tokens));
  }
  if (name.find(".npy") != std::string_view::npos) {
    return other(
        "an archive of numpy",
        fmt::format("write an array of tokens by itself: numpy.load('{}')[NAME].tofile('tokens.bin')", path));
  }
  return other("a zip archive", fmt::format("unpack it first: unzip '{}'", path));
}

std::optional<FileContent> known_container(std::string_view path, std::string_view head, std::int64_t bytes,
                                           bool long_ones) {
  for (const Magic& magic : magics) {
    if (long_ones && !magic.long_enough) continue;
    if (head.size() >= magic.place && head.substr(magic.place).starts_with(magic.bytes))
      return other(magic.what, filled(magic.remedy, path, magic.what));
  }
  if (head.starts_with("PK\x03\x04")) return zip_content(path, head);
  // Arrow's stream format, in which Hugging Face's datasets are stored.
  if (head.size() > 12 && head.starts_with("\xff\xff\xff\xff"sv) &&
      head.substr(8).starts_with("\x10\0\0\0"sv)) {
    return other("a stream of arrow",
                 fmt::format("write it as JSON lines first: python3 -c \"import datasets; "
                             "datasets.Dataset.from_file('{}').to_json('{}.jsonl')\"",
                             path, unpacked(path)));
  }
  std::uint64_t frame = 0;
  const bool pickle =
      head.size() > 11 && head[0] == '\x80' && (head[1] == 4 || head[1] == 5) && head[2] == '\x95';
  if (pickle) std::memcpy(&frame, head.data() + 3, 8);
  const bool early = !long_ones && head.size() > 2 && head[0] == '\x80' && (head[1] == 2 || head[1] == 3);
  if (early || (pickle && frame < static_cast<std::uint64_t>(bytes)))
    return other("a pickle of Python", std::string(text_or_tokens));
  return std::nullopt;
}

bool is_safetensors(std::string_view head, std::int64_t bytes) {
  std::uint64_t length = 0;
  if (head.size() < 10 || bytes < 10) return false;
  std::memcpy(&length, head.data(), 8);
  return length >= 2 && length <= static_cast<std::uint64_t>(bytes) - 8 && head[8] == '{' &&
         (head[9] == '"' || head[9] == '}' || is_blank(head[9]));
}

bool is_llmc(std::string_view head) {
  std::int32_t magic = 0;
  if (head.size() >= 4) std::memcpy(&magic, head.data(), 4);
  return magic == 20240520 || magic == 20240801;
}

/// True for UTF-8 without bytes that texts lack; the end may cut a character.
bool is_printable(std::string_view head) {
  return utf8_prefix(head) + 3 >= head.size() && std::all_of(head.begin(), head.end(), [](unsigned char c) {
           return c >= ' ' ? c != 0x7f : c == '\n' || c == '\t' || c == '\r' || c == '\f';
         });
}

/// True for bytes that look like text in a one-byte encoding such as Latin-1: blanks, and no control
/// characters. A few tokens may look like that too, so short contents are checked more strictly.
bool is_latin_text(std::string_view head) {
  constexpr std::size_t least = 32, enough = 256;
  if (head.size() < least || head.find_first_of(" \n") == std::string_view::npos) return false;
  return std::all_of(head.begin(), head.end(), [&](unsigned char c) {
    if (c < ' ') return c == '\n' || c == '\t' || c == '\r' || c == '\f';
    return c != 0x7f && (c < 0x80 || c >= 0xa0 || head.size() >= enough);
  });
}

std::size_t behind_blanks(std::string_view text, std::size_t at) {
  while (at < text.size() && is_blank(text[at])) ++at;
  return at;
}

/// The position after a JSON string that begins at `at`; npos if there is none, or it does not end here.
std::size_t behind_string(std::string_view text, std::size_t at) {
  if (at >= text.size() || text[at] != '"') return std::string_view::npos;
  for (++at; at < text.size() && text[at] != '\n'; ++at) {
    if (text[at] == '"') return at + 1;
    if (text[at] == '\\') ++at;
  }
  return std::string_view::npos;
}

/// True if a JSON object begins at `at`: a brace, followed by its end, or by a key with its colon.
bool begins_object(std::string_view text, std::size_t at) {
  if (at >= text.size() || text[at] != '{') return false;
  at = behind_blanks(text, at + 1);
  if (at < text.size() && text[at] == '}') return true;
  at = behind_string(text, at);
  if (at == std::string_view::npos) return false;
  at = behind_blanks(text, at);
  return at < text.size() && text[at] == ':';
}

/// True where an array of objects or of strings begins at `at`.
bool begins_array(std::string_view text, std::size_t at) {
  if (at >= text.size() || text[at] != '[') return false;
  while (at < text.size() && text[at] == '[') at = behind_blanks(text, at + 1);
  if (begins_object(text, at)) return true;
  at = behind_string(text, at);
  if (at == std::string_view::npos) return false;
  at = behind_blanks(text, at);
  return at < text.size() && (text[at] == ',' || text[at] == ']');
}

/// True if the object that begins at `at` spans several lines: a line ends after one of its brackets or
/// commas.
bool spans_lines(std::string_view text, std::size_t at) {
  int depth = 0;
  char last = 0;  // the last character that is not blank
  for (; at < text.size(); ++at) {
    const char c = text[at];
    if (c == '\n') return last == '{' || last == '[' || last == ',';
    if (is_blank(c)) continue;
    last = c;
    if (c == '"') {
      const std::size_t end = behind_string(text, at);
      if (end == std::string_view::npos) return false;
      at = end - 1;
    }
    if (c == '{' || c == '[') ++depth;
    if ((c == '}' || c == ']') && --depth == 0) return false;
  }
  return false;
}

/// Content in another form of JSON, with the command that converts it to JSON lines.
FileContent other_json(std::string_view what, std::string_view filter, std::string_view path) {
  const bool json = ends_with(path, ".json");
  return other(what, fmt::format("write it as JSON lines first, an object a line: jq -c '{}' '{}' > '{}l'",
                                 filter, path, json ? std::string(path) : fmt::format("{}.json", path)));
}

/// The kind of content if it is some form of JSON.
std::optional<FileContent> json_content(std::string_view path, std::string_view head) {
  if (head.starts_with(byte_order_mark)) head.remove_prefix(byte_order_mark.size());
  const std::size_t begin = behind_blanks(head, 0);
  const bool named = is_named_as_json_lines(path);
  if (begins_array(head, begin) ||
      ((named || ends_with(path, ".json")) && begin < head.size() && head[begin] == '[')) {
    return other_json("one array of JSON", ".[]", path);
  }
  if (begins_object(head, begin)) {
    if (!spans_lines(head, begin)) return FileContent{Kind::json_lines, {}, {}};
    return other_json("an object of JSON over several lines", ".", path);
  }
  if (named) return FileContent{Kind::json_lines, {}, {}};
  return std::nullopt;
}

/// Zero bytes at every second position mean Latin letters in 16 bits.
std::optional<FileContent> wide_text(std::string_view path, std::string_view head) {
  const auto refuse = [&](std::string_view name) {
    return other(
        fmt::format("text in {}, not in UTF-8", name),
        fmt::format("convert it first: iconv -f {} -t UTF-8 '{}' > '{}'", name, path,
                    path.ends_with(".txt") ? fmt::format("{}.utf8.txt", path.substr(0, path.size() - 4))
                                           : fmt::format("{}.utf8.txt", path)));
  };
  if (head.starts_with("\xff\xfe\0\0"sv) || head.starts_with("\0\0\xfe\xff"sv)) return refuse("UTF-32");
  if (head.starts_with("\xff\xfe"sv) || head.starts_with("\xfe\xff"sv)) return refuse("UTF-16");
  std::array<std::size_t, 2> zeros{};
  for (std::size_t i = 0; i < head.size(); ++i) zeros[i % 2] += head[i] == '\0' ? 1 : 0;
  const std::size_t half = head.size() / 2;
  for (const std::size_t side : {0U, 1U}) {
    if (half >= 4 && zeros[side] * 10 >= half * 7 && zeros[1 - side] * 50 <= half)
      return refuse(side == 1 ? "UTF-16LE" : "UTF-16BE");
  }
  return std::nullopt;
}

/// Numbers of 64 bits below 2^32: the high half of each is 0.
bool are_64_bits_wide(std::string_view head, std::int64_t bytes) {
  constexpr std::size_t least = 64;
  if (head.size() < least || bytes % 8 != 0) return false;
  bool zero = true;  // also in the low halves
  for (std::size_t i = 0; i + 8 <= head.size(); i += 8) {
    if (head.substr(i + 4, 4) != "\0\0\0\0"sv) return false;
    zero = zero && head.substr(i, 4) == "\0\0\0\0"sv;
  }
  return !zero;
}

}  // namespace

std::optional<FileContent> numbers_of_64_bits(std::string_view path, std::string_view head,
                                              std::int64_t bytes) {
  if (!are_64_bits_wide(head, bytes)) return std::nullopt;
  const std::string_view name = ends_with(path, ".bin") ? path.substr(0, path.size() - 4) : path;
  return other("numbers of 64 bits by their look: every second number of 32 bits is 0",
               fmt::format("write them in 32 bits first: python3 -c \"import numpy; "
                           "numpy.fromfile('{}', 'int64').astype('uint32').tofile('{}.uint32.bin')\", and "
                           "--data-format uint32",
                           path, name));
}

bool is_named_as_json_lines(std::string_view path) {
  if (ends_with(path, ".txt")) path.remove_suffix(4);
  return ends_with(path, ".jsonl") || ends_with(path, ".ndjson") || ends_with(path, ".jsonlines");
}

FileContent content_of(std::string_view path, std::string_view head, std::int64_t bytes) {
  const bool bin = ends_with(path, ".bin");
  if (is_llmc(head)) return {Kind::llmc, {}, {}};
  if (auto known = known_container(path, head, bytes, bin)) return *known;
  if (is_safetensors(head, bytes) || ends_with(path, ".safetensors")) return {Kind::safetensors, {}, {}};
  if (auto wide = numbers_of_64_bits(path, head, bytes)) return *wide;
  if (bin) {
    // In 32-bit tokens below 65,536 every second 16-bit number is 0; this is rare otherwise.
    bool wide = head.size() >= 64;
    for (std::size_t i = 2; wide && i + 1 < head.size(); i += 4)
      wide = head[i] == '\0' && head[i + 1] == '\0';
    if (wide) {
      return other("numbers of 32 bits by their look: every second number of 16 bits is 0",
                   "say which they are: --data-format uint32, or nanogpt for 16 bits");
    }
    constexpr std::size_t sure = 32;  // fewer bytes than this may be tokens that look like letters by chance
    if (head.size() >= sure && is_printable(head)) {
      return other("text, though its name ends in .bin, as files of tokens do",
                   "give it a name that ends in .txt");
    }
    if (is_latin_text(head)) {
      return other(
          "text by its look, in another encoding than UTF-8, though its name ends in .bin, as files "
          "of tokens do",
          fmt::format("convert it first: iconv -f LATIN1 -t UTF-8 '{}' > '{}.txt'", path,
                      path.substr(0, path.size() - 4)));
    }
    return {Kind::numbers, {}, {}};
  }
  if (auto wide = wide_text(path, head)) return *wide;
  if (auto json = json_content(path, head)) return *json;
  if (const std::size_t zero = head.find('\0'); zero != std::string_view::npos) {
    return other(fmt::format("no text: byte {} is zero", zero), "name a file of text or tokens");
  }
  if (ends_with(path, ".csv")) return table(path, "commas", "");
  if (ends_with(path, ".tsv")) return table(path, "tabs", ", sep='\\t'");
  return {};
}

bool holds_json_lines(std::string_view what, const std::string& path, std::string_view head,
                      std::int64_t bytes, TextFormat format, std::string_view flag) {
  if (format != TextFormat::automatic) return format == TextFormat::json_lines;
  const FileContent content = content_of(path, head, bytes);
  if (content.kind == Kind::text || content.kind == Kind::json_lines) return content.kind == Kind::json_lines;
  const auto refuse = [&](std::string_view is, std::string_view remedy) {
    throw ConfigurationError(fmt::format("{} '{}' is {}; {}; {} text takes its bytes as text all the same",
                                         what, path, is, remedy, flag));
  };
  if (content.kind == Kind::other) refuse(content.what, content.remedy);
  refuse("a file of tokens, neither text nor JSON lines", "tranche train takes it as it is");
  return false;
}

std::string read_head(std::string_view what, const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file)
    throw ConfigurationError(fmt::format("{} '{}' cannot be opened: {}", what, path, std::strerror(errno)));
  std::string head(static_cast<std::size_t>(content_head_bytes), '\0');
  file.read(head.data(), content_head_bytes);
  head.resize(static_cast<std::size_t>(file.gcount()));
  return head;
}

}  // namespace tranche::training
