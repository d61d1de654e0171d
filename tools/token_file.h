#pragma once
/// Files of tokens, mapped into memory.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace tranche::tools {

/// automatic: llm.c by its magic number, nanoGPT by the ending .bin, else text.
enum class DataFormat : std::uint8_t { automatic, text, llmc, nanogpt };
std::string_view name_of(DataFormat format);
/// "auto", "text", "llmc", "nanogpt"; throws ConfigurationError naming them.
DataFormat parse_data_format(std::string_view text);

/// A file of tokens, read-only and mapped: nothing is read before it is used. Formats:
/// - text: every byte is a token, vocabulary 256;
/// - llmc: as llm.c writes it: 256 int32 of header (magic 20240520, version 1, token count), then uint16;
/// - nanogpt: as nanoGPT writes it: uint16 from the first byte on.
class TokenFile {
 public:
  /// Throws ConfigurationError naming the file when it is missing, empty, cut off, or not of the format.
  explicit TokenFile(const std::string& path, DataFormat format = DataFormat::automatic);

  const std::string& path() const noexcept { return path_; }
  DataFormat format() const noexcept { return format_; }
  std::int64_t size() const noexcept { return size_; }
  /// The largest number that a token of the format can have, plus one.
  std::int64_t possible_vocabulary() const noexcept { return format_ == DataFormat::text ? 256 : 65536; }
  /// Token at a position; throws InvalidArgument outside of the file.
  std::int32_t operator[](std::int64_t position) const;
  /// Tokens [first, first + into.size()). Throws ConfigurationError, naming file, position and value, for a
  /// token that is not below `vocabulary`.
  void read(std::int64_t first, std::span<std::int32_t> into, std::int64_t vocabulary) const;
  /// Looks at the first `count` tokens (all by default) and throws as read() does.
  void require_within(std::int64_t vocabulary, std::int64_t count = INT64_MAX) const;
  /// The bytes of a text file; throws InvalidArgument for other formats.
  std::span<const std::uint8_t> bytes() const;

 private:
  struct Mapping;
  [[noreturn]] void refuse(std::int64_t position, std::int64_t vocabulary) const;
  std::string path_;
  DataFormat format_;
  std::shared_ptr<const Mapping> mapping_;
  const void* tokens_ = nullptr;
  std::int64_t size_ = 0;
};

/// A stretch [begin, begin + size) of a file.
struct TokenRange {
  const TokenFile* file = nullptr;
  std::int64_t begin = 0;
  std::int64_t size = 0;
};

}  // namespace tranche::tools
