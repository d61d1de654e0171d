#include "tranche/tools/files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "tranche/core/error.h"
#include "tranche/offload/file_system.h"

namespace tranche::tools {

namespace {

[[noreturn]] void fail(const std::string& path, int error) {
  throw ConfigurationError(fmt::format("'{}' cannot be written: {}", path, std::strerror(error)));
}

std::string temporary_of(const std::string& path) {
  return fmt::format("{}.{}.part", path, ::getpid());
}

std::string probe_of(const std::string& folder, std::int64_t token) {
  return join_path(folder, fmt::format(".probe-{:016x}", token));
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

void place_probe(const std::string& folder, std::string_view flag, std::int64_t token) {
  try {
    FileSystem& files = posix_file_system();
    files.create_directories(folder);
    (void)files.open(probe_of(folder, token), OpenMode::create_or_truncate);
  } catch (const IoError& problem) {
    throw CheckpointError(fmt::format("{} '{}' cannot be written: {}; nothing was trained yet", flag, folder,
                                      problem.message()));
  }
}

void require_probe(const std::string& folder, std::string_view flag, std::int64_t token, int rank) {
  const std::string probe = probe_of(folder, token), own = fmt::format("{}.{}", probe, rank);
  try {
    FileSystem& files = posix_file_system();
    if (!files.exists(probe)) {
      throw CheckpointError(
          fmt::format("{} '{}': rank {} does not see there what rank 0 wrote; give a folder that all hosts "
                      "share, by a path that means the same on all of them",
                      flag, folder, rank));
    }
    (void)files.open(own, OpenMode::create_or_truncate);
    files.remove(own);
  } catch (const IoError& problem) {
    throw CheckpointError(fmt::format("{} '{}' cannot be written by rank {}: {}; nothing was trained yet",
                                      flag, folder, rank, problem.message()));
  }
}

void remove_probe(const std::string& folder, std::int64_t token) noexcept {
  try {
    posix_file_system().remove(probe_of(folder, token));
  } catch (...) {  // it never came to be
  }
}

std::string path_of_rank(const std::string& path, int rank, int ranks) {
  if (ranks == 1) return path;
  const std::filesystem::path whole(path);
  return whole.parent_path() /
         fmt::format("{}.rank{}{}", whole.stem().string(), rank, whole.extension().string());
}

}  // namespace tranche::tools
