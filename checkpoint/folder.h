#pragma once
/// The folder in which a run keeps its checkpoints: how a save becomes one, which there are, which go.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tranche/checkpoint/format.h"
#include "tranche/checkpoint/storage.h"

namespace tranche::checkpoint {

/// One entry of a parent folder.
struct Listed {
  std::string path;
  std::int64_t step = -1;
  std::string problem;               ///< why it is no checkpoint; empty: complete
  std::optional<Manifest> manifest;  ///< of complete ones
  bool complete() const { return problem.empty(); }
};

/// All that look like checkpoints in `parent`, newest first (by sequence, then step), those that are not
/// complete at the end. Complete: the manifest's digest is right, it can be read, and all files have their
/// sizes. Throws CheckpointError when the folder cannot be read; an absent one has none.
std::vector<Listed> list_checkpoints(FileSystem& files, const std::string& parent);

/// The newest complete checkpoint, and in `notes` a line for each that was passed over and when `latest` is
/// damaged or names another. Throws CheckpointError, with these lines, when there is none.
Listed newest_checkpoint(FileSystem& files, const std::string& parent, std::vector<std::string>& notes);

/// Reads and checks the manifest of one checkpoint and the sizes of its files. Throws CheckpointError.
Manifest open_manifest(FileSystem& files, const std::string& folder);

/// What `latest` should hold for a name, and the reverse: empty when the text is damaged.
std::string latest_text(std::string_view name);
std::string parse_latest(std::string_view text);

/// Which complete checkpoints stay; the newest always does.
struct Retention {
  int keep_last = 0;            ///< the newest so many; 0: all
  std::int64_t keep_every = 0;  ///< beside them, those whose step is a multiple
};

/// The steps of a save, in this order; on all ranks
///   1. prepare() on rank 0. Others may start to write before it has returned.
///   2. every rank: ShardWriter into temporary(step), finish().
///   3. rank 0, once it holds every rank's record: commit(). When that returns, the checkpoint exists.
///   4. rank 0: retain().
/// A failure before 3 is done leaves what was there before; discard() removes the rest, as the next prepare()
/// would. Everything throws CheckpointError.
class RunFolder {
 public:
  /// `token` tells saves of this run from the debris of others: any number, equal on all ranks of a run.
  RunFolder(Storage storage, std::string parent, std::uint64_t token);

  const std::string& parent() const noexcept { return parent_; }
  /// Where the ranks write; known without asking anyone.
  std::string temporary(std::int64_t step) const;
  std::string final_path(std::int64_t step) const { return join_path(parent_, step_name(step)); }

  /// Rank 0. Makes the folder, removes the debris of dead saves, checks that `total_bytes` of all ranks are
  /// free, and marks the temporary folder as this process's. Refused while another live process of this host
  /// saves there.
  void prepare(std::int64_t step, std::int64_t total_bytes);
  /// Rank 0. Fills in the manifest's sequence, versions, time and master record; manifest.shards are the
  /// gathered records. Checks that all shards are there, writes model.h5 and the manifest, renames. Returns
  /// the checkpoint's path.
  std::string commit(Manifest manifest);
  /// What failed in the last commit() once the checkpoint was there (`latest`, the removal of what it
  /// replaces): readers do not need it, and the next save does it again. Empty: nothing.
  std::string take_warning() { return std::exchange(warning_, {}); }
  /// Removes what a failed save has left.
  void discard(std::int64_t step);
  /// Removes complete checkpoints that the rule does not keep; returns their names.
  std::vector<std::string> retain(const Retention& rule);

 private:
  void write_synced(const std::string& path, const void* bytes, std::int64_t size);
  void clear_debris(const std::string& own);
  void remove_folder(const std::string& name);
  std::int64_t next_sequence();

  Storage storage_;
  std::string parent_;
  std::uint64_t token_;
  std::string warning_;
  std::int64_t sequence_ = 0;  ///< of the newest known; 0: not looked yet
};

/// A process that saves. Known again after others have taken its number: by the time it started at.
struct SaveOwner {
  std::string host;
  std::int64_t process = 0;
  std::string started;
  friend bool operator==(const SaveOwner&, const SaveOwner&) = default;
};
SaveOwner this_process();
/// False when it is another host's, which cannot be known: a folder belongs to one run at a time.
bool is_alive(const SaveOwner& owner);

}  // namespace tranche::checkpoint
