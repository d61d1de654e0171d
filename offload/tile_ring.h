#pragma once
/// Moves tiles of state on the nvme tier through host memory: each is read, updated, and written back in
/// place. A ring of buffers lets the three overlap.
///
/// Note: an offloaded update. engine/offloaded_state.h issues the update of one tile; this ring moves its
/// optimizer state, and offload/host_link.h its gradients and weights. With the state on the nvme tier:
///
///     gradients:  device --HostLink--> host memory, before the first tile
///     state:      disk --TileFlow--> ring buffer --updated on the host stream--> TileFlow --> disk
///     weights:    host slot --HostLink--> device; or written in place, if parameters live in host memory;
///                 or host slot --> disk, if parameters are on the nvme tier too
///
/// Streams and events order these steps: the host stream waits for gradients and state, and the copies of
/// weights wait for the update. With overlap the issuing thread waits for none of them. If the state is in
/// host memory, the ring is not used and the other steps are the same. The last tiles of an update use the
/// host memory of gradients that the update no longer needs, instead of ring buffers (LentMemory).

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "offload/block_io.h"
#include "offload/swap_file.h"
#include "tranche/device/memory.h"
#include "tranche/device/stream.h"

namespace tranche::detail {

class DiskMeter;
class WorkRecorder;

/// A group of tensors with equal element counts, stored tile by tile: a tile holds a range of the first
/// tensor, the same range of the second ..., each rounded up to 4096 bytes. One transfer moves a tile.
struct TileRegion {
  std::int64_t offset = 0;           ///< in the swap file
  std::int64_t elements = 0;         ///< of each tensor
  std::int64_t tile_elements = 0;    ///< of every tile except perhaps the last
  std::vector<std::int64_t> widths;  ///< bytes of `together` elements, for each tensor
  std::int64_t together = 1;         ///< elements stored as one block; a tile has whole blocks

  std::int64_t tiles() const;
  std::int64_t first_element(std::int64_t tile) const { return tile * tile_elements; }
  std::int64_t elements_of(std::int64_t tile) const;
  std::int64_t offset_of(std::int64_t tile) const;  ///< offset in the file
  std::int64_t bytes_of(std::int64_t tile) const;   ///< bytes transferred
  std::int64_t offset_in_tile(std::int64_t tile, int tensor) const;
  std::int64_t bytes() const;  ///< bytes of all tiles
};
/// Reserves the space of a region.
TileRegion reserve_region(SwapFile& file, std::int64_t elements, std::int64_t tile_elements,
                          std::vector<std::int64_t> widths, Category category, std::string_view tag,
                          std::int64_t together = 1);

struct TileRef {
  const TileRegion* region = nullptr;
  std::int64_t tile = 0;
};

struct TileRingOptions {
  int buffers = 4;                   ///< 3 or more let read, update and write overlap; 1 or 2 work too
  std::int64_t buffer_bytes = 0;     ///< of the largest tile
  WorkRecorder* recorder = nullptr;  ///< records the disk's work in a simulation; not owned
  /// Most reads under way, and writes; 0: as many as there are buffers. Other transfers of the disk wait for
  /// no more.
  int at_once = 0;
  std::shared_ptr<DiskMeter> meter = nullptr;  ///< told of transfers; null: one of its own
};

/// Memory that a pass may use for one tile instead of a buffer of the ring, until the tile is written.
struct LentMemory {
  void* data = nullptr;    ///< a multiple of io_alignment
  std::int64_t bytes = 0;  ///< at least those of the tile
  std::size_t after = 0;   ///< it is free once the tile with this index in the pass is updated
};

/// A tile in memory: data[i] is the beginning of its range of tensor i.
struct TileMemory {
  std::vector<void*> data;
  std::int64_t first = 0;  ///< its first element in the region
  std::int64_t elements = 0;
};

struct TileRingCounts {
  std::int64_t bytes_read = 0;  ///< requested bytes with padding to 4096; the same in a simulation
  std::int64_t bytes_written = 0;
  std::int64_t tiles = 0;
};

/// Used by one issuing thread, which drives a pass:
///     ring.begin(tiles);                       // the first reads start now
///     for (each tile) {
///       TileMemory memory = ring.open(stream); // stream waits for the tile
///       ... issue work on `stream` that uses memory ...
///       ring.close(stream, true);              // written back after that work
///     }
///     ring.end(stream);                        // stream waits for the last writes
/// The last tiles of a pass may lie in lent memory. All of them can be read while the buffers of the ring are
/// in use, and their writes, in descending order, begin only when the pass has nothing left to read.
/// All calls may be issued far ahead of the stream; the next pass may begin before this one's work is done
/// (its reads wait for writes of the same bytes). Each pass must be completed or abandoned. `stream` is a
/// host stream with its own thread (Device::create_host_stream), the same one throughout a pass; it outlives
/// the pass, as regions do.
///
/// Threads of the ring wait for transfers and start the next read of each free buffer, so that neither the
/// stream nor the issuing thread waits for a write (tile_flow.h has a tile's stages). Failures of transfers,
/// with file and range, become failures of the stream, reported by the next event waited for. After one,
/// nothing more is read or written, and begin() throws until abandon(). In a simulation (SwapFile::simulated)
/// nothing is transferred and the memory of open() must not be accessed; ledger entries and counts are those
/// of a run.
class TileRing {
 public:
  /// The buffers come from `host` (Category::optimizer, "nvme tiles") and are registered with `io` (which may
  /// be null in a simulation). All outlive the ring.
  TileRing(TileRingOptions options, SwapFile& file, BlockIo* io, MemoryResource& host);
  ~TileRing();  ///< abandons a pass, waits for the stream's work and for transfers
  TileRing(const TileRing&) = delete;
  TileRing& operator=(const TileRing&) = delete;

  /// With `read` false, tiles are only written (first filling), and open() returns unspecified content.
  /// The last lent.size() tiles are in `lent`, in this order, which must outlive the pass. Throws LogicError
  /// while another pass is open, InvalidArgument for tiles that do not fit their memory or the file, for
  /// memory that would be lent after its own tile, for two places
  /// that share memory, and for a tile that is twice in lent memory: its second read would wait for its first
  /// write, which waits for the last read.
  void begin(std::vector<TileRef> tiles, bool read = true, std::vector<LentMemory> lent = {});
  /// Opens the next tile in the order of begin(); `stream` waits for it. Throws LogicError while one is open,
  /// or when none is left.
  TileMemory open(Stream& stream);
  /// With `write` false the tile on the disk is not changed.
  void close(Stream& stream, bool write);
  /// Returns when each memory of `lent` is no longer used. `stream` waits for them in descending order.
  std::vector<Event> end(Stream& stream);
  /// Abandons a pass after an error: waits for the stream's work so far and for transfers, and drops the
  /// rest; an open tile is not written. Afterwards the ring can begin a new pass. Never throws.
  void abandon() noexcept;
  bool in_pass() const noexcept;
  int buffers() const noexcept;

  /// Counts, incremented when tiles are opened and closed.
  TileRingCounts counts() const;
  /// The seconds since the last call during which at least one transfer of the ring was in flight.
  double take_busy_seconds();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tranche::detail
