#pragma once
/// A file system that remembers what was done to a folder, and can show what a crash would have left of it.
///
/// The method is that of crash-consistency checkers (Pillai et al., "All File Systems Are Not Created Equal",
/// OSDI 2014): of the operations before the crash, those that a later sync covers are on the disk; of the
/// others any part may be. The effect of a sync is read as narrowly as POSIX allows: File::sync the content
/// and size of its file, and not its name; sync_directory the names in that folder, and not what is in them.

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
  /// Operations that were complete when this one began. Its own place in the log is where it was complete.
  std::size_t started = 0;
  std::string path;  ///< relative to the root, at that time; of a mark, its text
  std::string to;    ///< of a rename
  /// Files and folders by number, since names change; the root is 0. `object`: what was written, synced,
  /// made, renamed or removed. `folder`: what held its name; `to_folder`: of a rename.
  std::uint64_t object = 0;
  std::uint64_t folder = 0;
  std::uint64_t to_folder = 0;
  std::int64_t offset = 0;
  std::int64_t bytes = 0;  ///< of a write; of truncate and preallocate, the size
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
  kept,       ///< the process died: what it did is all there
  dropped,    ///< the power went: only what was synced is there
  torn,       ///< also any sectors of other writes, and a first part, in order, of the other changes of names
  reordered,  ///< also any of the other operations, whole, whatever their order
};
inline constexpr Crash all_crashes[] = {Crash::kept, Crash::dropped, Crash::torn, Crash::reordered};
struct CrashPolicy {
  Crash crash = Crash::dropped;
  std::uint64_t seed = 0;           ///< torn and reordered draw from it
  std::int64_t sector_bytes = 512;  ///< disks write so many bytes whole: 512 or 4096
};

/// Passes everything on to `upstream` and records what changes anything below `root` (an existing folder;
/// what is in it counts as durable). Its files have no native(). Thread-safe. A file that was made past this
/// layer is taken up when it is opened, as if it had been created and written at that moment.
class RecordingFileSystem : public detail::FileSystem {
 public:
  RecordingFileSystem(detail::FileSystem& upstream, std::string root);

  /// Puts a text into the log: "save 1 reported done".
  void mark(const std::string& text);
  std::size_t operations() const;
  RecordedOperation operation(std::size_t index) const;
  /// Place of the mark with this text; throws LogicError when there is none.
  std::size_t find_mark(const std::string& text) const;
  /// The sync, by its place, after which an operation is durable; nullopt when there is none.
  std::optional<std::size_t> durable_by(std::size_t index) const;
  /// "17: write of 4096 B at 0 of step.tmp/a", for messages of failed tests.
  std::string describe(std::size_t index) const;

  /// Fills `folder` (new or empty) with what a crash leaves at the moment at which the first `prefix`
  /// operations were complete; torn and reordered may also show parts of operations that were under way.
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

  /// For its files: the present end of the log, and a new entry.
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
  std::mutex names_mutex_;                    // changes of names go one by one, so that ids_ follows them
  std::map<std::string, std::uint64_t> ids_;  // of what is there now, by relative path
  std::uint64_t last_id_ = 0;
  Objects initial_;
  mutable std::mutex mutex_;  // of the log
  std::vector<RecordedOperation> log_;
};

}  // namespace tranche::testing
