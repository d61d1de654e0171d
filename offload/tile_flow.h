#pragma once
/// The state that the threads of a TileRing share: which tile is in which buffer, and its stage. For offload/
/// only.

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "offload/block_io.h"
#include "offload/disk_meter.h"

namespace tranche::detail {

/// Tiles have positions, counted over all passes. A tile goes through these stages:
///
///     queued --its memory is free--> reading --> in_memory --leave(), write--> left --> writing --> settled
///     queued --add(), read = false--> in_memory --leave(), no write--> settled
///
/// Thread-safe. One thread waits for reads and one for writes; the thread that makes a read possible submits
/// it, in order. Reads, and likewise writes, wait in `queued` and `left` while others of their kind are under
/// way, so that other transfers of the disk do not wait for all of them. Writes from lent memory come last,
/// once all reads of their pass have begun, and from the last tile to the first.
class TileFlow {
 public:
  struct Tile {
    std::int64_t offset = 0;  ///< offset in the file
    std::int64_t bytes = 0;
    char* memory = nullptr;  ///< several tiles may use the same, one after the other
    /// Lent memory may be used once the tile with this index in the pass, an earlier one, has been left. -1:
    /// the memory is not lent.
    std::int64_t lent_after = -1;
  };
  /// The memory of tiles must live until finish(), which must be called. At most `at_once` reads are under
  /// way, and as many writes.
  TileFlow(BlockIo& io, std::size_t at_once, std::shared_ptr<DiskMeter> meter);

  /// Appends the tiles of a pass, which are transferred from and to `file`. Returns the position of the
  /// first. Rethrows the failure that has stopped the flow.
  std::int64_t add(File& file, const std::vector<Tile>& tiles, bool read);
  /// The work that uses this tile, the next one, has been issued.
  void issued(std::int64_t position) noexcept;
  /// Blocks until the tile is in memory. This and the next three throw the failure that has stopped the flow.
  void await_tile(std::int64_t position);
  /// Submits the tile's write, as soon as not too many are under way, or only frees its memory.
  void leave(std::int64_t position, bool write);
  /// Blocks until the tile is written.
  void await_settled(std::int64_t position);
  /// Blocks until all tiles before this position are written.
  void await_left(std::int64_t end);

  /// Prevents further reads and writes; waiters throw `failure`, or report that the stream failed.
  void stop(std::exception_ptr failure) noexcept;
  /// Prevents further reads of tiles from this position on.
  void cut(std::int64_t from) noexcept;
  /// Forgets all tiles and the failure, once what was left is written and nothing is in flight. No thread may
  /// be waiting.
  void reset() noexcept;
  /// Ends the threads, once nothing is in flight.
  void finish() noexcept;

 private:
  enum class Stage : std::uint8_t { queued, reading, in_memory, left, writing, settled };
  struct Place {
    Tile tile;
    File* file = nullptr;
    bool read = false;
    Stage stage = Stage::queued;
    std::int64_t pass_end = 0;  // the position behind the last tile of its pass
  };
  struct UnderWay {
    IoTicket ticket;
    std::int64_t position = 0;
    double begun = 0;
  };
  struct Lane {
    const char* track = "";           // of the trace
    double ended = 0;                 // the last transfer's end
    std::vector<UnderWay> under_way;  // in the order of submission; at most at_once_
    std::condition_variable arrived;  // a transfer has been submitted, or the flow ends
    std::thread thread;
  };
  Place& at(std::int64_t position);
  std::int64_t end() const { return first_ + static_cast<std::int64_t>(places_.size()); }
  bool settled(std::int64_t position);
  bool can_start(std::int64_t position);
  void start_reads();
  void start_writes();
  std::int64_t next_write();
  void started(Lane& lane, IoTicket ticket, std::int64_t position);
  void ended(Lane& lane, const UnderWay& transfer);
  void tell_meter() noexcept;
  bool idle() const { return reads_.under_way.empty() && writes_.under_way.empty(); }
  void settle(std::int64_t position);
  void stop_locked(std::exception_ptr failure) noexcept;
  void check_not_stopped() const;
  void run(Lane& lane);

  BlockIo& io_;
  const std::shared_ptr<DiskMeter> meter_;
  const std::size_t at_once_;

  std::mutex mutex_;
  std::condition_variable changed_;  // a tile's stage has changed, or stopped_
  std::deque<Place> places_;         // for the positions from first_ on
  std::int64_t first_ = 0;           // all tiles before are settled
  std::int64_t next_ = 0;            // the first tile that is still queued
  std::deque<std::int64_t> left_;    // tiles whose writes wait for others
  std::vector<std::int64_t> lent_;   // the same for lent memory
  std::int64_t issued_ = 0;          // the first tile whose work has not been issued
  bool stopped_ = false;
  std::exception_ptr failure_;
  bool finishing_ = false;
  Lane reads_, writes_;
};

}  // namespace tranche::detail
