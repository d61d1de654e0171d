#pragma once
/// Files of tokens, read piece by piece.

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tranche/training/tokenizer.h"

namespace tranche::detail {
class File;
}

namespace tranche::training {

/// automatic: detected by the file's bytes; nanoGPT's format, which has no header, by the ending .bin. Files
/// that are neither text nor tokens are refused by name, including JSON lines.
enum class DataFormat : std::uint8_t { automatic, text, llmc, nanogpt, uint32, safetensors };
std::string_view name_of(DataFormat format);
/// "auto", "text", "llmc", "nanogpt", "uint32", "safetensors"; throws ConfigurationError naming them.
DataFormat parse_data_format(std::string_view text);

/// The digest of a file up to this size covers all its bytes, that of a larger one samples.
inline constexpr std::int64_t largest_whole_digest = std::int64_t{64} << 20;

/// A file of tokens. It stays open, so that renaming a new file over its name has no effect. Every access
/// reads from the file and throws ConfigurationError, naming it, when it cannot be read any more, was
/// truncated, or has other bytes than when it was opened (according to digest()). Formats:
/// - text: every byte is a token, vocabulary 256;
/// - llmc: llm.c's format: 256 int32 of header (magic, version, token count), then the tokens: uint16 with
///   magic 20240520 and version 1, uint32 with magic 20240801 and version 7;
/// - nanogpt: nanoGPT's format: uint16 from the first byte on;
/// - uint32: the same with four bytes per token, for vocabularies beyond 65,536;
/// - safetensors: the format of `tranche tokenize`: arrays "tokens" (U8 for bytes, U16 or U32),
///   "document_ends" (I64) and "targets" (U8); the last two may be missing.
class TokenFile {
 public:
  /// Throws ConfigurationError naming the file when it is missing, empty, truncated, or not of the format;
  /// with DataFormat::automatic also, with a remedy, for contents that are neither text nor tokens
  /// (compressed files, parquet, JSON lines, text in UTF-16, ...).
  explicit TokenFile(const std::string& path, DataFormat format = DataFormat::automatic);

  const std::string& path() const noexcept { return path_; }
  DataFormat format() const noexcept { return format_; }
  std::int64_t size() const noexcept { return size_; }
  /// A digest of the file's size and of its bytes when it was opened, in 16 hexadecimal digits. For files
  /// larger than largest_whole_digest it covers 64 pages of 4 KiB: the first, the last and others evenly
  /// between them.
  const std::string& digest() const noexcept { return digest_; }
  /// The largest number that a token of the format can have, plus one.
  std::int64_t possible_vocabulary() const noexcept { return std::int64_t{1} << 8 * width_; }
  /// The bytes of a token: 1, 2 or 4.
  int width() const noexcept { return width_; }
  /// Reads tokens [first, first + into.size()). Throws ConfigurationError, naming file, position and value,
  /// for a token that is not below `vocabulary`, and InvalidArgument outside of the file.
  void read(std::int64_t first, std::span<std::int32_t> into, std::int64_t vocabulary) const;
  /// The tokenizer that made a file of tranche tokenize's, if the file names it.
  const TokenizerStamp& made_by() const noexcept { return made_by_; }
  /// For each document the index after its last token, ascending; empty: the file has no document boundaries.
  std::span<const std::int64_t> document_ends() const noexcept { return document_ends_; }
  bool has_targets() const noexcept { return targets_begin_ > 0; }
  /// For each of tokens [first, first + into.size()) whether it is learned: 1 everywhere if the file has no
  /// targets. Throws as read().
  void read_targets(std::int64_t first, std::span<std::uint8_t> into) const;
  /// Checks the first `count` tokens (all by default) and throws as read() does. It also throws if the format
  /// was detected by the ending alone and the vocabulary exceeds its 16 bits: the tokens may have 32.
  void require_within(std::int64_t vocabulary, std::int64_t count = INT64_MAX) const;
  /// Calls `visit` with bytes [first, first + count) of a text file, in order and in pieces. Throws
  /// InvalidArgument for other formats and outside of the file.
  void read_text(std::int64_t first, std::int64_t count,
                 const std::function<void(std::span<const std::uint8_t>)>& visit) const;

 private:
  void choose_format(std::span<const std::uint8_t> head);
  void open_safetensors();
  void check_range(std::int64_t first, std::int64_t count) const;
  [[noreturn]] void refuse_cut(std::int64_t missing) const;
  void fetch(std::int64_t offset, std::span<std::uint8_t> into) const;
  std::string take_digest() const;
  /// Calls fetch() and checks that the file has not changed.
  void read_bytes(std::int64_t offset, std::span<std::uint8_t> into) const;
  std::string path_;
  DataFormat format_;
  std::shared_ptr<detail::File> file_;
  std::int64_t bytes_ = 0;  ///< of the file when it was opened
  std::int64_t begin_ = 0;  ///< of the first token
  std::int64_t size_ = 0;
  int width_ = 1;
  bool by_ending_ = false;  ///< detected by the file's name
  std::vector<std::int64_t> document_ends_;
  std::int64_t targets_begin_ = 0;  ///< of the first byte of the targets; 0: there are none
  TokenizerStamp made_by_;
  std::string digest_;
  /// The modification time for which the digest is known to hold; 0: none yet.
  mutable std::int64_t changed_ = 0;
};

/// A range [begin, begin + size) of a file.
struct TokenRange {
  const TokenFile* file = nullptr;
  std::int64_t begin = 0;
  std::int64_t size = 0;
};

}  // namespace tranche::training
