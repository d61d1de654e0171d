#pragma once
/// The folder in which a run keeps its checkpoints: how a save becomes one, which there are, which go.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/companions.h"
#include "checkpoint/format.h"
#include "checkpoint/run_lease.h"
#include "checkpoint/storage.h"

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
std::vector<Listed> list_checkpoints(detail::FileSystem& files, const std::string& parent);

/// The newest complete checkpoint whose path is not among `except`, and in `notes` a line for each that was
/// passed over and when `latest` is damaged or names another. One whose weights may be ruined (in_doubt()) is
/// taken only where there is no other. Throws CheckpointError, with these lines, when there is none.
Listed newest_checkpoint(detail::FileSystem& files, const std::string& parent,
                         std::vector<std::string>& notes, const std::vector<std::string>& except = {});

/// True when the weights of `listed` may be ruined: the last loss or gradient that they gave was not finite,
/// as its manifest says or that of another checkpoint of the same weights among `found`. The same weights
/// have those that as many updates of the same runs led to.
bool in_doubt(const Listed& listed, const std::vector<Listed>& found);

/// Lists what lies in `parent` beside checkpoints: each name that no run of ours leaves there before its
/// first complete save, and what it is where that is known ("step-6: a checkpoint of step 6 under
/// another name"). Logs, reports and tables (files named so) are a run's, too, and so are the paths `own`.
/// Sorted; empty for an absent folder. Throws CheckpointError when the folder cannot be read.
std::vector<std::string> strangers_in(detail::FileSystem& files, const std::string& parent,
                                      const std::vector<std::string>& own);

/// Reads and checks the manifest of one checkpoint and the sizes of its files. Throws CheckpointError.
Manifest open_manifest(detail::FileSystem& files, const std::string& folder);

/// The text of `latest` for a name, and the reverse: empty when the text is damaged.
std::string latest_text(std::string_view name);
std::string parse_latest(std::string_view text);

/// The complete checkpoints that retain() keeps; the newest always stays.
struct Retention {
  int keep_last = 0;            ///< the newest so many; 0: all
  std::int64_t keep_every = 0;  ///< beside them, those whose step is a multiple
  std::string keep_lowest{};    ///< and the one with the lowest number_of() this
                                ///< pointer; empty: none
  /// The weights of the newest are known to give finite losses and gradients. Where they are not, the newest
  /// one before it stays too whose last step was taken, and from which a later step was.
  bool newest_is_proven = true;
};

/// Throws InvalidArgument for a text that is no JSON pointer.
void require_pointer(const std::string& pointer);
/// The number at a JSON pointer ("/loss") in the user's JSON of a checkpoint; none where there is no
/// number, or a key "tokens" beside it is 0: a loss over no tokens.
std::optional<double> number_of(const Manifest& manifest, const std::string& pointer);
/// The complete one in which that number is lowest, of equal ones that of the first step; null: none has
/// it.
const Listed* lowest(const std::vector<Listed>& found, const std::string& pointer);

/// The steps of a save, in this order; on all ranks
///   1. prepare() on rank 0. Others may start to write before it has returned.
///   2. every rank: ShardWriter into temporary(step), finish().
///   3. rank 0, once it holds every rank's record: commit(). When that returns, the checkpoint exists.
///   4. rank 0: retain().
/// A failure before 3 is done leaves what was there before; discard() removes the rest, as the next prepare()
/// would. Everything throws CheckpointError.
class RunFolder {
 public:
  /// `run`: the number of this run, any but 0, equal on all its ranks. `ancestors`: {} for a run from
  /// scratch, else the lineage of the checkpoint that it goes on from (Manifest::lineage), {0} where that is
  /// older than lineages. prepare() and retain() treat only checkpoints of these runs as own. `branches`: by
  /// ancestor and at last for this run, what Manifest::branches says; empty where that is not known.
  RunFolder(Storage storage, std::string parent, std::uint64_t run, std::vector<std::uint64_t> ancestors = {},
            std::vector<std::int64_t> branches = {});

  const std::string& parent() const noexcept { return parent_; }
  /// The folder that the ranks write to; known without communication.
  std::string temporary(std::int64_t step) const;
  std::string final_path(std::int64_t step) const { return detail::join_path(parent_, step_name(step)); }

  /// Rank 0. Makes the folder, takes its lease (RunLease), removes the partial files of dead saves, and
  /// checks that `total_bytes` of all ranks are free. Refused while another process holds the lease, and
  /// where a checkpoint of this step belongs to a run that this one has nothing to do with.
  void prepare(std::int64_t step, std::int64_t total_bytes);
  /// Rank 0. Fills in the manifest's sequence, versions, time and the records of model.h5 and of the
  /// companions; manifest.shards are the gathered records. Checks that all shards are there and the lease is
  /// held, writes the companions, model.h5 and the manifest, renames. Returns the checkpoint's path.
  std::string commit(Manifest manifest, const Companions& companions = {});
  /// The failure in the last commit() once the checkpoint was there (`latest`, the removal of what it
  /// replaces): readers do not need it, and the next save does it again. Empty: nothing.
  std::string take_warning() { return std::exchange(warning_, {}); }
  /// Removes what a failed save has left.
  void discard(std::int64_t step);
  /// Removes complete checkpoints of this run and its ancestors that the rule, which counts only those, does
  /// not keep; returns their names.
  std::vector<std::string> retain(const Retention& rule);

 private:
  void write_synced(const std::string& path, const void* bytes, std::int64_t size);
  void require_held();
  /// Refuses to replace a checkpoint of a run that has nothing in common with this one.
  void require_own(const std::string& target);
  void remove_stale_folders(const std::string& own);
  void remove_folder(const std::string& name);
  std::int64_t next_sequence();

  Storage storage_;
  std::string parent_;
  std::vector<std::uint64_t> lineage_;  ///< this run is the last
  std::vector<std::int64_t> branches_;  ///< of lineage_, as in a Manifest
  std::optional<RunLease> lease_;       ///< on rank 0, from the first prepare() on
  std::string warning_;
  std::int64_t sequence_ = 0;  ///< of the newest known; 0: not looked yet
};

}  // namespace tranche::checkpoint
