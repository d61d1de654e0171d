#include "tools/files.h"

#include <fmt/format.h>

#include <filesystem>
#include <system_error>

#include "core/output_file.h"
#include "offload/file_system.h"
#include "tranche/core/error.h"

namespace tranche::tools {

using detail::FileSystem;
using detail::join_path;
using detail::OpenMode;
using detail::posix_file_system;

namespace {

constexpr std::string_view probe_prefix = ".probe-";

std::string probe_of(const std::string& folder, std::int64_t token) {
  return join_path(folder, fmt::format("{}{:016x}", probe_prefix, token));
}

void remove_quietly(const std::string& path) noexcept {
  try {
    posix_file_system().remove(path);
  } catch (...) {  // it was not created, or the next run removes it
  }
}

CheckpointError not_written(std::string_view flag, const std::string& folder, const IoError& problem) {
  return CheckpointError(
      fmt::format("{} '{}' cannot be written: {}; nothing was trained yet", flag, folder, problem.message()));
}

/// True if both names lead to one place where a regular file is, or would be written.
bool same_file(const std::string& one, const std::string& other) {
  std::error_code none;
  if (one.empty() || other.empty()) return false;
  if (std::filesystem::exists(one, none) && !std::filesystem::is_regular_file(one, none)) return false;
  const auto place = [](const std::string& path) {
    std::error_code unknown;
    return std::filesystem::weakly_canonical(std::filesystem::absolute(path, unknown), unknown);
  };
  return place(one) == place(other);
}

}  // namespace

void require_apart(const std::vector<NamedFile>& written, const std::vector<NamedFile>& read) {
  for (std::size_t i = 0; i < written.size(); ++i) {
    const auto& [flag, path] = written[i];
    for (const NamedFile& other : read) {
      if (!same_file(path, other.path)) continue;
      throw ConfigurationError(
          fmt::format("{} '{}' would replace the file that {} reads; name another", flag, path, other.flag));
    }
    for (std::size_t k = 0; k < i; ++k) {
      if (!same_file(path, written[k].path)) continue;
      throw ConfigurationError(fmt::format("{} '{}' and {} '{}' are one file; name another for one of them",
                                           written[k].flag, written[k].path, flag, path));
    }
  }
}

void require_writable(const std::string& path, std::string_view flag) {
  if (path.empty()) return;
  try {
    detail::require_output_file(path);
  } catch (const IoError& problem) {
    throw ConfigurationError(fmt::format("{} {}", flag, problem.message()));
  }
}

void place_probe(const std::string& folder, std::string_view flag, std::int64_t token) {
  try {
    FileSystem& files = posix_file_system();
    files.create_directories(folder);
    (void)files.open(probe_of(folder, token), OpenMode::create_or_truncate);
  } catch (const IoError& problem) {
    throw not_written(flag, folder, problem);
  }
}

void clear_probes(const std::string& folder, std::int64_t token) noexcept {
  try {
    for (const detail::DirectoryEntry& entry : posix_file_system().list(folder)) {
      const std::string path = join_path(folder, entry.name);
      if (entry.name.starts_with(probe_prefix) && path != probe_of(folder, token)) remove_quietly(path);
    }
  } catch (...) {  // the next run removes them
  }
}

void require_probe(const std::string& folder, std::string_view flag, std::int64_t token, int rank) {
  const std::string probe = probe_of(folder, token), own = fmt::format("{}.{}", probe, rank);
  try {
    FileSystem& files = posix_file_system();
    if (!files.exists(probe)) {
      throw CheckpointError(
          fmt::format("{} '{}': rank {} does not see there what rank 0 wrote; give a folder that all nodes "
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
  remove_quietly(probe_of(folder, token));
}

}  // namespace tranche::tools
