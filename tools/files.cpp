#include "tools/files.h"

#include <fmt/format.h>

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

}  // namespace

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
