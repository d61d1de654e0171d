#pragma once
/// Files and folders behind an interface, so that tests can intercept Tranche's disk operations. All file I/O
/// that must be fast, durable or tested against faults uses it.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tranche::detail {

enum class OpenMode : std::uint8_t {
  read,                ///< the file must exist; reading only
  update,              ///< the file must exist; reading and writing, content kept
  create_new,          ///< the name must not exist, not even as a link; reading and writing
  create_or_truncate,  ///< reading and writing, earlier content dropped
};
/// buffered: through the page cache, with the system's read-ahead.
/// shared: the same without read-ahead. Processes of a host that read the same bytes load them from the disk
/// once.
/// direct: bypasses the page cache (O_DIRECT) if the file system supports it; otherwise buffered, and
/// File::direct_refusal() gives the reason.
enum class Caching : std::uint8_t { buffered, shared, direct };

/// The descriptors with which an engine can do a file's transfers itself. Valid during the File's lifetime.
struct NativeFile {
  int buffered = -1;                  ///< descriptor through the page cache: any byte range
  int direct = -1;                    ///< descriptor that bypasses it; -1 when the file is buffered only
  std::int64_t offset_alignment = 1;  ///< of offsets and sizes on `direct`
  std::int64_t memory_alignment = 1;  ///< of memory on `direct`
};

/// One open file, never a folder, a pipe or a device. Destruction closes it and reports nothing, so call
/// sync() first. Thread-safe, except for calls that write a range while another call reads or writes it.
/// Every function throws IoError naming operation, file, range and reason.
///
/// Any byte range may be transferred, direct or not: on a direct file whole aligned blocks bypass the page
/// cache; the unaligned ends of a range (and all of it when its memory is not aligned) go through it. Nothing
/// is padded, so a file has exactly the bytes that were written.
class File {
 public:
  explicit File(std::string path) : path_(std::move(path)) {}
  virtual ~File() = default;
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const noexcept { return path_; }
  virtual std::int64_t size() const = 0;
  /// Makes the file at least `bytes` long with its blocks allocated (they read as zero), so that writing
  /// there cannot run out of space; never shrinks it. If the file system cannot allocate ahead, only the
  /// length changes. Throws IoError (ENOSPC) with the bytes needed and free.
  virtual void preallocate(std::int64_t bytes) = 0;
  /// Reads or writes all `bytes` from `offset` on, or throws; short transfers are resumed, interrupted ones
  /// repeated. If the file ends earlier, it throws IoError with code 0.
  virtual void read(std::int64_t offset, void* memory, std::int64_t bytes) = 0;
  virtual void write(std::int64_t offset, const void* memory, std::int64_t bytes) = 0;
  /// Truncates the file, or extends it with zeros.
  virtual void truncate(std::int64_t bytes) = 0;
  /// Returns when everything written before, and the size, would survive a loss of power. The file's name
  /// only does after FileSystem::sync_directory of its folder.
  virtual void sync() = 0;
  /// True when aligned transfers bypass the page cache.
  virtual bool direct() const { return false; }
  /// The reason why they do not although Caching::direct was requested; empty otherwise.
  virtual std::string direct_refusal() const { return {}; }
  /// nullopt when every transfer must use read() and write(), as for files that a test intercepts.
  virtual std::optional<NativeFile> native() const { return std::nullopt; }

 private:
  std::string path_;
};

struct DirectoryEntry {
  std::string name;
  bool is_directory = false;
};
struct FileStatus {
  std::int64_t bytes = 0;            ///< 0 for folders
  std::int64_t allocated_bytes = 0;  ///< allocated on the disk so far; 0 for folders
  bool is_directory = false;
};
struct SpaceInfo {
  std::int64_t total_bytes = 0;
  std::int64_t free_bytes = 0;  ///< available to users without privileges
};

/// The largest file that is read into memory as one text.
inline constexpr std::int64_t largest_file_read_whole = std::int64_t{1} << 30;

/// Operations on names. Thread-safe; all throw IoError. Paths are the operating system's, absolute or
/// relative to the working folder. Only sync_directory makes names durable.
class FileSystem {
 public:
  virtual ~FileSystem() = default;
  virtual std::unique_ptr<File> open(const std::string& path, OpenMode mode,
                                     Caching caching = Caching::buffered) = 0;
  /// Atomically replaces `to` if it is a file or an empty folder (a folder replaces only a folder).
  virtual void rename(const std::string& from, const std::string& to) = 0;
  /// Removes a file or an empty folder, which must exist.
  virtual void remove(const std::string& path) = 0;
  /// Returns true if it was made, false when a folder of this name exists already.
  virtual bool create_directory(const std::string& path) = 0;
  /// The entries except "." and "..", sorted by name.
  virtual std::vector<DirectoryEntry> list(const std::string& path) = 0;
  /// The status after following symbolic links; nullopt when the name does not exist.
  virtual std::optional<FileStatus> status(const std::string& path) = 0;
  /// The space of the file system of `path`, which must exist.
  virtual SpaceInfo space(const std::string& path) = 0;
  /// Returns when the names made, renamed and removed in this folder would survive a loss of power.
  virtual void sync_directory(const std::string& path) = 0;

  // The functions below are implemented by those above.
  bool exists(const std::string& path) { return status(path).has_value(); }
  /// The bytes of the file; throws IoError when it does not exist.
  std::int64_t size(const std::string& path);
  /// Also makes missing parents, and syncs each folder in which it made a name.
  void create_directories(const std::string& path);
  /// Removes a name and everything below it; symbolic links are removed, not followed. Does nothing when the
  /// name does not exist. Returns the number of names removed.
  std::int64_t remove_all(const std::string& path);
  /// Reads the whole file; throws IoError (EFBIG), without reading it, when it has more than `most_bytes`.
  std::string read_file(const std::string& path, std::int64_t most_bytes = largest_file_read_whole);
  /// Replaces the content of `path` atomically and durably: writes temporary_name(path), syncs it, renames it
  /// and syncs the folder. After a crash the file has its earlier or its new content, and the temporary file
  /// may remain, which is_temporary_name() recognises. On failure the temporary file is removed.
  void replace_file(const std::string& path, std::string_view content);
};

/// The operating system's files. It lives as long as the process.
FileSystem& posix_file_system();

/// System calls below File and BlockIo, which tests intercept to make transfers short or fail.
enum class IoCall : std::uint8_t { open_direct, read, write, sync, preallocate, uring_setup, uring_register };
/// Called before each raw operation with its number of bytes. Returns how many may be transferred (fewer make
/// it short), or -errno to make it fail. Called by several threads at once.
using IoHook = std::function<std::int64_t(IoCall call, std::int64_t bytes)>;
/// The operating system's files with a hook for tests; their native() is empty.
std::unique_ptr<FileSystem> make_posix_file_system(IoHook hook);

/// `path` with a random ending, for a file that replaces `path` when it is complete. The ending is random so
/// that nobody can have placed a link of that name before.
std::string temporary_name(const std::string& path);
/// True when a name (or a path) has such an ending: ".new-" and 16 hexadecimal digits.
bool is_temporary_name(std::string_view name);

/// The part of a path before its last name ("." or "/" if there is none).
std::string parent_path(const std::string& path);
/// Joins two parts with one slash between them.
std::string join_path(const std::string& folder, const std::string& name);

}  // namespace tranche::detail
