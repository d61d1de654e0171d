#pragma once
/// State that lives in host memory or on NVMe, and what works on it. Private to engine/.

#include <atomic>
#include <memory>
#include <vector>

#include "engine/engine_impl.h"
#include "offload/aligned_buffer.h"
#include "offload/block_io.h"
#include "offload/swap_file.h"
#include "offload/tile_ring.h"

namespace tranche {

/// Memory that is handed round: free for the next user once `free` has passed.
struct HostSlot {
  AlignedBuffer memory;
  Event free;
};
struct DeviceSlot {
  Buffer memory;
  Event free;
};

/// Offloaded state: how gradients get to it, its update in place, how new weights come back.
struct Engine::Impl::Offloading {
  Offloading(Impl& engine_in, HostLink& link_in) : engine(engine_in), link(link_in) {}
  ~Offloading();
  Offloading(const Offloading&) = delete;
  Offloading& operator=(const Offloading&) = delete;

  /// Memory and space on disk of one unit's state.
  void allocate(UnitState& unit);
  /// Buffers, streams and files, once all units have theirs.
  void prepare();
  void close() noexcept;

  void send_gradients_home(UnitState& unit);
  /// Has the disk begin to read what the step will update.
  void read_ahead();
  /// This rank's shard on its way to `place` in device memory, once `ready` have passed.
  Event bring_shard(UnitState& unit, FlatState& flat, void* place, std::vector<Event> ready);
  /// Of all units whose state lives elsewhere.
  void update(const OptimizerStep& step);
  void update_stretch(UnitState& unit, const Stretch& stretch, const OptimizerStep& step);
  /// New weights from a stretch of master weights.
  Event publish_stretch(UnitState& unit, const Stretch& stretch);
  /// Work that is issued from here on counts to the step that begins.
  void begin_report();
  void report(StepResult& result);

  /// The destination of new weights, and the copies that send them where they live.
  struct NewWeights {
    ElementRange range;
    std::byte* data = nullptr;  ///< where the update writes them; null: master is the weight
    HostSlot* host = nullptr;
    DeviceSlot* device = nullptr;
  };
  NewWeights begin_weights(FlatState& flat, ElementRange range, Stream& worker);
  Event finish_weights(UnitState& unit, FlatState& flat, NewWeights& weights, Stream& worker);

  Impl& engine;
  HostLink& link;
  std::unique_ptr<BlockIo> io;
  std::unique_ptr<SwapFile> swap;
  std::unique_ptr<TileRing> ring;
  Buffer norm_workspace;
  std::vector<HostSlot> host_weights;      ///< updated on the host, on their way to device or disk
  std::vector<DeviceSlot> device_weights;  ///< updated on the device, on their way to the host
  std::vector<HostSlot> shards;            ///< of parameters, on their way from the disk
  std::size_t next_host_weights = 0, next_device_weights = 0, next_shard = 0;
  std::vector<std::unique_ptr<RegisteredMemory>> registered;

  std::vector<TileRef> update_order;  ///< every tile of the optimizer's state, as a step goes through them
  bool reading_ahead = false;

  HostLinkCounts link_before;  ///< at the begin of the step, for its report
  TileRingCounts ring_before;
  std::int64_t parameters_read = 0, parameters_written = 0;  ///< bytes on the nvme tier
  std::int64_t parameters_read_before = 0, parameters_written_before = 0;
  OffloadTraffic step_traffic;
  std::shared_ptr<std::atomic<double>> update_seconds = std::make_shared<std::atomic<double>>(0.0);

  std::unique_ptr<Stream> disk_reads, disk_writes;  ///< of parameters
  std::unique_ptr<Stream> host;                     ///< updates; kernels on host memory
};

}  // namespace tranche
