#pragma once
/// State that lives in host memory or on NVMe: its memory, how gradients get to it, where its update works
/// and how new weights get from there to the device. Private to engine/.

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/flat_buffer.h"
#include "engine/residency.h"
#include "engine/shard_slice.h"
#include "engine/state_store.h"
#include "offload/aligned_buffer.h"
#include "offload/block_io.h"
#include "offload/host_link.h"
#include "offload/swap_file.h"
#include "offload/tile_ring.h"
#include "tranche/core/trace.h"
#include "tranche/engine/step_result.h"
#include "tranche/kernels/reduction.h"

namespace tranche::detail {

/// Memory that is used in turn: free for the next user once `free` has passed.
struct HostSlot {
  AlignedBuffer memory;
  Event free;
};
struct DeviceSlot {
  Buffer memory;
  Event free;
};

struct OffloadOptions {
  SwapFileOptions swap;              ///< looked at where the nvme tier is used
  double link_bytes_per_second = 0;  ///< a limit of each way, for tests; 0: none
  TraceRecorder* trace = nullptr;
  int host_threads = 1;
};

class OffloadedState {
 public:
  /// All arguments but `options` outlive it. Throws IoError when the swap file's folder cannot be used.
  OffloadedState(const Config& config, const Residency& residency, const StateResources& resources,
                 FileSystem& files, Ledger& ledger, const OffloadOptions& options);
  ~OffloadedState();
  OffloadedState(const OffloadedState&) = delete;
  OffloadedState& operator=(const OffloadedState&) = delete;

  // --- Start and end ---
  /// Memory and space on disk of one buffer's state.
  void allocate(FlatBuffer& flat);
  /// Buffers, streams and files, once all units have theirs. Returns why block I/O goes through threads, when
  /// it does though io_uring was looked for.
  std::string prepare(std::vector<UnitState>& units);
  /// Null without the nvme tier.
  SwapFile* swap() const { return swap_.get(); }
  /// Ends passes that an error left open and waits for all streams.
  void close() noexcept;

  HostLink& link() { return link_; }
  /// Updates, and kernels on host memory.
  Stream& host() { return *host_; }

  // --- A step ---
  /// Sends the main gradient of what this rank keeps to host memory, behind its reduction, and takes its
  /// statistics (device memory) on the way.
  void send_gradients(FlatBuffer& flat, kernels::GradientStatistics* statistics);
  /// Has the disk begin to read what the step will update.
  void read_ahead();
  /// This rank's shard on its way to `place` in device memory, once `ready` have passed.
  Event fetch_shard(FlatBuffer& flat, void* place, std::vector<Event> ready);
  /// Calls `update` for slices of all state that lives off the device, but for that of whole matrices, on the
  /// host stream, in the order of `trainable`; what it changes is written back. `observer`, which may be
  /// null, sees tiles before that.
  void update_each(const std::vector<FlatBuffer*>& trainable, StateObserver* observer,
                   const std::function<void(FlatBuffer&, const ShardSlice&)>& update);
  /// Slices of at most a tile; each has `gradient` and the place of the new weights. `write` issues what
  /// writes them (and may change the rest of the state) to the slice's stream. Afterwards the new weights are
  /// on their way to where they live, and the buffer's shard_ready says when they are there.
  void rewrite_weights(FlatBuffer& flat, const ShardSlice& slice,
                       const std::function<void(const ShardSlice&)>& write);
  /// New weights from the master weights of a slice.
  void publish(FlatBuffer& flat, const ShardSlice& slice);

  // --- Between steps ---
  /// Calls visit for the tiles that `range` meets, in host memory, one after the other; they are read before
  /// if `read`, written back after if `write`.
  void visit_tiles(FlatBuffer& flat, ElementRange range, bool read, bool write,
                   const std::function<void(const ShardSlice&)>& visit);
  /// Waits until issued updates of offloaded state have happened.
  void await_updates();
  /// Parameters on the nvme tier, to or from host memory.
  void read_parameters(FlatBuffer& flat, ElementRange range, void* to);
  void write_parameters(FlatBuffer& flat, ElementRange range, const void* from);

  /// Work that is issued from here on counts to the step that begins.
  void begin_report();
  void report(StepResult& result);

 private:
  /// The destination of new weights, and the slots through which copies send them to where they live.
  struct NewWeights {
    ElementRange range;
    std::byte* data = nullptr;  ///< null: master is the weight
    HostSlot* host = nullptr;
    DeviceSlot* device = nullptr;
  };
  NewWeights begin_weights(FlatBuffer& flat, ElementRange range, Stream& worker);
  Event finish_weights(FlatBuffer& flat, NewWeights& weights, Stream& worker);
  /// The slice of an open tile of `flat`.
  ShardSlice slice_of(const FlatBuffer& flat, const TileMemory& tile) const;
  /// Opens the swap file for input and output; the reason why that goes through threads, if it does.
  std::string open_io();
  std::unique_ptr<Stream> make_host_stream(const char* name, int threads);
  bool simulated() const { return resources_.device.kind() == DeviceKind::meta; }

  const Config& config_;
  const Residency& residency_;
  StateResources resources_;
  TraceRecorder* trace_;
  int host_threads_;
  HostLink link_;
  Stream& compute_;
  std::unique_ptr<BlockIo> io_;
  std::unique_ptr<SwapFile> swap_;
  std::unique_ptr<TileRing> ring_;
  std::vector<HostSlot> host_weights_;      ///< updated on the host, on their way to device or disk
  std::vector<DeviceSlot> device_weights_;  ///< updated on the device, on their way to the host
  std::vector<HostSlot> shards_;            ///< of parameters, on their way from the disk
  std::size_t next_host_weights_ = 0, next_device_weights_ = 0, next_shard_ = 0;
  std::vector<std::unique_ptr<RegisteredMemory>> registered_;

  /// Tiles of the optimizer's state as a step goes through them, but for those of whole matrices.
  std::vector<TileRef> update_order_;
  bool reading_ahead_ = false;

  HostLinkCounts link_before_;  ///< at the begin of the step, for its report
  TileRingCounts ring_before_;
  std::int64_t parameters_read_ = 0, parameters_written_ = 0;  ///< bytes on the nvme tier
  std::int64_t parameters_read_before_ = 0, parameters_written_before_ = 0;
  std::shared_ptr<std::atomic<double>> update_seconds_ = std::make_shared<std::atomic<double>>(0.0);

  std::unique_ptr<Stream> disk_reads_, disk_writes_;  ///< of parameters
  std::unique_ptr<Stream> host_;
};

}  // namespace tranche::detail
