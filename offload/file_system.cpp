// What every file system can do by its basic operations.
#include "tranche/offload/file_system.h"

#include <cerrno>

#include "tranche/core/error.h"
#include "tranche/offload/io_failure.h"

namespace tranche {
namespace {

// Folders are what list() calls so: a link to a folder is a name to remove, not a folder to empty.
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
  // Another rank may have been faster; its name is made durable here just as well.
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
  return remove_entry(*this, name, status(name)->is_directory);  // "." and the like
}

std::string FileSystem::read_file(const std::string& path) {
  const auto file = open(path, OpenMode::read);
  std::string content(static_cast<std::size_t>(file->size()), '\0');
  file->read(0, content.data(), static_cast<std::int64_t>(content.size()));
  return content;
}

void FileSystem::replace_file(const std::string& path, std::string_view content) {
  const std::string temporary = path + ".tmp";
  {
    const auto file = open(temporary, OpenMode::create_or_truncate);
    file->write(0, content.data(), static_cast<std::int64_t>(content.size()));
    file->sync();
  }
  rename(temporary, path);
  sync_directory(parent_path(path));
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

}  // namespace tranche
