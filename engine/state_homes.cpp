// One way to the state of a unit, wherever it lives: in device memory, in host memory, or on NVMe.

#include <cstring>
#include <limits>

#include "engine/offloading.h"
#include "engine/saving.h"
#include "tranche/kernels/elementwise.h"

namespace tranche {

/// Of state that lives in memory: device or host.
Stretch Engine::Impl::stretch_of(UnitState& unit, ElementRange range) {
  FlatState& flat = unit.trainable;
  Stretch stretch;
  stretch.range = range;
  stretch.on_host = flat.optimizer_tier == OffloadTier::cpu;
  stretch.stream = stretch.on_host ? offload->host.get() : &compute;
  stretch.master = residency.master_at(flat, range.begin);
  for (std::size_t s = 0; s < state_tensors.size(); ++s) {
    stretch.state.push_back(residency.state_at(flat, s, state_tensors[s].dtype, range.begin));
  }
  return stretch;
}

void Engine::Impl::visit_state(UnitState& unit, ElementRange range, Access access,
                               const std::function<void(const Stretch&)>& visit) {
  FlatState& flat = unit.trainable;
  if (range.empty()) return;
  if (flat.optimizer_tier != OffloadTier::nvme) {
    const Stretch stretch = stretch_of(unit, range);
    if (stretch.on_host) stretch.stream->synchronize();  // updates under way
    visit(stretch);
    stretch.stream->synchronize();
    return;
  }
  // A checkpoint under way holds what there was when it began.
  if (access != Access::read && saving)
    (void)saving->hand_over_tiles(std::numeric_limits<double>::infinity());
  Stretch stretch;
  Offloading& off = *offload;
  if (off.reading_ahead) {  // between the last micro-batch and step(): the step begins its pass anew
    off.ring->abandon();
    off.reading_ahead = false;
  }
  const ElementRange kept = residency.optimizer_range(flat);
  const TileRegion& region = flat.tiles;
  const std::int64_t first = (range.begin - kept.begin) / region.tile_elements;
  const std::int64_t last = (range.end - 1 - kept.begin) / region.tile_elements;
  std::vector<TileRef> tiles;
  for (std::int64_t tile = first; tile <= last; ++tile) tiles.push_back({&region, tile});
  // A tile of which only a part is replaced keeps the rest.
  const bool whole = range == kept;
  off.ring->begin(std::move(tiles), access != Access::replace || !whole);
  for (std::int64_t tile = first; tile <= last; ++tile) {
    const TileMemory open = off.ring->open(*off.host);
    off.host->synchronize();
    const ElementRange held{kept.begin + open.first, kept.begin + open.first + open.elements};
    stretch.range = intersect(held, range);
    stretch.on_host = true;
    stretch.stream = off.host.get();
    const std::int64_t skipped = stretch.range.begin - held.begin;
    stretch.master = static_cast<std::byte*>(open.data[0]) + skipped * size_of(DataType::float32);
    stretch.state.clear();
    for (std::size_t s = 0; s < state_tensors.size(); ++s) {
      stretch.state.push_back(static_cast<std::byte*>(open.data[s + 1]) +
                              skipped * size_of(state_tensors[s].dtype));
    }
    visit(stretch);
    off.host->synchronize();
    off.ring->close(*off.host, access != Access::read);
  }
  off.ring->end(*off.host);
  off.host->synchronize();
}

void Engine::Impl::read_from(void* to, const void* from, std::int64_t bytes, bool on_host) {
  if (simulated() || bytes == 0) return;
  if (on_host) {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
    return;
  }
  runtime.device().copy_to_host(compute, to, from, bytes);
  compute.synchronize();
}

void Engine::Impl::write_to(void* to, const void* from, std::int64_t bytes, bool on_host) {
  if (simulated() || bytes == 0) return;
  if (on_host) {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
    return;
  }
  runtime.device().copy_from_host(compute, to, from, bytes);
  compute.synchronize();
}

void Engine::Impl::read_parameters(FlatState& flat, ElementRange range, void* to) {
  const DataType dtype = config.precision.compute;
  const std::int64_t bytes = range.size() * size_of(dtype);
  const std::int64_t first = residency.whole_parameters() ? 0 : flat.layout.shard_range(rank).begin;
  const std::int64_t skipped = (range.begin - first) * size_of(dtype);
  flat.filled.wait();
  if (offload) offload->host->synchronize();
  if (flat.parameters_tier != OffloadTier::nvme) {
    if (link) link->to_host().synchronize();  // of weights that were updated on the device
    read_from(to, static_cast<const std::byte*>(flat.parameters.data()) + skipped, bytes,
              flat.parameters_tier == OffloadTier::cpu);
    return;
  }
  offload->disk_writes->synchronize();
  if (simulated()) return;
  offload->io->wait(offload->io->read(offload->swap->file(), flat.parameters_offset + skipped, to, bytes));
}

void Engine::Impl::write_parameters(FlatState& flat, ElementRange range, const void* from) {
  const DataType dtype = config.precision.compute;
  const std::int64_t bytes = range.size() * size_of(dtype);
  const std::int64_t first = residency.whole_parameters() ? 0 : flat.layout.shard_range(rank).begin;
  const std::int64_t skipped = (range.begin - first) * size_of(dtype);
  flat.filled.wait();
  if (offload) offload->host->synchronize();
  if (flat.parameters_tier != OffloadTier::nvme) {
    if (link) {
      link->to_host().synchronize();
      link->from_host().synchronize();
    }
    write_to(static_cast<std::byte*>(flat.parameters.data()) + skipped, from, bytes,
             flat.parameters_tier == OffloadTier::cpu);
    return;
  }
  offload->disk_writes->synchronize();
  offload->disk_reads->synchronize();
  if (simulated()) return;
  offload->io->wait(offload->io->write(offload->swap->file(), flat.parameters_offset + skipped, from, bytes));
}

}  // namespace tranche
