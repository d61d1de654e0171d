#pragma once
/// The copy of a rank's state that a save writes: memory is copied at once, tiles of the nvme tier as steps
/// read them anyway. Private to engine/.

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

/// The ranges that a save copies at once, and their places in the snapshot. As long as all state lives in
/// memory the snapshot is the file's image; else it holds what does, one piece behind the other, and behind
/// them memory for the blocks through which pieces and tiles go to the file.
struct SnapshotLayout {
  struct Part {
    checkpoint::SectionPiece piece;
    std::int64_t offset = 0;  ///< in the snapshot
  };
  std::int64_t bytes = 0;
  std::vector<Part> parts;           ///< unit by unit, sections in order
  std::vector<std::int64_t> arrays;  ///< offsets of the program's own; -1: this rank stores none of it
  /// State on the nvme tier, one entry for each trainable buffer: a piece of one of its sections, which are
  /// all alike.
  std::vector<checkpoint::SectionPiece> tiles;
  bool image = true;
  std::int64_t staging = 0;  ///< offset of the blocks' memory
};

class Snapshot final : public StateObserver {
 public:
  /// All arguments outlive it. Observes the store while it lives.
  Snapshot(StateStore& store, Device& device, MemoryResource& host_memory);
  ~Snapshot() override;
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  /// Takes the memory that a snapshot of `plan` needs, which is kept from save to save.
  void reserve(const checkpoint::ShardPlan& plan);
  /// Copies what lives in memory.
  void take(const checkpoint::ShardPlan& plan, const std::vector<SavedArray>& arrays, int rank);
  const SnapshotLayout& layout() const { return layout_; }
  std::span<std::byte> memory() const;

  /// Tiles are handed over from now on, by the next step or by hand_over_tiles().
  void open_tile_feed();
  /// Null: all state lives in memory.
  const std::shared_ptr<TileFeed>& feed() const { return feed_; }
  /// Reads what is missing and hands it over; ends early, with false, once so many seconds have passed.
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
  std::vector<checkpoint::SectionPiece> missing_;  ///< tiles that nothing was told to hand over yet
  std::shared_ptr<TileGiver> giver_;               ///< while anything is missing
  std::shared_ptr<TileFeed> feed_;
};

}  // namespace tranche::detail
