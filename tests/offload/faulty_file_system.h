#pragma once
/// A file system whose operations fail when a test requests it.

#include <array>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "offload/file_system.h"

namespace tranche::testing {

enum class FileOperation {
  open,
  size,
  read,
  write,
  preallocate,
  truncate,
  sync,
  rename,
  remove,
  create_directory,
  list,
  status,
  space,
  sync_directory,
};
inline constexpr int file_operation_count = 14;

struct Fault {
  FileOperation operation = FileOperation::write;
  /// The fault applies to the nth operation of this kind after inject(), counted from 1, among those whose
  /// path (of a rename, either path) contains `path_contains`...
  int nth = 1;
  /// ...and to this many operations in a row; -1: to all from there on.
  int times = 1;
  /// The errno with which the operation fails; 0: it is only delayed.
  int code = 0;
  /// The bytes that a read or write transfers before it fails.
  std::int64_t done_bytes = 0;
  std::chrono::milliseconds delay{0};
  std::string path_contains = {};
};

/// Forwards everything to `upstream` (another test's layer, or the system's) except injected faults. Its
/// files have no native(), so asynchronous engines transfer through File::read and File::write, block by
/// block. Thread-safe.
class FaultyFileSystem : public detail::FileSystem {
 public:
  explicit FaultyFileSystem(detail::FileSystem& upstream) : upstream_(upstream) {}

  void inject(Fault fault);
  /// Forgets all faults.
  void clear();
  /// The number of operations of a kind since construction, including failed ones.
  std::int64_t count(FileOperation operation) const;
  /// Sets the free space that space() reports from now on.
  void set_free_bytes(std::int64_t bytes);

  std::unique_ptr<detail::File> open(const std::string& path, detail::OpenMode mode,
                                     detail::Caching caching) override;
  void rename(const std::string& from, const std::string& to) override;
  void remove(const std::string& path) override;
  bool create_directory(const std::string& path) override;
  std::vector<detail::DirectoryEntry> list(const std::string& path) override;
  std::optional<detail::FileStatus> status(const std::string& path) override;
  detail::SpaceInfo space(const std::string& path) override;
  void sync_directory(const std::string& path) override;

  /// Counts an operation, delays it, and returns the fault with which it has to fail. Called by this layer's
  /// files.
  std::optional<Fault> strike(FileOperation operation, const std::string& path, const std::string& to = {});
  /// The same, but throws the fault.
  void pass(FileOperation operation, const std::string& path, const std::string& to = {});

 private:
  struct Pending {
    Fault fault;
    int seen = 0;
  };
  detail::FileSystem& upstream_;
  mutable std::mutex mutex_;
  std::vector<Pending> pending_;
  std::array<std::int64_t, file_operation_count> counts_{};
  std::optional<std::int64_t> free_bytes_;
};

}  // namespace tranche::testing
