#pragma once
/// Internal: tiles of state on the nvme tier, from whoever has them in memory to the thread that writes a
/// checkpoint.

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "engine/shard_slice.h"

namespace tranche::detail {

/// One tile at a time: a giver stands still until the taker has copied it. Neither waits for what does not
/// come: the giver may finish() or cancel(), the taker close(). Thread-safe for one giver at a time and one
/// taker; finish(), cancel() and close() may come from any thread.
class TileFeed {
 public:
  struct Tile {
    int buffer = 0;    ///< FlatBuffer::trainable_index
    ShardSlice slice;  ///< master weights and state, in host memory
  };

  /// Returns when nobody looks at the tile any more: it was used, or nobody takes tiles (now, or any longer).
  void hand_over(const Tile& tile) noexcept;
  /// True when a tile would still be taken, now or later.
  bool wanted() const noexcept;
  /// All tiles were handed over.
  void finish() noexcept;
  /// No more tiles come though some are missing; nothing when finished.
  void cancel() noexcept;

  /// Waits for a tile and has it used; false when there is none any more. Throws CheckpointError once
  /// cancelled, and what `use` throws, after which nothing is taken any more.
  bool take(const std::function<void(const Tile&)>& use);
  /// Nothing is taken any more: givers go on at once.
  void close() noexcept;

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  const Tile* offered_ = nullptr;
  bool in_use_ = false;
  bool finished_ = false, cancelled_ = false, closed_ = false;
};

/// Shared by all pieces of work that hand a save's tiles over. When the last of them is gone and not all was
/// handed over, because a stream that has failed drops its work or because something was thrown in between,
/// the feed is cancelled.
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
