#pragma once
/// Files that call a function before each transfer and sync, for tests of simultaneous operations.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "offload/file_system.h"
#include "tests/offload/faulty_file_system.h"

namespace tranche::testing {

/// A file system that calls a function before each read, write and sync; the function may block.
class WatchedFileSystem : public detail::FileSystem {
 public:
  using Watch = std::function<void(FileOperation, std::int64_t offset)>;
  explicit WatchedFileSystem(Watch watch) : watch_(std::move(watch)) {}
  std::unique_ptr<detail::File> open(const std::string& path, detail::OpenMode mode,
                                     detail::Caching caching) override {
    return std::make_unique<Watched>(detail::posix_file_system().open(path, mode, caching), watch_);
  }
  void rename(const std::string& from, const std::string& to) override {
    detail::posix_file_system().rename(from, to);
  }
  void remove(const std::string& path) override { detail::posix_file_system().remove(path); }
  bool create_directory(const std::string& path) override {
    return detail::posix_file_system().create_directory(path);
  }
  std::vector<detail::DirectoryEntry> list(const std::string& path) override {
    return detail::posix_file_system().list(path);
  }
  std::optional<detail::FileStatus> status(const std::string& path) override {
    return detail::posix_file_system().status(path);
  }
  detail::SpaceInfo space(const std::string& path) override {
    return detail::posix_file_system().space(path);
  }
  void sync_directory(const std::string& path) override { detail::posix_file_system().sync_directory(path); }

 private:
  struct Watched : detail::File {
    Watched(std::unique_ptr<detail::File> the_file, const Watch& the_watch)
        : detail::File(the_file->path()), file(std::move(the_file)), watch(the_watch) {}
    std::int64_t size() const override { return file->size(); }
    void preallocate(std::int64_t bytes) override { file->preallocate(bytes); }
    void read(std::int64_t offset, void* memory, std::int64_t bytes) override {
      watch(FileOperation::read, offset);
      file->read(offset, memory, bytes);
    }
    void write(std::int64_t offset, const void* memory, std::int64_t bytes) override {
      watch(FileOperation::write, offset);
      file->write(offset, memory, bytes);
    }
    void truncate(std::int64_t bytes) override { file->truncate(bytes); }
    void sync() override {
      watch(FileOperation::sync, 0);
      file->sync();
    }
    std::unique_ptr<detail::File> file;
    const Watch& watch;
  };
  Watch watch_;
};

}  // namespace tranche::testing
