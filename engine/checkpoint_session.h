#pragma once
/// Saving: a rank's state is copied once and written by a thread behind the next steps. Private to engine/.

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

/// The save in progress. All ranks agree on its phase, which changes in collective calls only: none -> (every
/// rank writes its file) writing -> (rank 0 makes it a checkpoint) committing -> none. Where the weights were
/// not known to be good by then, none -> (rank 0 removes older checkpoints) retaining -> none once they are.
class CheckpointSession {
 public:
  /// All arguments outlive it; calls marked collective are so over `ranks`. `log` and `trace` (which may be
  /// null) take lines and spans of the work on files.
  CheckpointSession(StateStore& store, const Config& config, Communicator& ranks, Device& device,
                    MemoryResource& host_memory, FileSystem& files, const Logger& log, TraceRecorder* trace);
  CheckpointSession(const CheckpointSession&) = delete;
  CheckpointSession& operator=(const CheckpointSession&) = delete;

  /// Takes the memory of snapshots now (Config::save_buffer).
  void reserve();
  /// The layout of a checkpoint of everything in the store.
  checkpoint::Layout whole_layout() const;
  /// The layout of a checkpoint: without the frozen base of adapters, unless LoraConfig::save_base asks for
  /// it.
  checkpoint::Layout saved_layout() const;
  /// Collective. Ends the save before, copies the state and begins to write it; the path that the checkpoint
  /// will have. `manifest` says what rank 0 adds about the run. Throws CheckpointError on all ranks.
  /// `proven`: these weights gave a finite loss or gradient.
  std::string save(const std::string& directory, const SaveOptions& options, std::int64_t step, bool proven,
                   const std::function<void(checkpoint::Manifest&)>& manifest);
  /// Checkpoints that are saved from here on descend from this one.
  void goes_on_from(const checkpoint::Manifest& loaded);
  /// The files that travel with all checkpoints that are saved from here on; only rank 0's count.
  void carry(checkpoint::Companions companions) { companions_ = std::move(companions); }

  /// The weights that were saved last gave a finite loss or gradient since, or those did that came of them.
  /// Does nothing behind forget_last_save() until the next save.
  void prove() { proven_ = proven_ || provable_; }
  /// Other weights were loaded or written: nothing that follows proves the weights that were saved last.
  void forget_last_save() { proven_ = provable_ = retention_waits_ = false; }
  /// Begins the removal of older checkpoints that waited for prove(). On all ranks alike, between calls.
  void settle();

  bool in_progress() const { return phase_ != Phase::none; }
  /// True when this rank's part of the phase is done.
  bool at_rest() const;
  /// Collective, with every rank at rest. Goes on to the next phase; the path of the checkpoint when it has
  /// become one. A failure is thrown by the next throw_failure().
  std::string advance_quietly();
  /// Throws the CheckpointError of a save that failed behind a step, once.
  void throw_failure();
  /// Collective. Waits for the save in progress; the path of its checkpoint, empty when there was none.
  std::string finish();
  /// At the engine's end. `together`: the peers end here too, so that a save can be finished with them.
  void close(bool together) noexcept;

 private:
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
  std::uint64_t token_ = 0;      ///< the number of this run, drawn by rank 0 for the first save; 0: not yet
  std::vector<std::uint64_t> ancestors_;  ///< lineage of the checkpoint that this run goes on from
  std::vector<std::int64_t> branches_;    ///< and of the ancestors and this run Manifest::branches
  checkpoint::Companions companions_;     ///< on rank 0
  Snapshot snapshot_;
  std::optional<checkpoint::RunFolder> folder_;

  Phase phase_ = Phase::none;
  std::string directory_;
  std::int64_t step_ = -1;
  std::unique_ptr<checkpoint::ShardPlan> plan_;
  checkpoint::Manifest manifest_;  ///< complete but for the shards' records and what commit() fills in
  checkpoint::Retention retention_;
  bool proven_ = false;           ///< what was saved last; see prove()
  bool provable_ = false;         ///< the present weights come of what was saved last
  bool retention_waits_ = false;  ///< for prove()

  std::string failure_;  ///< to be thrown by the next call that may
  std::string warning_;  ///< of rank 0, written by `work_`: what failed once the checkpoint was there
  BackgroundWork work_;  ///< last: it uses all of the above
};

}  // namespace tranche::detail
