#pragma once
/// Saving: a rank's state is copied once, and a thread writes the copy during the next steps. Private to
/// engine/.
///
/// Note: a save in progress. All ranks are in the same phase, because it changes only in collective calls:
///
///     none --save(): copy the state--> writing      each rank's thread writes the file of its shard
///     writing --all ranks at rest--> committing     rank 0's thread writes the manifest, renames the folder
///     committing --rank 0 at rest--> none           the checkpoint is complete
///     writing --any rank failed--> none             files are removed, the next call throws CheckpointError
///     none --settle()--> retaining --> none         rank 0 removes older checkpoints, after the saved
///                                                   weights were proved good
///
/// Steps exchange the progress: each rank puts at_rest() into StepRecord::save_at_rest, and when all are at
/// rest, the end of the step calls advance_quietly(). finish() does the same without steps, by polling. State
/// in memory is copied by save() itself (snapshot.h). Tiles on the nvme tier are handed to the thread by the
/// next step's update, which reads them anyway (tile_feed.h), or by finish().

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/folder.h"
#include "checkpoint/shard_plan.h"
#include "engine/background_work.h"
#include "engine/snapshot.h"
#include "engine/state_store.h"
#include "offload/block_io.h"
#include "tranche/core/log.h"
#include "tranche/core/trace.h"
#include "tranche/engine/saved_state.h"

namespace tranche::detail {

/// The save in progress. Its phase is equal on all ranks (see the note above). If the weights were not known
/// to be good when the checkpoint was committed, older checkpoints are removed only when they are.
class CheckpointSession {
 public:
  /// All arguments must outlive it; calls marked collective are collective over `ranks`. `log` and `trace`
  /// (may be null) receive lines and spans of file operations.
  CheckpointSession(StateStore& store, const Config& config, Communicator& ranks, Device& device,
                    MemoryResource& host_memory, FileSystem& files, const Logger& log, TraceRecorder* trace);
  CheckpointSession(const CheckpointSession&) = delete;
  CheckpointSession& operator=(const CheckpointSession&) = delete;

  /// Allocates the memory of snapshots now (Config::save_buffer).
  void reserve();
  /// The layout of a checkpoint of the whole store.
  checkpoint::Layout whole_layout() const;
  /// The layout of a checkpoint, without the frozen base of adapters unless LoraConfig::save_base is set.
  checkpoint::Layout saved_layout() const;
  /// Collective. Finishes the save before, copies the state and starts writing it; returns the future path of
  /// the checkpoint. `manifest` adds rank 0's record of the run. `proven`: these weights gave a finite loss
  /// or gradient. Throws CheckpointError on all ranks.
  std::string save(const std::string& directory, const SaveOptions& options, std::int64_t step, bool proven,
                   const std::function<void(checkpoint::Manifest&)>& manifest);
  /// Later checkpoints record this one as their ancestor. Retention neither counts nor removes the `damaged`
  /// checkpoints, which were passed over.
  void goes_on_from(const checkpoint::Manifest& loaded, const std::vector<std::string>& damaged);
  /// Sets the files that later checkpoints include beside the weights; only rank 0's are used.
  void carry(checkpoint::Companions companions) { companions_ = std::move(companions); }

  /// Records that the saved weights, or later ones derived from them, gave a finite loss or gradient. No
  /// effect between forget_last_save() and the next save.
  void prove() { proven_ = proven_ || provable_; }
  /// Records that other weights were loaded or written, so that later results do not prove the saved weights.
  void forget_last_save() { proven_ = provable_ = retention_waits_ = false; }
  /// Starts the removal of older checkpoints that was waiting for prove(). All ranks call it at the same
  /// point.
  void settle();

  bool in_progress() const { return phase_ != Phase::none; }
  /// True when this rank has finished its work of the phase.
  bool at_rest() const;
  /// Collective, with every rank at rest. Enters the next phase; returns the path of the checkpoint when it
  /// has become complete. throw_failure() throws a failure later.
  std::string advance_quietly();
  /// Throws, once, the CheckpointError of a save that failed after a step.
  void throw_failure();
  /// Collective. Waits for the save in progress; returns the path of its checkpoint, empty when there was
  /// none.
  std::string finish();
  /// Called when the engine ends. `together`: the peers end here too, so that the save can be finished with
  /// them.
  void close(bool together) noexcept;

 private:
  /// True if this path is that of the checkpoint being saved.
  bool is_being_saved(const std::string& checkpoint) const;
  enum class Phase { none, writing, committing, retaining };
  void retain();
  std::string text() const;
  void start_writing();
  std::string advance();
  std::string drain();

  StateStore& store_;
  const Config& config_;
  Communicator& ranks_;
  Device& device_;
  MemoryResource& host_memory_;
  FileSystem& files_;
  const Logger& log_;
  TraceRecorder* trace_;
  std::unique_ptr<BlockIo> io_;  ///< made for the first save
  std::uint64_t token_ = 0;      ///< this run's number, drawn by rank 0 for the first save; 0: not drawn yet
  std::vector<std::uint64_t> ancestors_;  ///< lineage of the checkpoint from which this run continues
  std::vector<std::int64_t> branches_;    ///< Manifest::branches of the ancestors and this run
  checkpoint::Companions companions_;     ///< on rank 0
  Snapshot snapshot_;
  std::optional<checkpoint::RunFolder> folder_;

  Phase phase_ = Phase::none;
  std::string directory_;
  std::int64_t step_ = -1;
  std::unique_ptr<checkpoint::ShardPlan> plan_;
  checkpoint::Manifest manifest_;  ///< without the shards' records and the fields that commit() sets
  /// On rank 0, model.h5, which is the same for every save. It is made within save(), because the program may
  /// use HDF5 while its thread writes, and not every HDF5 is thread-safe.
  std::optional<checkpoint::MasterImage> master_;
  checkpoint::Retention retention_;
  std::vector<std::string> damaged_;  ///< paths of checkpoints that were found damaged
  bool proven_ = false;               ///< the last saved weights are good; see prove()
  bool provable_ = false;             ///< the present weights derive from the last saved ones
  bool retention_waits_ = false;      ///< retention waits for prove()

  std::string failure_;  ///< the message of a failure that the next call throws
  std::string warning_;  ///< on rank 0, set by `work_`: errors after the checkpoint was complete
  BackgroundWork work_;  ///< last member, because it uses all others
};

}  // namespace tranche::detail
