#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "offload/file_system.h"
#include "offload/io_failure.h"
#include "offload/posix_file.h"
#include "tranche/core/error.h"

namespace tranche::detail {
namespace {

class PosixFileSystem : public FileSystem {
 public:
  explicit PosixFileSystem(IoHook hook = {}) : hook_(std::move(hook)) {}

  std::unique_ptr<File> open(const std::string& path, OpenMode mode, Caching caching) override {
    return std::make_unique<PosixFile>(path, mode, caching, hook_);
  }

  void rename(const std::string& from, const std::string& to) override {
    if (std::rename(from.c_str(), to.c_str()) != 0) {
      throw_io_error({"renaming to '" + to + "'", from, errno, -1, 0});
    }
  }

  void remove(const std::string& path) override {
    if (std::remove(path.c_str()) != 0) throw_io_error({"removal", path, errno, -1, 0});
  }

  bool create_directory(const std::string& path) override {
    if (::mkdir(path.c_str(), 0777) == 0) return true;
    const int code = errno;
    if (code == EEXIST) {
      const auto there = status(path);
      if (there && there->is_directory) return false;
    }
    throw_io_error({"making the folder", path, code, -1, 0});
  }

  std::vector<DirectoryEntry> list(const std::string& path) override {
    const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir(path.c_str()), &::closedir);
    if (!folder) throw_io_error({"listing", path, errno, -1, 0});
    std::vector<DirectoryEntry> entries;
    while (true) {
      errno = 0;
      const dirent* entry = ::readdir(folder.get());
      if (entry == nullptr) break;
      const std::string name = entry->d_name;
      if (name == "." || name == "..") continue;
      struct stat status {};
      // A file that was removed meanwhile is left out.
      if (::fstatat(::dirfd(folder.get()), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) continue;
      entries.push_back({name, S_ISDIR(status.st_mode)});
    }
    if (errno != 0) throw_io_error({"listing", path, errno, -1, 0});
    std::sort(entries.begin(), entries.end(),
              [](const DirectoryEntry& a, const DirectoryEntry& b) { return a.name < b.name; });
    return entries;
  }

  std::optional<FileStatus> status(const std::string& path) override {
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0) {
      if (errno == ENOENT || errno == ENOTDIR) return std::nullopt;
      throw_io_error({"looking up", path, errno, -1, 0});
    }
    const bool is_directory = S_ISDIR(status.st_mode);
    if (is_directory) return FileStatus{0, 0, true};
    return FileStatus{status.st_size, status.st_blocks * 512, false};
  }

  SpaceInfo space(const std::string& path) override {
    struct statvfs status {};
    if (::statvfs(path.c_str(), &status) != 0)
      throw_io_error({"asking for the free space", path, errno, -1, 0});
    const auto unit = static_cast<std::int64_t>(status.f_frsize);
    return {static_cast<std::int64_t>(status.f_blocks) * unit,
            static_cast<std::int64_t>(status.f_bavail) * unit};
  }

  void sync_directory(const std::string& path) override {
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor < 0) throw_io_error({"sync of the folder", path, errno, -1, 0});
    std::int64_t result = hook_ ? hook_(IoCall::sync, 0) : 0;
    if (result >= 0) {
      do {
        result = ::fsync(descriptor) == 0 ? 0 : -errno;
      } while (result == -EINTR);
    }
    ::close(descriptor);
    // Some file systems do not support this call, and make names durable by themselves.
    if (result < 0 && result != -EINVAL && result != -EOPNOTSUPP) {
      throw_io_error({"sync of the folder", path, static_cast<int>(-result), -1, 0});
    }
  }

 private:
  IoHook hook_;
};

}  // namespace

FileSystem& posix_file_system() {
  static PosixFileSystem system;  // stateless
  return system;
}

std::unique_ptr<FileSystem> make_posix_file_system(IoHook hook) {
  return std::make_unique<PosixFileSystem>(std::move(hook));
}

}  // namespace tranche::detail
