#pragma once
/// The save that is under way. Private to engine/.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/folder.h"
#include "checkpoint/shard_plan.h"
#include "engine/background_work.h"
#include "engine/engine_impl.h"
#include "engine/tile_feed.h"
#include "offload/aligned_buffer.h"

namespace tranche {

/// The ranges that a save copies at once, and their places in the snapshot. As long as all state lives in
/// memory the snapshot is the file's image; else it holds what does, one piece behind the other, and behind
/// them memory for the blocks through which pieces and tiles go to the file.
struct SnapshotLayout {
  struct Part {
    checkpoint::SectionPiece piece;
    std::int64_t offset = 0;  ///< in the snapshot
  };
  std::int64_t bytes = 0;
  std::vector<Part> parts;  ///< unit by unit, sections in order
  std::vector<std::int64_t>
      arrays;                       ///< where each of the program's own lies; -1: this rank stores none of it
  std::vector<ElementRange> tiles;  ///< by unit: what lives on the nvme tier
  bool image = true;
  std::int64_t staging = 0;  ///< where the blocks' memory begins
};

/// All ranks agree on `phase`; it changes in collective calls only: none -> (every rank writes its
/// file) writing -> (rank 0 makes it a checkpoint) committing -> none.
struct Engine::Impl::Saving {
  enum class Phase { none, writing, committing };

  Saving(Impl& engine_in, FileSystem& file_system) : engine(engine_in), files(file_system) {}

  // --- saving.cpp ---
  void prepare();
  std::string save(const std::string& into, const SaveOptions& options);
  /// Checkpoints that are saved from here on descend from this one.
  void goes_on_from(const checkpoint::Manifest& loaded);
  bool at_rest() const;
  /// At a boundary, once `result` is complete but for what became of a save.
  void look_after(const std::vector<BoundaryRecord>& records, StepResult& result);
  void throw_failure();
  std::string finish();
  void close() noexcept;
  void describe_run(checkpoint::Manifest& described, const SaveOptions& options) const;
  checkpoint::Layout whole_layout() const;
  std::string text() const;
  void start_writing();
  /// Collective; no rank's work is running any more. Goes on to the next phase, with the path of the
  /// checkpoint when it has become one. Throws CheckpointError on all ranks, with nothing under way.
  std::string advance();
  std::string drain();

  // --- snapshot.cpp ---
  SnapshotLayout lay_out_snapshot(const checkpoint::ShardPlan& of) const;
  void reserve_snapshot(const checkpoint::ShardPlan& of);
  /// Copies what lives in memory.
  void take_snapshot(const std::vector<SavedArray>& arrays);
  /// From here on tiles are handed over: by the next step, or by hand_over_tiles().
  void open_tile_feed();
  /// The host stream hands over what is missing of this tile, as it finds it in memory.
  void hand_over_in_stream(int unit, const Stretch& stretch);
  /// The step has issued all of that.
  void finish_handing_over(Stream& stream);
  TileFeed::Tile tile_of(int unit, ElementRange range, const Stretch& stretch) const;
  /// Reads what is missing and hands it over; ends early, with false, once so many seconds have passed.
  bool hand_over_tiles(double seconds);

  Impl& engine;
  FileSystem& files;
  std::unique_ptr<BlockIo> io;  ///< made for the first save
  std::uint64_t token = 0;      ///< the number of this run, drawn by rank 0 for the first save; 0: not yet
  std::vector<std::uint64_t> ancestors;  ///< lineage of the checkpoint that this run goes on from
  AlignedBuffer snapshot;                ///< kept from save to save
  SnapshotLayout layout;                 ///< of the snapshot
  /// Of the nvme tier, by unit: what nobody was told to hand over yet. Empty ones stand for none.
  std::vector<ElementRange> missing;
  std::shared_ptr<TileGiver> giver;  ///< while anything is missing
  std::shared_ptr<TileFeed> feed;    ///< null: all state lives in memory
  std::optional<checkpoint::RunFolder> folder;

  Phase phase = Phase::none;
  std::string directory;
  std::int64_t step = -1;
  std::unique_ptr<checkpoint::ShardPlan> plan;
  checkpoint::Manifest manifest;  ///< complete but for the shards' records and what commit() fills in
  checkpoint::Retention retention;

  std::string failure;  ///< to be thrown by the next call that may
  std::string warning;  ///< of rank 0, written by `work`: what failed once the checkpoint was there
  BackgroundWork work;  ///< last: it uses all of the above
};

}  // namespace tranche
