#include "tranche/tools/token_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "tranche/core/error.h"
#include "tranche/core/nearest.h"
#include "tranche/engine/config.h"

namespace tranche::tools {

namespace {

constexpr std::int32_t llmc_magic = 20240520;
constexpr std::int32_t llmc_version = 1;
constexpr std::int64_t llmc_header_bytes = 256 * 4;

class Descriptor {
 public:
  explicit Descriptor(const std::string& path) : fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const noexcept { return fd_; }

 private:
  int fd_;
};

std::int32_t word(const void* header, std::size_t index) {
  std::int32_t value = 0;
  std::memcpy(&value, static_cast<const char*>(header) + index * 4, 4);
  return value;
}

}  // namespace

struct TokenFile::Mapping {
  void* data = nullptr;
  std::size_t bytes = 0;
  Mapping(void* address, std::size_t length) : data(address), bytes(length) {}
  ~Mapping() { ::munmap(data, bytes); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
};

std::string_view name_of(DataFormat format) {
  constexpr std::array<std::string_view, 4> names{"auto", "text", "llmc", "nanogpt"};
  return names[static_cast<std::size_t>(format)];
}

DataFormat parse_data_format(std::string_view text) {
  for (const auto format : {DataFormat::automatic, DataFormat::text, DataFormat::llmc, DataFormat::nanogpt}) {
    if (text == name_of(format)) return format;
  }
  const std::string near = nearest(text, {"auto", "text", "llmc", "nanogpt"});
  throw ConfigurationError(fmt::format("data format '{}' is not one of auto, text, llmc, nanogpt{}", text,
                                       near.empty() ? "" : "; did you mean " + near + "?"));
}

TokenFile::TokenFile(const std::string& path, DataFormat format) : path_(path), format_(format) {
  const auto fail = [&](const std::string& why) {
    throw ConfigurationError(fmt::format("data file '{}' {}", path_, why));
  };
  const Descriptor file(path);
  if (file.get() < 0) fail(fmt::format("cannot be opened: {}", std::strerror(errno)));
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) fail(fmt::format("cannot be read: {}", std::strerror(errno)));
  if (!S_ISREG(status.st_mode)) fail("is not a file");
  const auto bytes = static_cast<std::int64_t>(status.st_size);
  if (bytes == 0) fail("is empty; give a text file, or tokens as llm.c or nanoGPT write them");
  void* data = ::mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (data == MAP_FAILED) fail(fmt::format("cannot be mapped: {}", std::strerror(errno)));
  mapping_ = std::make_shared<Mapping>(data, static_cast<std::size_t>(bytes));

  const bool magic = bytes >= 4 && word(data, 0) == llmc_magic;
  if (format_ == DataFormat::automatic) {
    format_ = magic ? DataFormat::llmc : path_.ends_with(".bin") ? DataFormat::nanogpt : DataFormat::text;
  }
  tokens_ = data;
  if (format_ == DataFormat::text) {
    size_ = bytes;
  } else if (format_ == DataFormat::nanogpt) {
    if (bytes % 2 != 0) {
      fail(fmt::format("holds {} bytes, an odd number: it is not the uint16 tokens of nanoGPT", bytes));
    }
    size_ = bytes / 2;
  } else {
    if (!magic) fail(fmt::format("does not begin with llm.c's magic number {}", llmc_magic));
    if (bytes < llmc_header_bytes)
      fail(fmt::format("ends within llm.c's header of {} bytes", llmc_header_bytes));
    if (word(data, 1) != llmc_version) {
      fail(fmt::format("is of llm.c's version {}; version {} (uint16 tokens) can be read", word(data, 1),
                       llmc_version));
    }
    size_ = word(data, 2);
    if (size_ < 1 || llmc_header_bytes + 2 * size_ != bytes) {
      fail(fmt::format(
          "says that it holds {} tokens, but there are {} bytes after its header; it is damaged or "
          "cut off",
          size_, bytes - llmc_header_bytes));
    }
    tokens_ = static_cast<const char*>(data) + llmc_header_bytes;
  }
}

std::int32_t TokenFile::operator[](std::int64_t position) const {
  if (position < 0 || position >= size_) {
    throw InvalidArgument(
        fmt::format("'{}' holds {} tokens; there is no position {}", path_, size_, position));
  }
  const auto at = static_cast<std::size_t>(position);
  if (format_ == DataFormat::text) return static_cast<const std::uint8_t*>(tokens_)[at];
  return static_cast<const std::uint16_t*>(tokens_)[at];
}

void TokenFile::refuse(std::int64_t position, std::int64_t vocabulary) const {
  throw ConfigurationError(fmt::format(
      "data file '{}' holds token {} at position {}, but the model's vocabulary is {}; choose another "
      "model, or the file's right format with --data-format (now {})",
      path_, (*this)[position], position, vocabulary, name_of(format_)));
}

void TokenFile::read(std::int64_t first, std::span<std::int32_t> into, std::int64_t vocabulary) const {
  const auto count = static_cast<std::int64_t>(into.size());
  if (first < 0 || count > size_ - first) {
    throw InvalidArgument(
        fmt::format("'{}' holds {} tokens; {} from {} on are not among them", path_, size_, count, first));
  }
  std::int32_t highest = 0;
  const auto copy = [&](const auto* tokens) {
    for (std::size_t i = 0; i < into.size(); ++i) {
      into[i] = tokens[i];
      highest = std::max(highest, into[i]);
    }
  };
  if (format_ == DataFormat::text) {
    copy(static_cast<const std::uint8_t*>(tokens_) + first);
  } else {
    copy(static_cast<const std::uint16_t*>(tokens_) + first);
  }
  if (highest < vocabulary) return;
  const auto culprit =
      std::find_if(into.begin(), into.end(), [&](std::int32_t token) { return token >= vocabulary; });
  refuse(first + (culprit - into.begin()), vocabulary);
}

void TokenFile::require_within(std::int64_t vocabulary, std::int64_t count) const {
  if (vocabulary >= possible_vocabulary()) return;
  count = std::min(count, size_);
  const auto scan = [&](const auto* tokens) {
    // In blocks, so that the maximum is taken without branches and the search is short.
    constexpr std::int64_t block = 1 << 14;
    for (std::int64_t begin = 0; begin < count; begin += block) {
      const std::int64_t end = std::min(begin + block, count);
      if (*std::max_element(tokens + begin, tokens + end) < vocabulary) continue;
      for (std::int64_t i = begin; i < end; ++i) {
        if (tokens[i] >= vocabulary) refuse(i, vocabulary);
      }
    }
  };
  if (format_ == DataFormat::text) {
    scan(static_cast<const std::uint8_t*>(tokens_));
  } else {
    scan(static_cast<const std::uint16_t*>(tokens_));
  }
}

std::span<const std::uint8_t> TokenFile::bytes() const {
  if (format_ != DataFormat::text) {
    throw InvalidArgument(fmt::format("'{}' holds tokens, not text", path_));
  }
  return {static_cast<const std::uint8_t*>(tokens_), static_cast<std::size_t>(size_)};
}

}  // namespace tranche::tools
