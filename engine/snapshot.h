#pragma once
/// The copy of a rank's state for a save: state in memory is copied at once, tiles of the nvme tier when
/// steps read them (see the note in checkpoint_session.h). Private to engine/.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "checkpoint/shard_plan.h"
#include "engine/state_store.h"
#include "engine/tile_feed.h"
#include "offload/aligned_buffer.h"
#include "tranche/engine/saved_state.h"

namespace tranche::detail {

/// The ranges that a save copies at once, and their offsets in the snapshot. If all state is in memory, the
/// snapshot is the image of the file. Otherwise it contains the ranges in memory, one after another, followed
/// by memory for the blocks with which ranges and tiles are written to the file.
struct SnapshotLayout {
  struct Part {
    checkpoint::SectionPiece piece;
    std::int64_t offset = 0;  ///< in the snapshot
  };
  std::int64_t bytes = 0;
  std::vector<Part> parts;           ///< by unit, sections in order
  std::vector<std::int64_t> arrays;  ///< offsets of the program's own arrays; -1: this rank stores no part
  /// State on the nvme tier, with one entry for each trainable buffer: the range of one of its sections,
  /// which is the same in all.
  std::vector<checkpoint::SectionPiece> tiles;
  bool image = true;
  std::int64_t staging = 0;  ///< offset of the memory for blocks
};

class Snapshot final : public StateObserver {
 public:
  /// All arguments must outlive it. It observes the store during its lifetime.
  Snapshot(StateStore& store, Device& device, MemoryResource& host_memory);
  ~Snapshot() override;
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  /// Allocates the memory for a snapshot of `plan`, which later saves reuse.
  void reserve(const checkpoint::ShardPlan& plan);
  /// Copies the state that is in memory.
  void take(const checkpoint::ShardPlan& plan, const std::vector<SavedArray>& arrays, int rank);
  const SnapshotLayout& layout() const { return layout_; }
  std::span<std::byte> memory() const;

  /// Opens the feed, to which the next step, or hand_over_tiles(), then passes tiles.
  void open_tile_feed();
  /// Null: all state is in memory.
  const std::shared_ptr<TileFeed>& feed() const { return feed_; }
  /// Reads the missing tiles and passes them to the feed. Returns false if so many seconds have passed before
  /// all are done.
  bool hand_over_tiles(double seconds);

  void before_update(const FlatBuffer& flat, const ShardSlice& slice) override;
  void updates_issued(Stream& stream) override;
  void before_write() override;

 private:
  SnapshotLayout lay_out(const checkpoint::ShardPlan& plan) const;

  StateStore& store_;
  Device& device_;
  MemoryResource& host_memory_;
  AlignedBuffer memory_;
  SnapshotLayout layout_;
  std::vector<checkpoint::SectionPiece> missing_;  ///< tiles that no issued work will hand over yet
  std::shared_ptr<TileGiver> giver_;               ///< null when no tile is missing
  std::shared_ptr<TileFeed> feed_;
};

}  // namespace tranche::detail
