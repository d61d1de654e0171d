#pragma once
/// Tiles of state on the nvme tier on their way through host memory: read, worked on, written back in place;
/// a ring of buffers lets the three overlap.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "offload/block_io.h"
#include "offload/swap_file.h"
#include "tranche/device/memory.h"
#include "tranche/device/stream.h"

namespace tranche::detail {

class WorkRecorder;

/// Some tensors of equal element count, kept tile by tile: the tile's piece of the first tensor, of the
/// second ..., each rounded up to 4096 bytes. One transfer moves a tile.
struct TileRegion {
  std::int64_t offset = 0;           ///< in the swap file
  std::int64_t elements = 0;         ///< of each tensor
  std::int64_t tile_elements = 0;    ///< of all tiles but perhaps the last
  std::vector<std::int64_t> widths;  ///< bytes of `together` elements, by tensor
  std::int64_t together = 1;         ///< a tile that ends within as many has them whole

  std::int64_t tiles() const;
  std::int64_t first_element(std::int64_t tile) const { return tile * tile_elements; }
  std::int64_t elements_of(std::int64_t tile) const;
  std::int64_t offset_of(std::int64_t tile) const;  ///< in the file
  std::int64_t bytes_of(std::int64_t tile) const;   ///< as transferred
  std::int64_t offset_in_tile(std::int64_t tile, int tensor) const;
  std::int64_t bytes() const;  ///< of all tiles
};
/// Reserves the space for a region.
TileRegion reserve_region(SwapFile& file, std::int64_t elements, std::int64_t tile_elements,
                          std::vector<std::int64_t> widths, Category category, std::string_view tag,
                          std::int64_t together = 1);

struct TileRef {
  const TileRegion* region = nullptr;
  std::int64_t tile = 0;
};

struct TileRingOptions {
  int buffers = 4;                   ///< at least 3 for read, work and write to overlap; 1 or 2 work too
  std::int64_t buffer_bytes = 0;     ///< of the largest tile
  WorkRecorder* recorder = nullptr;  ///< of a simulation: keeps what the disk would do; not owned
};

/// A tile in memory: data[i] is where its piece of tensor i begins.
struct TileMemory {
  std::vector<void*> data;
  std::int64_t first = 0;  ///< element of the region
  std::int64_t elements = 0;
};

struct TileRingCounts {
  std::int64_t bytes_read = 0;  ///< asked for, padding of 4096 included; the same in a simulation
  std::int64_t bytes_written = 0;
  std::int64_t tiles = 0;
};

/// Used by one issuing thread, which drives a pass:
///     ring.begin(tiles);                       // the first reads start now, whatever follows
///     for (each tile) {
///       TileMemory memory = ring.open(stream); // stream waits for the tile
///       ... issue work on `stream` that uses memory ...
///       ring.close(stream, true);              // written back behind that work
///     }
///     ring.end(stream);                        // stream waits for the last writes
/// All of it may be issued far ahead of the stream; the next pass may begin before this one's work is done
/// (its reads wait for writes of the same bytes). A pass that has begun must be gone through or abandoned.
/// `stream` is a host stream with a thread of its own (Device::create_host_stream), the same one throughout a
/// pass; it outlives the pass, regions do too.
///
/// Threads of the ring wait for transfers and give each free buffer its next read, so that neither the stream
/// nor the issuing thread waits for a write. Failures of transfers, with file and range, surface as
/// failures of the stream: by the next event waited for. After one nothing more is read or written, and
/// begin() throws until abandon(). In a simulation (SwapFile::simulated) nothing is
/// transferred and the memory of open() must not be touched; ledger entries and counts are those of a run.
class TileRing {
 public:
  /// Buffers come from `host` (Category::optimizer, "nvme tiles"), are registered with `io` (which may be
  /// null in a simulation). All outlive the ring.
  TileRing(TileRingOptions options, SwapFile& file, BlockIo* io, MemoryResource& host);
  ~TileRing();  ///< abandons a pass, waits for work on the stream and for transfers
  TileRing(const TileRing&) = delete;
  TileRing& operator=(const TileRing&) = delete;

  /// `read` false: tiles are written only (first filling); open() gives unspecified content then.
  /// LogicError while another pass is open, InvalidArgument for tiles that do not fit buffer or file.
  void begin(std::vector<TileRef> tiles, bool read = true);
  /// The next tile in the order of begin(); `stream` waits for it. LogicError while one is open, or when none
  /// is left.
  TileMemory open(Stream& stream);
  /// `write` false: the tile is left as it is on the disk.
  void close(Stream& stream, bool write);
  void end(Stream& stream);
  /// Gives a pass up after an error: waits for what the stream was given so far and for transfers, drops the
  /// rest; a tile that is open is not written. Afterwards the ring is as new. Never throws.
  void abandon() noexcept;
  bool in_pass() const noexcept;

  /// Counted as tiles are opened and closed.
  TileRingCounts counts() const;
  /// Seconds during which at least one transfer of the ring was under way, since the last call.
  double take_busy_seconds();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tranche::detail
