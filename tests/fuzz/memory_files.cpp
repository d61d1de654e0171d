#include "tests/fuzz/memory_files.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "tranche/core/error.h"

namespace tranche::fuzz {

using detail::DirectoryEntry;
using detail::File;
using detail::FileStatus;
using detail::OpenMode;

namespace {

[[noreturn]] void read_only(const std::string& path) {
  throw IoError("'" + path + "' is in a file system that is only read", EROFS);
}

class MemoryFile : public File {
 public:
  MemoryFile(const std::string& path, const MemoryFiles::Content& content) : File(path), content_(content) {}

  std::int64_t size() const override { return content_.bytes; }
  void read(std::int64_t offset, void* memory, std::int64_t bytes) override {
    // A negative offset is the caller's error, as with files of the system.
    if (offset < 0 || bytes < 0) throw InvalidArgument("reading at a negative place of '" + path() + "'");
    if (bytes > content_.bytes || offset > content_.bytes - bytes) {
      throw IoError("reading of '" + path() + "' failed: the file ends before", 0);
    }
    std::memset(memory, 0, static_cast<std::size_t>(bytes));
    for (const auto& [at, text] : content_.texts) {
      const std::int64_t begin = std::max(offset, at);
      const std::int64_t end = std::min(offset + bytes, at + static_cast<std::int64_t>(text.size()));
      if (begin >= end) continue;
      std::memcpy(static_cast<char*>(memory) + (begin - offset), text.data() + (begin - at),
                  static_cast<std::size_t>(end - begin));
    }
  }
  void write(std::int64_t, const void*, std::int64_t) override { read_only(path()); }
  void preallocate(std::int64_t) override { read_only(path()); }
  void truncate(std::int64_t) override { read_only(path()); }
  void sync() override { read_only(path()); }

 private:
  const MemoryFiles::Content& content_;
};

}  // namespace

std::unique_ptr<File> MemoryFiles::open(const std::string& path, OpenMode mode, detail::Caching) {
  if (mode != OpenMode::read) read_only(path);
  const auto found = contents_.find(path);
  if (found == contents_.end()) throw IoError("opening '" + path + "' failed: there is none", ENOENT);
  return std::make_unique<MemoryFile>(path, found->second);
}

std::vector<DirectoryEntry> MemoryFiles::list(const std::string& path) {
  std::vector<DirectoryEntry> entries;
  for (const auto& [name, content] : contents_) {
    if (!name.starts_with(path + "/")) continue;
    const std::string rest = name.substr(path.size() + 1);
    const std::string first = rest.substr(0, rest.find('/'));
    if (entries.empty() || entries.back().name != first)
      entries.push_back({first, first.size() < rest.size()});
  }
  return entries;
}

std::optional<FileStatus> MemoryFiles::status(const std::string& path) {
  const auto found = contents_.find(path);
  if (found != contents_.end()) return FileStatus{.bytes = found->second.bytes};
  const auto within = contents_.lower_bound(path + "/");
  if (within != contents_.end() && within->first.starts_with(path + "/"))
    return FileStatus{.is_directory = true};
  return std::nullopt;
}

void MemoryFiles::rename(const std::string& from, const std::string&) {
  read_only(from);
}
void MemoryFiles::remove(const std::string& path) {
  read_only(path);
}
bool MemoryFiles::create_directory(const std::string& path) {
  read_only(path);
}
detail::SpaceInfo MemoryFiles::space(const std::string&) {
  return {};
}
void MemoryFiles::sync_directory(const std::string& path) {
  read_only(path);
}

}  // namespace tranche::fuzz
