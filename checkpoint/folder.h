#pragma once
/// The folder in which a run keeps its checkpoints: saving, listing and removing them.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/companions.h"
#include "checkpoint/format.h"
#include "checkpoint/hdf5_image.h"
#include "checkpoint/run_lease.h"
#include "checkpoint/storage.h"

namespace tranche::checkpoint {

/// One entry of a run's folder.
struct Listed {
  std::string path;
  std::int64_t step = -1;
  std::string problem;               ///< why it is not a complete checkpoint; empty if it is
  std::optional<Manifest> manifest;  ///< only for complete ones
  bool complete() const { return problem.empty(); }
};

/// The checkpoint that `folder` is or lies in, by its path; empty if there is none. Retention removes all
/// that lies in a checkpoint.
std::string enclosing_checkpoint(detail::FileSystem& files, const std::string& folder);

/// Lists everything in `parent` that looks like a checkpoint, newest first (by sequence, then step),
/// incomplete ones at the end. Complete means: the manifest's digest is right, it can be read, and all files
/// have their sizes. Throws CheckpointError when the folder cannot be read; an absent one has none.
std::vector<Listed> list_checkpoints(detail::FileSystem& files, const std::string& parent);

/// The newest complete checkpoint whose path is not in `except`. `notes` gets a line for each one passed
/// over, and when `latest` is damaged or names another. One whose weights may be ruined (in_doubt()) is
/// chosen only if there is no other. Throws CheckpointError, with these lines, when there is none.
Listed newest_checkpoint(detail::FileSystem& files, const std::string& parent,
                         std::vector<std::string>& notes, const std::vector<std::string>& except = {});

/// True when the weights of `listed` may be ruined: the last loss or gradient computed from them was not
/// finite, according to its manifest or to that of another checkpoint with the same weights in `found`.
/// Weights are the same if they result from equally many updates of the same runs.
bool in_doubt(const Listed& listed, const std::vector<Listed>& found);

/// Lists the entries of `parent` that are not checkpoints: each name that no run creates there before its
/// first complete save, with its nature where that is known ("step-6: a checkpoint of step 6 under another
/// name"). Logs, reports and tables (by their file names) belong to a run too, and so do the paths `own`.
/// Sorted; empty for an absent folder. Throws CheckpointError when the folder cannot be read.
std::vector<std::string> strangers_in(detail::FileSystem& files, const std::string& parent,
                                      const std::vector<std::string>& own);

/// Reads and checks the manifest of one checkpoint and the sizes of its files. Throws CheckpointError.
Manifest open_manifest(detail::FileSystem& files, const std::string& folder);

/// The text of the file `latest` for a name. parse_latest() is the inverse, empty when the text is damaged.
std::string latest_text(std::string_view name);
std::string parse_latest(std::string_view text);

/// The rule for the complete checkpoints that retain() keeps; the newest always stays.
struct Retention {
  int keep_last = 0;            ///< how many of the newest; 0: all
  std::int64_t keep_every = 0;  ///< also those whose step is a multiple; 0: none
  std::string keep_lowest{};    ///< also the one with the lowest number_of() this pointer; empty: none
  /// True when the newest weights are known to give finite losses and gradients. If not, retain() also keeps
  /// the newest earlier checkpoint whose last step was not skipped and whose weights a later step has
  /// updated.
  bool newest_is_proven = true;
  /// Paths of checkpoints whose contents proved to be damaged. They are neither counted nor removed.
  std::vector<std::string> damaged{};
};

/// Throws InvalidArgument for a text that is not a JSON pointer.
void require_pointer(const std::string& pointer);
/// The number at a JSON pointer ("/loss") in a checkpoint's user JSON; nullopt if there is no number, or a
/// key "tokens" beside it is 0: a loss over no tokens.
std::optional<double> number_of(const Manifest& manifest, const std::string& pointer);
/// The complete checkpoint with the lowest such number, among equal ones that of the first step; null if none
/// has one. It compares only numbers of the same data as the newest: a key "tokens" beside the number is the
/// same, and so is a key "data" where both have it.
const Listed* lowest(const std::vector<Listed>& found, const std::string& pointer);

/// The steps of a save, in this order on all ranks:
///   1. prepare() on rank 0. Others may start to write before it has returned.
///   2. every rank: ShardWriter into temporary(step), finish().
///   3. rank 0, once it has every rank's record: commit(). When that returns, the checkpoint exists.
///   4. rank 0: retain().
/// A failure before 3 is complete keeps the earlier checkpoints; discard() removes the partial files, as the
/// next prepare() would. Everything throws CheckpointError.
///
/// The names of a save's folder show its state:
///
///     step-N.TOKEN.tmp --commit() renames it--> step-N --retain()--> step-N.removed-RUN.tmp --> gone
///     an earlier step-N: step-N --commit()--> step-N.old --the new step-N exists--> removed
///
/// A crash leaves one of these names, and the next prepare() removes the .tmp folders, and a .old folder
/// whose step-N exists; otherwise it renames the .old folder back.
class RunFolder {
 public:
  /// `run`: the number of this run, not 0, equal on all its ranks. `ancestors`: {} for a run from scratch,
  /// else the lineage of the checkpoint from which it continues (Manifest::lineage), {0} if that version had
  /// no lineages. prepare() and retain() only touch checkpoints of these runs. `branches`:
  /// Manifest::branches, by ancestor and last for this run; empty if they are unknown.
  RunFolder(Storage storage, std::string parent, std::uint64_t run, std::vector<std::uint64_t> ancestors = {},
            std::vector<std::int64_t> branches = {});

  const std::string& parent() const noexcept { return parent_; }
  /// The folder into which the ranks write; every rank knows it without communication.
  std::string temporary(std::int64_t step) const;
  std::string final_path(std::int64_t step) const { return detail::join_path(parent_, step_name(step)); }

  /// Rank 0. Makes the folder, takes its lease (RunLease), removes partial files of dead saves, and checks
  /// that the `total_bytes` of all ranks are free. Throws while another process holds the lease, and if a
  /// checkpoint of this step belongs to an unrelated run.
  void prepare(std::int64_t step, std::int64_t total_bytes);
  /// Rank 0. Fills in the manifest's sequence, versions, time and the records of model.h5 and of the
  /// companions; manifest.shards holds the gathered records. Checks that all shards exist and the lease is
  /// held, writes the companions, `master` (of this layout) and the manifest, and renames the folder. Returns
  /// the checkpoint's path. It does not call HDF5.
  std::string commit(Manifest manifest, const MasterImage& master, const Companions& companions = {});
  /// A failure in the last commit() after the checkpoint was complete (writing `latest`, removing the
  /// replaced checkpoint): readers do not need these, and the next save repeats them. Empty: none.
  std::string take_warning() { return std::exchange(warning_, {}); }
  /// Removes the partial files of a failed save.
  void discard(std::int64_t step);
  /// Removes complete checkpoints of this run and its ancestors that `rule`, which counts only those, does
  /// not keep; returns their names.
  std::vector<std::string> retain(const Retention& rule);

 private:
  void write_synced(const std::string& path, const void* bytes, std::int64_t size);
  void require_held();
  /// Throws if the target is a checkpoint of an unrelated run.
  void require_own(const std::string& target);
  void remove_stale_folders(const std::string& own);
  void remove_folder(const std::string& name);
  std::int64_t next_sequence();

  Storage storage_;
  std::string parent_;
  std::vector<std::uint64_t> lineage_;  ///< this run is the last
  std::vector<std::int64_t> branches_;  ///< for each run in lineage_, as in a Manifest
  std::optional<RunLease> lease_;       ///< on rank 0, from the first prepare() on
  std::string warning_;
  std::int64_t sequence_ = 0;  ///< the newest known; 0: not read yet
};

}  // namespace tranche::checkpoint
