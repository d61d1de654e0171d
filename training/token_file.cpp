#include "tranche/training/token_file.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <vector>

#include "checkpoint/digest.h"
#include "checkpoint/safetensors.h"
#include "core/closest_match.h"
#include "offload/file_system.h"
#include "training/file_content.h"
#include "training/token_parts.h"
#include "tranche/core/error.h"

namespace tranche::training {

namespace {

/// The two kinds of llm.c's header (dev/data/data_common.py there).
struct LlmcKind {
  std::int32_t magic, version;
  int width;
};
constexpr std::array<LlmcKind, 2> llmc_kinds{{{20240520, 1, 2}, {20240801, 7, 4}}};
constexpr std::int64_t llmc_header_bytes = 256 * 4;

constexpr std::int64_t page_bytes = 4096;
constexpr std::int64_t sampled_pages = 64;
constexpr std::int64_t piece_bytes = 1 << 20;

std::int32_t word(std::span<const std::uint8_t> header, std::size_t index) {
  std::int32_t value = 0;
  std::memcpy(&value, header.data() + index * 4, 4);
  return value;
}

struct Stamp {
  std::int64_t bytes = 0;
  std::int64_t changed = 0;  ///< nanoseconds since 1970
};

Stamp stamp_of(const detail::File& file) {
  struct stat status {};
  if (::fstat(file.native()->buffered, &status) != 0) {
    throw ConfigurationError(
        fmt::format("data file '{}' cannot be read: {}", file.path(), std::strerror(errno)));
  }
  return {status.st_size, std::int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec};
}

/// True when a modification time is reliable. A very recent one is not, because the system sets the time
/// before it copies a write's bytes, and several writes may have the same time.
bool has_settled(std::int64_t changed) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::abs(std::chrono::nanoseconds(now).count() - changed) > 2'000'000'000;
}

}  // namespace

std::string_view name_of(DataFormat format) {
  constexpr std::array<std::string_view, 6> names{"auto", "text", "llmc", "nanogpt", "uint32", "safetensors"};
  return names[static_cast<std::size_t>(format)];
}

DataFormat parse_data_format(std::string_view text) {
  for (const auto format : {DataFormat::automatic, DataFormat::text, DataFormat::llmc, DataFormat::nanogpt,
                            DataFormat::uint32, DataFormat::safetensors}) {
    if (text == name_of(format)) return format;
  }
  const std::string closest =
      detail::closest_match(text, {"auto", "text", "llmc", "nanogpt", "uint32", "safetensors"});
  throw ConfigurationError(
      fmt::format("data format '{}' is not one of auto, text, llmc, nanogpt, uint32, safetensors{}", text,
                  closest.empty() ? "" : "; did you mean " + closest + "?"));
}

TokenFile::TokenFile(const std::string& path, DataFormat format) : path_(path), format_(format) {
  const auto fail = [&](const std::string& why) {
    throw ConfigurationError(fmt::format("data file '{}' {}", path_, why));
  };
  std::error_code ignored;
  if (const auto status = std::filesystem::status(path, ignored);
      std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {
    fail(std::filesystem::is_directory(status)
             ? fmt::format("is not a file but a folder; a pattern names its files, such as '{}'",
                           (std::filesystem::path(path) / "*.bin").string())
             : std::string("is not a file"));
  }
  try {
    file_ = detail::posix_file_system().open(path, detail::OpenMode::read);
  } catch (const IoError& problem) {
    fail(fmt::format("cannot be opened: {}{}", std::strerror(problem.code()),
                     problem.code() == EMFILE
                         ? "; every data file stays open: raise `ulimit -n`, or put many files "
                           "into one with tranche tokenize"
                         : ""));
  }
  const Stamp stamp = stamp_of(*file_);
  bytes_ = stamp.bytes;
  if (has_settled(stamp.changed)) changed_ = stamp.changed;
  if (bytes_ == 0) fail("is empty; give a text file, or tokens as llm.c or nanoGPT write them");
  digest_ = take_digest();

  std::vector<std::uint8_t> header(static_cast<std::size_t>(std::min(content_head_bytes, bytes_)));
  read_bytes(0, header);
  if (format_ == DataFormat::automatic) choose_format(header);
  if (format_ == DataFormat::nanogpt || format_ == DataFormat::uint32) {
    const auto wide =
        numbers_of_64_bits(path_, {reinterpret_cast<const char*>(header.data()), header.size()}, bytes_);
    if (wide) fail(fmt::format("is {}; {}", wide->what, wide->remedy));
  }
  header.resize(std::max<std::size_t>(header.size(), 12));  // for llm.c's header
  const auto* const kind = std::find_if(llmc_kinds.begin(), llmc_kinds.end(), [&](const LlmcKind& each) {
    return bytes_ >= 4 && word(header, 0) == each.magic;
  });
  const bool magic = kind != llmc_kinds.end();
  if (format_ == DataFormat::text) {
    size_ = bytes_;
  } else if (format_ == DataFormat::safetensors) {
    open_safetensors();
  } else if (format_ == DataFormat::nanogpt) {
    width_ = 2;
    if (bytes_ % 2 != 0) {
      fail(fmt::format("holds {} bytes, an odd number: it is not the uint16 tokens of nanoGPT", bytes_));
    }
    size_ = bytes_ / 2;
  } else if (format_ == DataFormat::uint32) {
    width_ = 4;
    if (bytes_ % 4 != 0) {
      fail(fmt::format("holds {} bytes, no multiple of 4: it is not tokens of 32 bits", bytes_));
    }
    size_ = bytes_ / 4;
  } else {
    if (!magic) {
      fail(fmt::format("does not begin with llm.c's magic number {} or {}", llmc_kinds[0].magic,
                       llmc_kinds[1].magic));
    }
    width_ = kind->width;
    if (bytes_ < llmc_header_bytes)
      fail(fmt::format("ends within llm.c's header of {} bytes", llmc_header_bytes));
    if (word(header, 1) != kind->version) {
      fail(
          fmt::format("is of llm.c's version {}; version {} (uint{} tokens) can be read with magic number {}",
                      word(header, 1), kind->version, 8 * kind->width, kind->magic));
    }
    size_ = word(header, 2);
    if (size_ < 1 || llmc_header_bytes + width_ * size_ != bytes_) {
      fail(fmt::format(
          "says that it holds {} tokens, but there are {} bytes after its header; it is damaged or "
          "cut off",
          size_, bytes_ - llmc_header_bytes));
    }
    begin_ = llmc_header_bytes;
  }
}

void TokenFile::choose_format(std::span<const std::uint8_t> head) {
  const std::string_view text(reinterpret_cast<const char*>(head.data()), head.size());
  const FileContent content = content_of(path_, text, bytes_);
  const auto refuse = [&](std::string_view what, std::string_view remedy, std::string_view otherwise) {
    throw ConfigurationError(fmt::format("data file '{}' is {}; {}; {}", path_, what, remedy, otherwise));
  };
  using Kind = FileContent::Kind;
  by_ending_ = content.kind == Kind::numbers;
  switch (content.kind) {
    case Kind::text:
      format_ = DataFormat::text;
      break;
    case Kind::llmc:
      format_ = DataFormat::llmc;
      break;
    case Kind::numbers:
      format_ = DataFormat::nanogpt;
      break;
    case Kind::safetensors:
      format_ = DataFormat::safetensors;
      break;
    case Kind::json_lines:
      refuse(
          "JSON lines, each a document",
          fmt::format("make tokens of them first: tranche tokenize --data '{}' --out '{}.safetensors' (and "
                      "--tokenizer FOLDER, the model's)",
                      path_, path_),
          "--data-format text takes every byte of the file as a token all the same");
      break;
    case Kind::other: {
      const bool wide = numbers_of_64_bits(path_, text, bytes_).has_value();
      refuse(content.what, content.remedy,
             fmt::format("--data-format {} takes its bytes as they are all the same",
                         wide ? "text" : "text, nanogpt or uint32"));
    }
  }
}

void TokenFile::open_safetensors() {
  const auto fail = [&](const std::string& why) {
    throw ConfigurationError(fmt::format("data file '{}' {}", path_, why));
  };
  try {
    const checkpoint::SafetensorsFolder folder(detail::posix_file_system(), path_);
    const checkpoint::SafeTensor* tokens = folder.find("tokens");
    const bool known = tokens != nullptr && tokens->elements > 0 &&
                       (tokens->dtype == "U8" || tokens->dtype == "U16" || tokens->dtype == "U32");
    if (!known) fail("has no array \"tokens\" of U8, U16 or U32: it is not what tranche tokenize writes");
    made_by_ = {folder.metadata(stamp_key), folder.metadata(stamp_files_key)};
    width_ = tokens->dtype == "U8" ? 1 : tokens->dtype == "U16" ? 2 : 4;
    size_ = tokens->elements;
    begin_ = tokens->begin;
    if (const checkpoint::SafeTensor* targets = folder.find("targets")) {
      if (targets->dtype != "U8" || targets->elements != size_)
        fail("has other \"targets\" than a U8 a token");
      targets_begin_ = targets->begin;
    }
    if (const checkpoint::SafeTensor* ends = folder.find("document_ends")) {
      if (ends->dtype != "I64" || ends->elements == 0) fail("has other \"document_ends\" than I64");
      document_ends_.resize(static_cast<std::size_t>(ends->elements));
      file_->read(ends->begin, document_ends_.data(), ends->end - ends->begin);
    }
  } catch (const CheckpointError& problem) {
    fail(fmt::format("is no safetensors file: {}", problem.message()));
  } catch (const IoError& problem) {
    fail(fmt::format("cannot be read: {}", problem.message()));
  }
  std::int64_t before = 0;
  for (const std::int64_t end : document_ends_) {
    if (end <= before)
      fail(fmt::format("has a document that ends at {} behind one that ends at {}", end, before));
    before = end;
  }
  if (!document_ends_.empty() && before != size_) {
    fail(fmt::format("has {} tokens, but its last document ends at {}", size_, before));
  }
}

void TokenFile::refuse_cut(std::int64_t missing) const {
  throw ConfigurationError(fmt::format(
      "data file '{}' was cut off while it was in use: it had {} bytes, and byte {} is not there any "
      "more; put the whole file back, and start again (--resume latest goes on from a checkpoint)",
      path_, bytes_, missing));
}

void TokenFile::fetch(std::int64_t offset, std::span<std::uint8_t> into) const {
  const auto count = static_cast<std::int64_t>(into.size());
  try {
    file_->read(offset, into.data(), count);
  } catch (const IoError& problem) {
    if (problem.code() == 0) refuse_cut(offset + count - 1);
    throw ConfigurationError(fmt::format("data file '{}' could not be read at bytes {} to {}: {}", path_,
                                         offset, offset + count - 1, std::strerror(problem.code())));
  }
}

std::string TokenFile::take_digest() const {
  std::vector<std::uint8_t> piece(static_cast<std::size_t>(std::min(piece_bytes, bytes_)));
  std::vector<std::uint64_t> digests{static_cast<std::uint64_t>(bytes_)};
  const auto add = [&](std::int64_t offset, std::int64_t count) {
    const std::span part = std::span(piece).first(static_cast<std::size_t>(count));
    fetch(offset, part);
    digests.push_back(checkpoint::digest_of(std::as_bytes(part)));
  };
  if (bytes_ <= largest_whole_digest) {
    for (std::int64_t at = 0; at < bytes_; at += piece_bytes) add(at, std::min(piece_bytes, bytes_ - at));
  } else {
    for (std::int64_t page = 0; page < sampled_pages; ++page) {
      add((bytes_ - page_bytes) * page / (sampled_pages - 1), page_bytes);
    }
  }
  return checkpoint::to_hex(checkpoint::block_digest(digests));
}

void TokenFile::read_bytes(std::int64_t offset, std::span<std::uint8_t> into) const {
  fetch(offset, into);
  // The time is checked afterwards: any write before these bytes were read has changed it by now.
  const Stamp now = stamp_of(*file_);
  if (now.bytes < bytes_) refuse_cut(now.bytes);
  if (now.changed == changed_) return;
  // The time can change without the bytes, and a file that grew still has its old beginning.
  if (const std::string digest = take_digest(); digest != digest_) {
    throw ConfigurationError(
        fmt::format("data file '{}' was written to while it was in use: the digest of its bytes was {} and "
                    "now is {}; start again with data that stays as it is (a new file renamed over the old "
                    "one harms no run)",
                    path_, digest_, digest));
  }
  if (has_settled(now.changed)) changed_ = now.changed;
}

void TokenFile::check_range(std::int64_t first, std::int64_t count) const {
  if (first >= 0 && count >= 0 && count <= size_ - first) return;
  throw InvalidArgument(
      fmt::format("'{}' holds {} tokens; {} from {} on are not among them", path_, size_, count, first));
}

void TokenFile::read(std::int64_t first, std::span<std::int32_t> into, std::int64_t vocabulary) const {
  check_range(first, static_cast<std::int64_t>(into.size()));
  const auto width = static_cast<std::size_t>(width_);
  std::vector<std::uint8_t> bytes(into.size() * width);
  read_bytes(begin_ + first * width_, bytes);
  // A 32-bit type holds every token of any width; values above INT32_MAX exceed every vocabulary.
  const auto token_at = [&](std::size_t i) {
    std::uint32_t token = 0;
    std::memcpy(&token, bytes.data() + width * i, width);
    return token;
  };
  std::uint32_t highest = 0;
  const auto convert = [&](auto constant) {
    using Token = decltype(constant);
    for (std::size_t i = 0; i < into.size(); ++i) {
      Token token = 0;
      std::memcpy(&token, bytes.data() + sizeof(Token) * i, sizeof(Token));
      into[i] = static_cast<std::int32_t>(token);
      highest = std::max<std::uint32_t>(highest, token);
    }
  };
  if (width_ == 1) convert(std::uint8_t{});
  if (width_ == 2) convert(std::uint16_t{});
  if (width_ == 4) convert(std::uint32_t{});
  if (highest < vocabulary) return;
  std::size_t culprit = 0;
  while (token_at(culprit) < vocabulary) ++culprit;
  throw ConfigurationError(fmt::format(
      "data file '{}' holds token {} at position {}, but the model's vocabulary is {}; choose another "
      "model, or the file's right format with --data-format (now {})",
      path_, token_at(culprit), first + static_cast<std::int64_t>(culprit), vocabulary, name_of(format_)));
}

void TokenFile::read_targets(std::int64_t first, std::span<std::uint8_t> into) const {
  check_range(first, static_cast<std::int64_t>(into.size()));
  if (targets_begin_ == 0) {
    std::fill(into.begin(), into.end(), std::uint8_t{1});
  } else {
    read_bytes(targets_begin_ + first, into);
  }
}

void TokenFile::require_within(std::int64_t vocabulary, std::int64_t count) const {
  if (by_ending_ && vocabulary > possible_vocabulary()) {
    throw ConfigurationError(
        fmt::format("data file '{}' is tokens without a header, and the model's vocabulary of {} exceeds 16 "
                    "bits: say with --data-format whether its tokens have 16 bits (nanogpt) or 32 (uint32)",
                    path_, vocabulary));
  }
  if (vocabulary >= possible_vocabulary()) return;
  count = std::min(count, size_);
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(std::min(piece_bytes / 4, count)));
  for (std::int64_t first = 0; first < count; first += piece_bytes / 4) {
    read(first, std::span(tokens).first(static_cast<std::size_t>(std::min(piece_bytes / 4, count - first))),
         vocabulary);
  }
}

void TokenFile::read_text(std::int64_t first, std::int64_t count,
                          const std::function<void(std::span<const std::uint8_t>)>& visit) const {
  if (format_ != DataFormat::text) {
    throw InvalidArgument(fmt::format("'{}' holds tokens, not text", path_));
  }
  check_range(first, count);
  std::vector<std::uint8_t> piece(static_cast<std::size_t>(std::min(piece_bytes, count)));
  for (const std::int64_t end = first + count; first < end;) {
    const std::span part =
        std::span(piece).first(static_cast<std::size_t>(std::min(piece_bytes, end - first)));
    read_bytes(first, part);
    visit(part);
    first += static_cast<std::int64_t>(part.size());
  }
}

}  // namespace tranche::training
