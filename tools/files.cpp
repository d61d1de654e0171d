#include "tranche/tools/files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "tranche/core/error.h"

namespace tranche::tools {

namespace {

[[noreturn]] void fail(const std::string& path, int error) {
  throw ConfigurationError(fmt::format("'{}' cannot be written: {}", path, std::strerror(error)));
}

std::string temporary_of(const std::string& path) {
  return fmt::format("{}.{}.part", path, ::getpid());
}

}  // namespace

void write_file_atomically(const std::string& path, std::string_view content) {
  const std::string temporary = temporary_of(path);
  const int file = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file < 0) fail(path, errno);
  int error = 0;
  while (!content.empty() && error == 0) {
    const auto written = ::write(file, content.data(), content.size());
    if (written >= 0) {
      content.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno != EINTR) {
      error = errno;
    }
  }
  if (error == 0 && ::fsync(file) != 0) error = errno;
  if (::close(file) != 0 && error == 0) error = errno;
  if (error == 0 && std::rename(temporary.c_str(), path.c_str()) != 0) error = errno;
  if (error == 0) return;
  ::unlink(temporary.c_str());
  fail(path, error);
}

void require_writable(const std::string& path, std::string_view flag) {
  if (path.empty()) return;
  const std::string temporary = temporary_of(path);
  const int file = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  if (file < 0) {
    throw ConfigurationError(fmt::format("{} '{}' cannot be written: {}", flag, path, std::strerror(errno)));
  }
  ::close(file);
  ::unlink(temporary.c_str());
}

std::string path_of_rank(const std::string& path, int rank, int ranks) {
  if (ranks == 1) return path;
  const std::filesystem::path whole(path);
  return whole.parent_path() /
         fmt::format("{}.rank{}{}", whole.stem().string(), rank, whole.extension().string());
}

}  // namespace tranche::tools
