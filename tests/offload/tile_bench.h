#pragma once
/// Support for tests of tile rings: the objects that a ring needs, and passes over a region.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "offload/tile_ring.h"
#include "tranche/device/device.h"
#include "tranche/device/memory_resources.h"

namespace tranche::testing {

/// A device, a swap file and an engine.
struct TileBench {
  TileBench(const std::string& folder, detail::FileSystem& files, detail::BlockIoOptions io_options = {},
            bool simulated = false)
      : device(make_device({.kind = simulated ? DeviceKind::meta : DeviceKind::cpu})),
        host(device->memory(Tier::host), ledger),
        swap({.directory = folder, .simulated = simulated}, files, ledger),
        io(simulated ? nullptr : detail::make_block_io(io_options)),
        stream(device->create_host_stream("host", 1)) {}
  detail::TileRegion region(std::int64_t elements, std::int64_t tile, std::vector<std::int64_t> widths) {
    return detail::reserve_region(swap, elements, tile, std::move(widths), Category::optimizer, "states");
  }
  detail::TileRing ring(int buffers, std::int64_t bytes) {
    return detail::TileRing({.buffers = buffers, .buffer_bytes = bytes}, swap, io.get(), host);
  }

  Ledger ledger;
  std::unique_ptr<Device> device;
  TrackingResource host;
  detail::SwapFile swap;
  std::unique_ptr<detail::BlockIo> io;
  std::unique_ptr<Stream> stream;
};

inline std::vector<detail::TileRef> tiles_of(const detail::TileRegion& region) {
  std::vector<detail::TileRef> result;
  for (std::int64_t tile = 0; tile < region.tiles(); ++tile) result.push_back({&region, tile});
  return result;
}

/// Applies `work` to the value and index of each element of a region, which is one tensor of int64. Returns
/// when each lent memory has been given back.
inline std::vector<Event> pass(
    TileBench& bench, detail::TileRing& ring, const detail::TileRegion& region, bool read,
    const std::function<std::int64_t(std::int64_t value, std::int64_t element)>& work, bool write = true,
    std::vector<detail::LentMemory> lent = {}) {
  ring.begin(tiles_of(region), read, std::move(lent));
  for (std::int64_t tile = 0; tile < region.tiles(); ++tile) {
    const detail::TileMemory memory = ring.open(*bench.stream);
    bench.stream->enqueue("work", [memory, work] {
      auto* values = static_cast<std::int64_t*>(memory.data[0]);
      for (std::int64_t i = 0; i < memory.elements; ++i) values[i] = work(values[i], memory.first + i);
    });
    ring.close(*bench.stream, write);
  }
  return ring.end(*bench.stream);
}

}  // namespace tranche::testing
