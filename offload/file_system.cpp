// Operations that every file system implements by its basic ones.
#include "offload/file_system.h"

#include <fmt/core.h>

#include <cerrno>
#include <random>

#include "offload/io_failure.h"
#include "tranche/core/error.h"

namespace tranche::detail {
namespace {

constexpr std::string_view temporary_mark = ".new-";

// Only entries that list() reports as folders are emptied: a link to a folder is a name to remove.
std::int64_t remove_entry(FileSystem& files, const std::string& path, bool is_directory) {
  std::int64_t removed = 0;
  if (is_directory) {
    for (const DirectoryEntry& entry : files.list(path)) {
      removed += remove_entry(files, join_path(path, entry.name), entry.is_directory);
    }
  }
  files.remove(path);
  return removed + 1;
}

}  // namespace

std::int64_t FileSystem::size(const std::string& path) {
  const auto there = status(path);
  if (!there) throw_io_error({"looking up", path, ENOENT, -1, 0});
  return there->bytes;
}

void FileSystem::create_directories(const std::string& path) {
  const auto there = status(path);
  if (there && there->is_directory) return;
  const std::string parent = parent_path(path);
  if (parent != path) create_directories(parent);
  // Another rank may have made the folder first; the call still makes its name durable.
  create_directory(path);
  sync_directory(parent);
}

std::int64_t FileSystem::remove_all(const std::string& path) {
  if (!exists(path)) return 0;
  std::string name = path;
  while (name.size() > 1 && name.back() == '/') name.pop_back();
  const std::string last = name.substr(name.find_last_of('/') + 1);
  for (const DirectoryEntry& entry : list(parent_path(name))) {
    if (entry.name == last) return remove_entry(*this, name, entry.is_directory);
  }
  return remove_entry(*this, name, status(name)->is_directory);  // names such as "."
}

std::string FileSystem::read_file(const std::string& path, std::int64_t most_bytes) {
  const auto file = open(path, OpenMode::read);
  const std::int64_t size = file->size();
  if (size > most_bytes) {
    throw IoError(
        fmt::format("read of '{}' failed: it has {} B, and such a file has {} B at most; it is damaged, "
                    "or not what its name says",
                    path, size, most_bytes),
        EFBIG);
  }
  std::string content(static_cast<std::size_t>(size), '\0');
  file->read(0, content.data(), size);
  return content;
}

void FileSystem::replace_file(const std::string& path, std::string_view content) {
  const std::string temporary = temporary_name(path);
  const auto file = open(temporary, OpenMode::create_new);
  try {
    file->write(0, content.data(), static_cast<std::int64_t>(content.size()));
    file->sync();
    rename(temporary, path);
  } catch (const IoError&) {
    try {
      remove(temporary);
    } catch (const IoError&) {  // only the first failure is reported
    }
    throw;
  }
  sync_directory(parent_path(path));
}

std::string temporary_name(const std::string& path) {
  std::random_device random;
  const std::uint64_t draw = (std::uint64_t{random()} << 32) | random();
  return fmt::format("{}{}{:016x}", path, temporary_mark, draw);
}

bool is_temporary_name(std::string_view name) {
  constexpr std::size_t digits = 16;
  if (name.size() < temporary_mark.size() + digits) return false;
  name.remove_prefix(name.size() - temporary_mark.size() - digits);
  return name.starts_with(temporary_mark) &&
         name.find_first_not_of("0123456789abcdef", temporary_mark.size()) == std::string_view::npos;
}

std::string parent_path(const std::string& path) {
  std::size_t end = path.size();
  while (end > 1 && path[end - 1] == '/') --end;
  const auto slash = path.substr(0, end).find_last_of('/');
  if (slash == std::string::npos) return ".";
  std::size_t length = slash;
  while (length > 0 && path[length - 1] == '/') --length;
  return length == 0 ? "/" : path.substr(0, length);
}

std::string join_path(const std::string& folder, const std::string& name) {
  if (folder.empty() || name.empty()) return folder + name;
  return folder.back() == '/' ? folder + name : folder + "/" + name;
}

}  // namespace tranche::detail
