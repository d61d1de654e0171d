#pragma once
/// The kind of a data file, as its bytes tell it. Names decide only where bytes cannot.

#include <cstdint>
#include <string>
#include <string_view>

#include "tranche/training/tokenize.h"

namespace tranche::training {

/// Bytes of a file's beginning that are looked at.
inline constexpr std::int64_t content_head_bytes = 1 << 16;
/// Some editors begin a text in UTF-8 with it.
inline constexpr std::string_view byte_order_mark = "\xef\xbb\xbf";

struct FileContent {
  enum class Kind : std::uint8_t {
    text,
    json_lines,  ///< an object a line
    llmc,        ///< tokens behind llm.c's header
    safetensors,
    numbers,  ///< no known header, and a name that ends in .bin: tokens as nanoGPT writes them
    other,    ///< neither text nor tokens, or text of a form that is not read
  };
  Kind kind = Kind::text;
  std::string what;    ///< of `other`: "compressed by gzip"; it goes on the words "data file 'x' is"
  std::string remedy;  ///< of `other`: what to do
};

/// Tells the kind of a file of `bytes` bytes from its first ones: all of them, or content_head_bytes.
///
/// An object at the beginning, even one that is cut off or has a mistake, is JSON: what reads the lines then
/// says where the mistake is. Text that only begins with a brace or a bracket is text, unless a quoted key
/// and a colon follow the brace. Nothing throws, whatever the bytes are.
FileContent content_of(std::string_view path, std::string_view head, std::int64_t bytes);

/// True where a name says that the file holds JSON lines: .jsonl, .ndjson and .jsonlines, in any case, also
/// before .txt.
bool is_named_as_json_lines(std::string_view path);

/// Whether a file of text holds JSON lines, by the format that was asked for, or by its bytes. Throws
/// ConfigurationError, "WHAT 'PATH' is ...", for what is neither text nor JSON lines; `flag` is the one that
/// takes it all the same, like --data-format.
bool holds_json_lines(std::string_view what, const std::string& path, std::string_view head,
                      std::int64_t bytes, TextFormat format, std::string_view flag);

/// The first bytes of a file: all of them, or content_head_bytes. Throws ConfigurationError.
std::string read_head(std::string_view what, const std::string& path);

}  // namespace tranche::training
