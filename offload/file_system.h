#pragma once
/// Files and folders behind an interface, so that tests can stand between Tranche and the disk. All file I/O
/// that must be fast, durable or tested against faults goes through here.

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
  read,                ///< must exist; reading only
  update,              ///< must exist; reading and writing, content kept
  create_new,          ///< must not exist, nor a link of this name; reading and writing
  create_or_truncate,  ///< reading and writing, earlier content dropped
};
/// direct: past the page cache (O_DIRECT) where the file system can, else buffered, and
/// File::direct_refusal() says why.
enum class Caching : std::uint8_t { buffered, direct };

/// Lets an engine do a file's transfers itself. Valid while the File lives.
struct NativeFile {
  int buffered = -1;                  ///< descriptor through the page cache: takes any range of bytes
  int direct = -1;                    ///< descriptor past it; -1 when the file is buffered only
  std::int64_t offset_alignment = 1;  ///< of offsets and sizes on `direct`
  std::int64_t memory_alignment = 1;  ///< of memory on `direct`
};

/// One open file, and never a folder, a pipe or a device; closed by destruction (which reports nothing: call
/// sync() first). Thread-safe, but for calls that write what another reads or writes at the same time.
/// Everything throws IoError naming operation, file, range and reason.
///
/// Any range of bytes may be transferred, direct or not: on a direct file whole aligned blocks go past the
/// page cache, the unaligned ends of a range (and all of it when its memory is not aligned) go through it.
/// Nothing is padded, so a file has exactly the bytes that were written.
class File {
 public:
  explicit File(std::string path) : path_(std::move(path)) {}
  virtual ~File() = default;
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const noexcept { return path_; }
  virtual std::int64_t size() const = 0;
  /// Makes the file at least `bytes` long with its blocks allocated (they read as zero), so that writing
  /// there can no longer run out of space; never shrinks. Where the file system cannot allocate ahead the
  /// file is only made longer. Throws IoError (ENOSPC) with what was needed and what is free.
  virtual void preallocate(std::int64_t bytes) = 0;
  /// All `bytes` from `offset` on, or an error; short transfers are resumed, interrupted ones repeated. A
  /// file that ends earlier is an IoError with code 0.
  virtual void read(std::int64_t offset, void* memory, std::int64_t bytes) = 0;
  virtual void write(std::int64_t offset, const void* memory, std::int64_t bytes) = 0;
  /// Cuts the file, or extends it with zeros.
  virtual void truncate(std::int64_t bytes) = 0;
  /// Returns when all that was written before, and the size, would survive a loss of power. The file's name
  /// only does after FileSystem::sync_directory of its folder.
  virtual void sync() = 0;
  /// True when aligned transfers go past the page cache.
  virtual bool direct() const { return false; }
  /// Why they do not, though Caching::direct was asked for; else empty.
  virtual std::string direct_refusal() const { return {}; }
  /// nullopt when every transfer has to pass read() and write(): of files that a test watches.
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
  std::int64_t allocated_bytes = 0;  ///< that it takes of the free space by now; 0 for folders
  bool is_directory = false;
};
struct SpaceInfo {
  std::int64_t total_bytes = 0;
  std::int64_t free_bytes = 0;  ///< to users without privileges
};

/// Nothing larger is read into memory as one text.
inline constexpr std::int64_t largest_file_read_whole = std::int64_t{1} << 30;

/// Operations on names. Thread-safe; everything throws IoError. Paths are the operating system's, absolute or
/// relative to the working folder. No call makes a name durable but sync_directory.
class FileSystem {
 public:
  virtual ~FileSystem() = default;
  virtual std::unique_ptr<File> open(const std::string& path, OpenMode mode,
                                     Caching caching = Caching::buffered) = 0;
  /// Replaces `to`, in one instant, if it is a file or an empty folder (folders replace only folders).
  virtual void rename(const std::string& from, const std::string& to) = 0;
  /// A file or an empty folder; it must exist.
  virtual void remove(const std::string& path) = 0;
  /// Returns whether it was made: false when a folder of this name is there already.
  virtual bool create_directory(const std::string& path) = 0;
  /// Entries but "." and "..", sorted by name.
  virtual std::vector<DirectoryEntry> list(const std::string& path) = 0;
  /// nullopt when there is nothing of this name. Follows symbolic links.
  virtual std::optional<FileStatus> status(const std::string& path) = 0;
  /// The space of the file system that `path` (which must exist) lies on.
  virtual SpaceInfo space(const std::string& path) = 0;
  /// Returns when the names made, renamed and removed in this folder would survive a loss of power.
  virtual void sync_directory(const std::string& path) = 0;

  // The functions below are composed of those above.
  bool exists(const std::string& path) { return status(path).has_value(); }
  /// Bytes of the file; throws IoError when there is none.
  std::int64_t size(const std::string& path);
  /// Makes missing parents too, and syncs each folder in which a name was made.
  void create_directories(const std::string& path);
  /// With all it holds; symbolic links are removed, not followed. Nothing happens when there is nothing.
  /// Returns the number of names removed.
  std::int64_t remove_all(const std::string& path);
  /// The whole file; IoError (EFBIG) when it has more than `most_bytes`, of which then none is read.
  std::string read_file(const std::string& path, std::int64_t most_bytes = largest_file_read_whole);
  /// Gives `path` this content in one durable instant: written to temporary_name(path), synced, renamed,
  /// folder synced. After a crash the file has its earlier or its new content, and the temporary one may be
  /// left: is_temporary_name() knows it. A failure removes it.
  void replace_file(const std::string& path, std::string_view content);
};

/// The operating system's files. Lives as long as the process.
FileSystem& posix_file_system();

/// System calls below File and BlockIo, which tests hook to make transfers short or fail.
enum class IoCall : std::uint8_t { open_direct, read, write, sync, preallocate, uring_setup, uring_register };
/// Asked before each raw operation with the bytes it would transfer. Returns how many it may (fewer: the
/// transfer comes out short), or -errno to fail it with. Called by several threads at once.
using IoHook = std::function<std::int64_t(IoCall call, std::int64_t bytes)>;
/// The operating system's files with a hook below; their native() is empty.
std::unique_ptr<FileSystem> make_posix_file_system(IoHook hook);

/// `path` and a random ending, for a file that takes its place once it is whole: nobody can have put a link
/// of that name there before.
std::string temporary_name(const std::string& path);
/// True when a name (or a path) has such an ending: ".new-" and 16 hexadecimal digits.
bool is_temporary_name(std::string_view name);

/// The part of a path before its last name ("." and "/" where there is none left).
std::string parent_path(const std::string& path);
/// Two parts with one slash between.
std::string join_path(const std::string& folder, const std::string& name);

}  // namespace tranche::detail
