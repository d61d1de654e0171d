#pragma once
/// A file system that records what was done to a folder, and can produce what a crash would have left of it.
///
/// The method is that of crash-consistency checkers (Pillai et al., "All File Systems Are Not Created Equal",
/// OSDI 2014). Among the operations before the crash, those that a later sync covers are on the disk; of the
/// others any part may be. The effect of a sync is interpreted as narrowly as POSIX allows: File::sync covers
/// the content and size of its file but not its name; sync_directory covers the names in that folder but not
/// the contents of the files.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "offload/file_system.h"

namespace tranche::testing {

struct RecordedOperation {
  enum class Kind {
    create,  // of a file
    write,
    truncate,
    preallocate,
    sync,
    rename,
    remove,
    create_directory,
    sync_directory,
    mark,
  };
  Kind kind = Kind::mark;
  /// The number of operations that were complete when this one began. Its own index in the log is the
  /// position of its completion.
  std::size_t started = 0;
  std::string path;  ///< relative to the root, at that time; for a mark its text
  std::string to;    ///< new path of a rename
  /// Files and folders are numbered, because names change; the root is 0. `object` is the one that was
  /// written, synced, created, renamed or removed. `folder` is the folder of its name, `to_folder` the new
  /// folder of a rename.
  std::uint64_t object = 0;
  std::uint64_t folder = 0;
  std::uint64_t to_folder = 0;
  std::int64_t offset = 0;
  std::int64_t bytes = 0;  ///< bytes of a write; the size for truncate and preallocate
  std::vector<std::byte> data;

  bool of_names() const {
    return kind == Kind::create || kind == Kind::rename || kind == Kind::remove ||
           kind == Kind::create_directory;
  }
  bool of_content() const {
    return kind == Kind::write || kind == Kind::truncate || kind == Kind::preallocate;
  }
};

enum class Crash {
  kept,       ///< the process was killed: all its operations are complete
  dropped,    ///< power failed: only synced operations are complete
  torn,       ///< also any sectors of other writes, and in order the first of the other changes of names
  reordered,  ///< also any of the other operations as a whole, in any order
};
inline constexpr Crash all_crashes[] = {Crash::kept, Crash::dropped, Crash::torn, Crash::reordered};
struct CrashPolicy {
  Crash crash = Crash::dropped;
  std::uint64_t seed = 0;           ///< torn and reordered draw from this seed
  std::int64_t sector_bytes = 512;  ///< number of bytes that disks write atomically: 512 or 4096
};

/// Forwards everything to `upstream` and records each change below `root` (an existing folder whose contents
/// count as durable). Its files have no native(). Thread-safe. A file that was created without this layer is
/// recorded when it is opened, as if it had been created and written at that moment.
class RecordingFileSystem : public detail::FileSystem {
 public:
  RecordingFileSystem(detail::FileSystem& upstream, std::string root);

  /// Adds a text to the log, such as "save 1 reported done".
  void mark(const std::string& text);
  std::size_t operations() const;
  RecordedOperation operation(std::size_t index) const;
  /// The index of the mark with this text; throws LogicError if there is none.
  std::size_t find_mark(const std::string& text) const;
  /// The index of the sync after which an operation is durable; nullopt if there is none.
  std::optional<std::size_t> durable_by(std::size_t index) const;
  /// "17: write of 4096 B at 0 of step.tmp/a", for messages of failed tests.
  std::string describe(std::size_t index) const;

  /// Fills `folder` (new or empty) with what a crash leaves when the first `prefix` operations are complete.
  /// torn and reordered may also produce parts of operations that had begun.
  void replay(std::size_t prefix, const CrashPolicy& policy, const std::string& folder) const;

  std::unique_ptr<detail::File> open(const std::string& path, detail::OpenMode mode,
                                     detail::Caching caching) override;
  void rename(const std::string& from, const std::string& to) override;
  void remove(const std::string& path) override;
  bool create_directory(const std::string& path) override;
  std::vector<detail::DirectoryEntry> list(const std::string& path) override { return upstream_.list(path); }
  std::optional<detail::FileStatus> status(const std::string& path) override {
    return upstream_.status(path);
  }
  detail::SpaceInfo space(const std::string& path) override { return upstream_.space(path); }
  void sync_directory(const std::string& path) override;

  /// For this layer's files: returns the present end of the log, and adds an entry.
  std::size_t begin() const { return operations(); }
  void record(RecordedOperation operation);

 private:
  struct Object {
    bool is_directory = false;
    std::vector<std::byte> content;
    std::map<std::string, std::uint64_t> names;
  };
  using Objects = std::map<std::uint64_t, Object>;

  std::string relative(const std::string& path) const;
  void scan(const std::string& path, std::uint64_t id);
  std::uint64_t folder_of(const std::string& relative) const;
  std::uint64_t id_of(const std::string& relative) const;
  std::uint64_t adopt(const std::string& path, const std::string& relative);
  std::optional<std::size_t> durable_by_locked(std::size_t index, std::size_t prefix) const;
  static void apply(Objects& objects, const RecordedOperation& operation);
  static void write_sectors(Object& object, const RecordedOperation& operation, const CrashPolicy& policy,
                            std::uint64_t seed);
  static void materialise(const Objects& objects, std::uint64_t id, const std::string& path);

  detail::FileSystem& upstream_;
  const std::string root_;
  std::mutex names_mutex_;                    // changes of names are serialised, so that ids_ matches their
                                              // order
  std::map<std::string, std::uint64_t> ids_;  // the id of each existing file and folder, by its relative path
  std::uint64_t last_id_ = 0;
  Objects initial_;
  mutable std::mutex mutex_;  // guards the log
  std::vector<RecordedOperation> log_;
};

}  // namespace tranche::testing
