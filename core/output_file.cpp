#include "core/output_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <optional>
#include <random>

#include "tranche/core/error.h"

namespace tranche::detail {

namespace {

constexpr std::size_t buffer_bytes = std::size_t{1} << 16;
constexpr int most_links = 40;  // the kernel's limit
constexpr int most_names = 100;

using Status = struct stat;

[[noreturn]] void refuse(const std::string& path, int error) {
  throw IoError(
      fmt::format("'{}' cannot be written: {}", path,
                  error == ENXIO ? "nobody reads this FIFO, or its device is gone" : std::strerror(error)),
      error);
}

/// The status of a file after following symbolic links; nullopt when there is none.
std::optional<Status> status_of(const std::string& path) {
  Status status{};
  if (::stat(path.c_str(), &status) == 0) return status;
  if (errno != ENOENT) refuse(path, errno);
  return std::nullopt;
}

bool same(const Status& a, const Status& b) {
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

/// The descriptor of standard output or error if it goes to this file; else -1. If the program opened the
/// file again, it would overwrite it from its beginning; if it replaced it, the printed text would be lost.
int standard_descriptor(const Status& status) {
  for (const int descriptor : {STDOUT_FILENO, STDERR_FILENO}) {
    Status own{};
    if (::fstat(descriptor, &own) == 0 && same(own, status)) return descriptor;
  }
  return -1;
}

bool is_replaced(const std::optional<Status>& there) {
  return !there || (S_ISREG(there->st_mode) && standard_descriptor(*there) < 0);
}

/// The name after following symbolic links. The last link may point to a file that does not exist yet.
std::string behind_links(const std::string& path) {
  std::string name = path;
  for (int links = 0; links < most_links; ++links) {
    std::array<char, 4096> text;
    const auto size = ::readlink(name.c_str(), text.data(), text.size());
    if (size < 0) return name;  // not a link, or missing
    const std::string to(text.data(), static_cast<std::size_t>(size));
    const std::size_t slash = name.rfind('/');
    name = to.starts_with('/') || slash == std::string::npos ? to : name.substr(0, slash + 1) + to;
  }
  refuse(path, ELOOP);
}

}  // namespace

OutputFile::OutputFile(const std::string& path) : path_(path) {
  const std::optional<Status> there = status_of(path);
  if (!is_replaced(there)) {
    open_as_it_stands();
    return;
  }
  target_ = behind_links(path);
  if (there) {
    const std::optional<Status> found = status_of(target_);
    if (!found || !same(*found, *there)) fail(ENOENT);  // links in /proc may name removed files
  }
  open_temporary();
  // The new file gets the permissions of the file that it replaces.
  if (there && ::fchmod(file_, there->st_mode & 07777) != 0) {
    const int error = errno;
    ::close(file_);
    ::unlink(temporary_.c_str());
    fail(error);
  }
}

OutputFile::~OutputFile() {
  if (file_ < 0) return;
  ::close(file_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void OutputFile::fail(int error) const {
  refuse(path_, error);
}

void OutputFile::open_as_it_stands() {
  if (const auto there = status_of(path_); there && standard_descriptor(*there) >= 0) {
    std::fflush(nullptr);  // keeps the order of text printed before
    file_ = ::fcntl(standard_descriptor(*there), F_DUPFD_CLOEXEC, 0);
  } else {
    // A blocking open of a FIFO would wait for a reader; writing to it later may block.
    file_ = ::open(path_.c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (file_ >= 0) ::fcntl(file_, F_SETFL, ::fcntl(file_, F_GETFL) & ~O_NONBLOCK);
  }
  if (file_ < 0) fail(errno);
}

void OutputFile::open_temporary() {
  std::random_device draw;
  for (int names = 0; names < most_names; ++names) {
    temporary_ = fmt::format("{}.{:08x}{:08x}.part", target_, draw(), draw());
    file_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (file_ >= 0) return;
    if (errno != EEXIST) break;
  }
  fail(errno);
}

void OutputFile::flush() {
  std::string_view rest = buffer_;
  while (!rest.empty()) {
    const auto written = ::write(file_, rest.data(), rest.size());
    if (written >= 0) {
      rest.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno != EINTR) {
      fail(errno);
    }
  }
  buffer_.clear();
}

void OutputFile::write(std::string_view text) {
  buffer_ += text;
  if (buffer_.size() >= buffer_bytes) flush();
}

void OutputFile::commit() {
  flush();
  if (!temporary_.empty() && ::fsync(file_) != 0) fail(errno);
  const int closed = ::close(file_), error = errno;
  file_ = -1;
  if (closed == 0 && (temporary_.empty() || std::rename(temporary_.c_str(), target_.c_str()) == 0)) return;
  const int reason = closed != 0 ? error : errno;
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
  fail(reason);
}

void write_output_file(const std::string& path, std::string_view content) {
  OutputFile file(path);
  file.write(content);
  file.commit();
}

void require_output_file(const std::string& path) {
  const std::optional<Status> there = status_of(path);
  if (is_replaced(there)) {
    const OutputFile file(path);
  } else if (S_ISDIR(there->st_mode)) {
    refuse(path, EISDIR);
  } else if (::access(path.c_str(), W_OK) != 0) {
    refuse(path, errno);
  }
}

}  // namespace tranche::detail
