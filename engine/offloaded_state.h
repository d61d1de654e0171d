#pragma once
/// State in host memory or on NVMe: its memory, the copies of gradients to it, its update, and the copies of
/// new weights to the device. Private to engine/.

#include <atomic>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/flat_buffer.h"
#include "engine/residency.h"
#include "engine/shard_slice.h"
#include "engine/state_store.h"
#include "offload/aligned_buffer.h"
#include "offload/block_io.h"
#include "offload/disk_meter.h"
#include "offload/host_link.h"
#include "offload/swap_file.h"
#include "offload/tile_ring.h"
#include "tranche/core/trace.h"
#include "tranche/engine/step_result.h"
#include "tranche/kernels/reduction.h"

namespace tranche::detail {

/// One of several buffers that are used in rotation. Its next user waits for `free`.
struct HostSlot {
  AlignedBuffer memory;
  Event free;
};
struct DeviceSlot {
  Buffer memory;
  Event free;
};

/// Counts since the start. Those of parameters are bytes on the nvme tier.
struct OffloadCounts {
  HostLinkCounts link;
  TileRingCounts ring;
  std::int64_t parameters_read = 0, parameters_written = 0;
};

struct OffloadOptions {
  SwapFileOptions swap;              ///< has no effect without the nvme tier
  double link_bytes_per_second = 0;  ///< a limit of each direction, for tests; 0: none
  TraceRecorder* trace = nullptr;
  int host_threads = 1;
};

/// Host memory of gradients that the last tiles of an update use.
struct LentGradients {
  std::vector<LentMemory> memory;
  std::vector<std::pair<FlatBuffer*, std::size_t>> lenders;  ///< a buffer, and its first place in `memory`
};

class OffloadedState {
 public:
  /// All arguments but `options` must outlive it. Throws IoError when the swap file's folder cannot be used.
  OffloadedState(const Config& config, const Residency& residency, const StateResources& resources,
                 FileSystem& files, Ledger& ledger, const OffloadOptions& options);
  ~OffloadedState();
  OffloadedState(const OffloadedState&) = delete;
  OffloadedState& operator=(const OffloadedState&) = delete;

  // --- Start and end ---
  /// Allocates memory and disk space for one buffer's state.
  void allocate(FlatBuffer& flat);
  /// Makes buffers, streams and files, once allocate() has been called for all units. `visits`: the buffers
  /// in the order in which a step goes through their state (visits_of_step()). Returns the reason why block
  /// I/O uses threads, if io_uring was requested or possible but cannot be used.
  std::string prepare(std::vector<UnitState>& units, std::span<const FlatBuffer* const> visits);
  /// Null without the nvme tier.
  SwapFile* swap() const { return swap_.get(); }
  /// Abandons a pass that an error left open, and waits for all streams.
  void close() noexcept;

  HostLink& link() { return link_; }
  /// The stream for updates, and for kernels on host memory.
  Stream& host() { return *host_; }

  // --- A step ---
  /// Copies the main gradient of this rank's range to host memory after its reduction, and computes its
  /// statistics (in device memory).
  void send_gradients(FlatBuffer& flat, kernels::GradientStatistics* statistics);
  /// Copies this rank's shard of the parameters to `place` in device memory, once `ready` have passed.
  /// Returns the end of the copy.
  Event fetch_shard(FlatBuffer& flat, void* place, std::vector<Event> ready);
  // An update of state, or of parameters, that live off the device:
  //     begin_update();
  //     for (each buffer of a rule with sums) visit_next(flat, visit);
  //     for (each tile of each buffer) {
  //       const ShardSlice slice = open_tile(flat, tile);
  //       ... issue work on the slice's stream ...
  //       close_tile();
  //     }
  //     end_update();
  // Buffers of whole matrices are visited before they are updated, too. All buffers are visited and updated
  // in the order that prepare() was given.
  /// Starts the pass over the state on disk: the first tiles are read from now on, as many as there are
  /// buffers. Does nothing if the pass has begun.
  void begin_update();
  /// Announces the buffer whose update comes next, with tranche.update: as_reduced. If the pass has another
  /// order, the reads that are left start anew with this buffer, and later passes take the new order.
  void expect_update(const FlatBuffer& flat);
  /// Calls visit for the tiles of a buffer on the nvme tier, the next ones of the pass. They are written back
  /// after the work that visit issues to the slice's stream.
  void visit_next(FlatBuffer& flat, const std::function<void(const ShardSlice&)>& visit);
  /// The number of tiles in which the state that this rank keeps of a buffer is updated.
  std::int64_t update_tiles(const FlatBuffer& flat) const;
  /// Opens the next tile. Returns its state, its gradient, and memory for the new weights, which the work on
  /// the slice's stream has to write. `observer` (may be null) sees state in tiles before it changes.
  ShardSlice open_tile(FlatBuffer& flat, std::int64_t tile, StateObserver* observer = nullptr);
  /// Copies the new weights to their tier, and writes the state back. FlatBuffer::shard_ready passes when the
  /// weights are there.
  void close_tile();
  /// Ends the pass once all of its tiles have been closed.
  void end_update();
  /// Makes new weights from the master weights of a slice.
  void publish(FlatBuffer& flat, const ShardSlice& slice);

  // --- Between steps ---
  /// Calls visit for each tile that overlaps `range`, in host memory. The tile is read from the disk before
  /// (`read`) and written back after (`write`); the writes are done on return. Abandons the pass of a step
  /// that has not been updated yet.
  void visit_tiles(FlatBuffer& flat, ElementRange range, bool read, bool write,
                   const std::function<void(const ShardSlice&)>& visit);
  /// Waits until the issued updates of offloaded state are done.
  void await_updates();
  /// Copies parameters on the nvme tier to or from host memory.
  void read_parameters(FlatBuffer& flat, ElementRange range, void* to);
  void write_parameters(FlatBuffer& flat, ElementRange range, const void* from);

  /// Begins a step: its report counts the work that is issued from here on.
  void begin_report();
  void report(StepResult& result);

 private:
  /// The tile that is open, and the slots that hold its new weights on their way to their tier.
  struct OpenTile {
    FlatBuffer* flat = nullptr;
    ShardSlice slice;  ///< its weight has no data if master is the weight
    HostSlot* host = nullptr;
    DeviceSlot* device = nullptr;
    std::shared_ptr<double> begun;  ///< the time in seconds at which its work on the host began
  };
  /// The offset of a parameter on the nvme tier in the swap file.
  std::int64_t place_of(const FlatBuffer& flat, std::int64_t element) const;
  const ShardSlice& open_weights(FlatBuffer& flat, const ShardSlice& slice);
  void close_weights();
  /// The slice of an open tile of `flat`.
  ShardSlice slice_of(const FlatBuffer& flat, const TileMemory& tile) const;
  /// Starts block I/O on the swap file, and registers the slots' memory with it.
  void open_io();
  std::unique_ptr<Stream> make_host_stream(const char* name, int threads);
  /// The number of buffers beyond offload_optimizer.buffer_count, into which tiles are read ahead: as many as
  /// fit in the bytes of tranche.host_state that hold no state, and at most one for each tile.
  int more_tile_buffers(const std::vector<UnitState>& units, std::int64_t largest_tile) const;
  /// Lends the host memory of gradients to the last tiles of an update.
  void lend_gradients(std::vector<UnitState>& units, std::span<const FlatBuffer* const> visits,
                      std::int64_t largest_tile);
  bool simulated() const { return resources_.device.kind() == DeviceKind::meta; }

  const Config& config_;
  const Residency& residency_;
  StateResources resources_;
  TraceRecorder* trace_;
  int host_threads_;
  HostLink link_;
  Stream& compute_;
  std::shared_ptr<DiskMeter> disk_;  ///< null without the nvme tier
  std::unique_ptr<BlockIo> io_;
  std::unique_ptr<SwapFile> swap_;
  std::unique_ptr<TileRing> ring_;
  std::vector<HostSlot> host_weights_;      ///< new weights on their way from the host to device or disk
  std::vector<DeviceSlot> device_weights_;  ///< new weights on their way from the device to the host
  std::vector<HostSlot> shards_;            ///< shards of parameters on their way from the disk
  std::size_t next_host_weights_ = 0, next_device_weights_ = 0, next_shard_ = 0;
  std::vector<std::unique_ptr<RegisteredMemory>> registered_;

  /// The tiles of optimizer state in the order in which a step visits them. A tile occurs twice if the step
  /// visits it before its update.
  std::vector<TileRef> update_order_;
  LentGradients lent_;
  std::size_t expected_ = 0;  ///< the number of tiles of the pass that expect_update() has announced
  bool updating_ = false;     ///< the pass of a step's update has begun
  OpenTile open_;

  OffloadCounts before_;  ///< the counts at the start of the step
  std::int64_t parameters_read_ = 0, parameters_written_ = 0;
  std::shared_ptr<std::atomic<double>> update_seconds_ = std::make_shared<std::atomic<double>>(0.0);

  std::unique_ptr<Stream> disk_reads_, disk_writes_;  ///< of parameters
  std::unique_ptr<Stream> host_;
};

}  // namespace tranche::detail
