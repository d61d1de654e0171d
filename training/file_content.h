#pragma once
/// Detects the kind of a data file by its bytes. The name decides only if bytes cannot.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tranche/training/tokenize.h"

namespace tranche::training {

/// The number of bytes at a file's beginning that are examined.
inline constexpr std::int64_t content_head_bytes = 1 << 16;
/// Some editors write it at the beginning of a text in UTF-8.
inline constexpr std::string_view byte_order_mark = "\xef\xbb\xbf";

struct FileContent {
  enum class Kind : std::uint8_t {
    text,
    json_lines,  ///< one object per line
    llmc,        ///< tokens after llm.c's header
    safetensors,
    numbers,  ///< no known header, and a name that ends in .bin: nanoGPT's tokens
    other,    ///< neither text nor tokens, or text in an unsupported form
  };
  Kind kind = Kind::text;
  std::string what;    ///< for `other`: "compressed by gzip"; it continues "data file 'x' is"
  std::string remedy;  ///< for `other`: the remedy
};

/// Detects the kind of a file of `bytes` bytes from its first ones: all of them, or content_head_bytes.
///
/// An object at the beginning, even a truncated or faulty one, means JSON: the reader of the lines then
/// reports the fault. Text that only begins with a brace or a bracket is text, unless a quoted key and a
/// colon follow the brace. It never throws.
FileContent content_of(std::string_view path, std::string_view head, std::int64_t bytes);

/// The content if it looks like numbers of 64 bits, as numpy writes integers; they are tokens in no format.
std::optional<FileContent> numbers_of_64_bits(std::string_view path, std::string_view head,
                                              std::int64_t bytes);

/// True if a name means JSON lines: .jsonl, .ndjson and .jsonlines, in any case, also before .txt.
bool is_named_as_json_lines(std::string_view path);

/// True if a text file holds JSON lines, according to the requested format, or to its bytes. Throws
/// ConfigurationError, "WHAT 'PATH' is ...", for contents that are neither text nor JSON lines; `flag` names
/// the flag that accepts them anyway, like --data-format.
bool holds_json_lines(std::string_view what, const std::string& path, std::string_view head,
                      std::int64_t bytes, TextFormat format, std::string_view flag);

/// Reads the first bytes of a file: all of them, or content_head_bytes. Throws ConfigurationError.
std::string read_head(std::string_view what, const std::string& path);

}  // namespace tranche::training
