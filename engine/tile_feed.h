#pragma once
/// Passes tiles of state on the nvme tier from the code that has them in memory to the thread that writes a
/// checkpoint (see the note in checkpoint_session.h). Private to engine/.

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "engine/shard_slice.h"

namespace tranche::detail {

/// Passes one tile at a time: the giver waits until the taker has copied it. Neither waits forever, because
/// the giver may call finish() or cancel(), and the taker close(). Thread-safe for one giver at a time and
/// one taker; finish(), cancel() and close() may be called by any thread.
class TileFeed {
 public:
  struct Tile {
    int buffer = 0;    ///< FlatBuffer::trainable_index
    ShardSlice slice;  ///< master weights and state, in host memory
  };

  /// Returns when the tile's memory is no longer read: it was used, or no taker will take it.
  void hand_over(const Tile& tile) noexcept;
  /// True if a tile that is handed over now or later will be used.
  bool wanted() const noexcept;
  /// Called after all tiles were handed over.
  void finish() noexcept;
  /// Declares that no more tiles will be handed over although some are missing; no effect after finish().
  void cancel() noexcept;

  /// Waits for a tile and passes it to `use`; returns false when there are no more. Throws CheckpointError
  /// once cancelled, and exceptions of `use`, after which no tile is taken any more.
  bool take(const std::function<void(const Tile&)>& use);
  /// Declares that no tile will be taken any more: givers do not wait.
  void close() noexcept;

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  const Tile* offered_ = nullptr;
  bool in_use_ = false;
  bool finished_ = false, cancelled_ = false, closed_ = false;
};

/// Shared by all issued work that hands over a save's tiles. If the last owner is destroyed before all tiles
/// were handed over, because a failed stream dropped its work or because of an exception, the feed is
/// cancelled.
class TileGiver {
 public:
  explicit TileGiver(std::shared_ptr<TileFeed> feed) : feed_(std::move(feed)) {}
  ~TileGiver() { feed_->cancel(); }
  TileGiver(const TileGiver&) = delete;
  TileGiver& operator=(const TileGiver&) = delete;
  TileFeed& feed() { return *feed_; }

 private:
  std::shared_ptr<TileFeed> feed_;
};

}  // namespace tranche::detail
