#pragma once
/// Internal: state that lives in host memory or on NVMe, and what works on it. offloading.cpp,
/// state_homes.cpp.

#include <atomic>
#include <memory>
#include <vector>

#include "tranche/engine/engine_impl.h"
#include "tranche/offload/aligned_buffer.h"
#include "tranche/offload/block_io.h"
#include "tranche/offload/swap_file.h"
#include "tranche/offload/tile_ring.h"

namespace tranche {

/// A stretch of a unit's master weights and optimizer state in memory: each the address of element
/// range.begin.
struct Engine::Impl::Stretch {
  ElementRange range;
  std::byte* master = nullptr;
  std::vector<std::byte*> state;
  Stream* stream = nullptr;  ///< for kernels that work on it
  bool on_host = false;
};

/// Memory that is handed round: free for the next user once `free` has passed.
struct HostSlot {
  AlignedBuffer memory;
  Event free;
};
struct DeviceSlot {
  Buffer memory;
  Event free;
};

struct Engine::Impl::NewWeights {
  ElementRange range;
  std::byte* data = nullptr;  ///< where the update writes them; null: master is the weight
  HostSlot* host = nullptr;
  DeviceSlot* device = nullptr;
};

struct Engine::Impl::Offloading {
  explicit Offloading(HostLink& link_in) : link(link_in) {}
  ~Offloading();
  Offloading(const Offloading&) = delete;
  Offloading& operator=(const Offloading&) = delete;

  HostLink& link;
  std::unique_ptr<BlockIo> io;
  std::unique_ptr<SwapFile> swap;
  std::unique_ptr<TileRing> ring;
  Buffer norm_workspace;
  std::vector<HostSlot> weights;           ///< updated on the host, on their way to device or disk
  std::vector<DeviceSlot> device_weights;  ///< updated on the device, on their way to the host
  std::vector<HostSlot> shards;            ///< of parameters, on their way from the disk
  std::size_t next_weights = 0, next_device_weights = 0, next_shard = 0;
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
