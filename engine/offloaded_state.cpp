// Memory of offloaded state, gradients on their way to it, and new weights on their way back.

#include "engine/offloaded_state.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <set>

#include "core/clock.h"
#include "device/work_recorder.h"
#include "offload/calibration.h"
#include "tranche/core/shape.h"
#include "tranche/kernels/elementwise.h"

namespace tranche::detail {

namespace {

/// Records a transfer of the disk for a plan's simulation.
void note_disk(Stream& stream, WorkKind kind, const std::string& unit, std::int64_t bytes) {
  if (stream.recorder() == nullptr) return;
  RecordedWork work;
  work.kind = kind;
  work.name = name_of(kind);
  work.detail = unit;
  (kind == WorkKind::disk_read ? work.bytes_read : work.bytes_written) = static_cast<double>(bytes);
  stream.recorder()->add(stream.lane(), std::move(work));
}

template <class Slot>
Slot& take(std::vector<Slot>& slots, std::size_t& next) {
  Slot& slot = slots[next];
  next = (next + 1) % slots.size();
  return slot;
}

std::vector<TileRef> tiles_of(const TileRegion& region, std::int64_t begin, std::int64_t end) {
  std::vector<TileRef> tiles;
  for (std::int64_t tile = begin; tile < end; ++tile) tiles.push_back({&region, tile});
  return tiles;
}

}  // namespace

OffloadedState::OffloadedState(const Config& config, const Residency& residency,
                               const StateResources& resources, FileSystem& files, Ledger& ledger,
                               const OffloadOptions& options)
    : config_(config),
      residency_(residency),
      resources_(resources),
      trace_(options.trace),
      host_threads_(options.host_threads),
      link_(resources.device, HostLinkOptions{options.link_bytes_per_second, options.trace}),
      compute_(resources.device.compute_stream()) {
  if (!config.offload.uses_nvme()) return;
  disk_ = std::make_shared<DiskMeter>(options.trace);
  swap_ = std::make_unique<SwapFile>(options.swap, files, ledger);
}

/// Ends the streams that work on the slots before the slots are freed, also if the engine was not made.
OffloadedState::~OffloadedState() {
  host_.reset();
  disk_writes_.reset();
  disk_reads_.reset();
  for (Stream* stream : {&link_.from_host_stream(), &link_.to_host_stream()}) {
    try {
      stream->synchronize();
    } catch (...) {  // the user of the failed work has the error
    }
  }
}

void OffloadedState::allocate(FlatBuffer& flat) {
  if (flat.optimizer_tier == OffloadTier::none || flat.empty()) return;
  const std::int64_t kept = residency_.optimizer_range(flat).size();
  flat.host_gradients = Buffer(resources_.host_memory, kept * size_of(config_.precision.accumulation),
                               Category::gradients, flat.name + " gradients");
  if (flat.optimizer_tier != OffloadTier::nvme) return;
  constexpr std::int64_t together = shard_multiple_elements;
  std::vector<std::int64_t> widths{bytes_of(residency_.master_type(flat), together)};
  for (const OptimizerStateTensor& state : flat.states) widths.push_back(bytes_of(state.dtype, together));
  flat.tiles = reserve_region(*swap_, kept, config_.offload.tile_elements, std::move(widths),
                              Category::optimizer, flat.name + " optimizer", together);
}

std::unique_ptr<Stream> OffloadedState::make_host_stream(const char* name, int threads) {
  std::unique_ptr<Stream> stream = resources_.device.create_host_stream(name, threads);
  stream->set_trace(trace_);
  return stream;
}

void OffloadedState::open_io() {
  const OffloadConfig& offload = config_.offload;
  swap_->check_space();
  BlockIoOptions options;
  options.engine = offload.io_engine == "uring"     ? BlockIoEngine::uring
                   : offload.io_engine == "threads" ? BlockIoEngine::threads
                                                    : BlockIoEngine::automatic;
  if (offload.io_block_bytes > 0) options.block_bytes = offload.io_block_bytes;
  if (offload.io_depth > 0) options.depth = offload.io_depth;
  io_ = make_block_io(options);
  for (std::vector<HostSlot>* list : {&host_weights_, &shards_}) {
    for (HostSlot& slot : *list) {
      registered_.push_back(io_->register_memory(slot.memory.data(), slot.memory.bytes()));
    }
  }
}

std::string OffloadedState::prepare(std::vector<UnitState>& units,
                                    std::span<const FlatBuffer* const> visits) {
  const OffloadConfig& offload = config_.offload;
  const std::int64_t compute_bytes = size_of(config_.precision.compute);
  bool through_host = false, through_device = false;  // new weights on the way to where they live
  std::int64_t largest_update = 0, largest_shard = 0, largest_tile = 0;
  for (UnitState& unit : units) {
    for (FlatBuffer& flat : unit.buffers) {
      const bool on_disk = flat.parameters_tier == OffloadTier::nvme && !flat.empty();
      if (on_disk) {
        largest_shard = std::max(largest_shard, flat.layout.shard_elements() * compute_bytes);
        flat.parameters_offset = swap_->reserve(flat.layout.shard_elements() * compute_bytes,
                                                Category::parameters, flat.name + " parameters");
      }
      through_host = through_host || on_disk;
      if (!flat.trainable) continue;
      if (!flat.empty() && flat.optimizer_tier != OffloadTier::none) {
        through_host = through_host || flat.parameters_tier != OffloadTier::cpu;
      } else if (!flat.empty()) {
        through_device = through_device || flat.parameters_tier != OffloadTier::none;
      }
      largest_update =
          std::max(largest_update, std::min(offload.tile_elements, residency_.optimizer_range(flat).size()));
      if (flat.tiles.elements > 0) largest_tile = std::max(largest_tile, flat.tiles.bytes_of(0));
    }
  }
  for (const FlatBuffer* flat : visits) {
    if (flat->tiles.elements == 0) continue;
    const std::vector<TileRef> tiles = tiles_of(flat->tiles, 0, flat->tiles.tiles());
    update_order_.insert(update_order_.end(), tiles.begin(), tiles.end());
  }
  const auto slots = [&](std::vector<HostSlot>& into, int count, std::int64_t bytes, Category category,
                         const char* tag) {
    for (int i = 0; i < count; ++i) {
      into.push_back(
          {AlignedBuffer(resources_.host_memory, round_up(bytes, io_alignment), category, tag), {}});
      // This touches all pages once, and defines the bytes that are written beyond the last element.
      if (!simulated()) {
        std::memset(into.back().memory.data(), 0, static_cast<std::size_t>(into.back().memory.bytes()));
      }
    }
  };
  if (through_host) {
    slots(host_weights_, offload.tile_buffers, largest_update * compute_bytes, Category::parameters,
          "updated weights");
  }
  if (through_device) {
    for (int i = 0; i < 2; ++i) {
      device_weights_.push_back({Buffer(resources_.device_memory, largest_update * compute_bytes,
                                        Category::parameters, "updated weights"),
                                 {}});
    }
  }
  if (largest_shard > 0) {
    slots(shards_, offload.parameter_buffers, largest_shard, Category::parameters, "shards from nvme");
  }
  host_ = make_host_stream("host update", host_threads_);
  if (!offload.uses_nvme()) return {};
  disk_reads_ = make_host_stream("disk reads", 1);
  disk_writes_ = make_host_stream("disk writes", 1);
  if (!simulated()) open_io();
  if (largest_tile > 0) {
    const int buffers = offload.tile_buffers + more_tile_buffers(units, largest_tile);
    ring_ = std::make_unique<TileRing>(TileRingOptions{.buffers = buffers,
                                                       .buffer_bytes = largest_tile,
                                                       .recorder = host_->recorder(),
                                                       .at_once = offload.tile_buffers,
                                                       .meter = disk_},
                                       *swap_, io_.get(), resources_.host_memory);
    lend_gradients(units, visits, largest_tile);
  }
  return io_ ? io_->fallback_reason() : std::string();
}

int OffloadedState::more_tile_buffers(const std::vector<UnitState>& units, std::int64_t largest_tile) const {
  std::int64_t left = config_.offload.host_state_bytes(), tiles = 0;
  for (const UnitState& unit : units) {
    for (const FlatBuffer& flat : unit.buffers) {
      if (flat.parameters_stay) left -= residency_.parameter_bytes(flat);
      if (flat.optimizer_stays) left -= residency_.tile_bytes(flat);
      tiles += flat.tiles.elements > 0 ? flat.tiles.tiles() : 0;
    }
  }
  return narrow<int>(
      std::clamp<std::int64_t>(left / AlignedBuffer::requested_bytes(largest_tile), 0,
                               std::max<std::int64_t>(0, tiles - config_.offload.tile_buffers)));
}

// Once a buffer is updated, the host memory of its gradient is of no use until the next backward pass. The
// last tiles are read into it, so that their writes can wait for that pass, in which the disk has little else
// to do: the norm of the gradients, which comes at its end, decides about the next updates.
void OffloadedState::lend_gradients(std::vector<UnitState>& units, std::span<const FlatBuffer* const> visits,
                                    std::int64_t largest_tile) {
  if (config_.update == UpdateTime::as_reduced) return;  // updates use the memory during the backward pass
  std::map<const FlatBuffer*, std::size_t> after;  // the last tile whose update needs the buffer's gradient
  const std::size_t total = update_order_.size();
  std::size_t visited = 0;
  for (const FlatBuffer* flat : visits) {
    const auto tiles = static_cast<std::size_t>(flat->tiles.elements > 0 ? flat->tiles.tiles() : 0);
    after[flat] = tiles > 0 ? visited + tiles - 1 : visited;
    visited += tiles;
  }
  std::multimap<std::size_t, FlatBuffer*> order;
  for (UnitState& unit : units) {
    for (FlatBuffer& flat : unit.buffers) {
      if (flat.host_gradients && after.contains(&flat)) order.emplace(after.at(&flat), &flat);
    }
  }
  for (const auto& [last, flat] : order) {
    // The number does not depend on the address, so that a plan lends as much as a run.
    const std::int64_t count = (flat->host_gradients.bytes() - io_alignment) / largest_tile;
    if (count <= 0) continue;
    lent_.lenders.emplace_back(flat, lent_.memory.size());
    const auto past = reinterpret_cast<std::uintptr_t>(flat->host_gradients.data()) % io_alignment;
    std::byte* place =
        static_cast<std::byte*>(flat->host_gradients.data()) + (past > 0 ? io_alignment - past : 0);
    for (std::int64_t i = 0; i < count; ++i, place += largest_tile)
      lent_.memory.push_back({place, largest_tile, last});
  }
  // Memory is lent to as many of the last tiles as are visited there for the last time, and are read later
  // than the memory is free by the number of the ring's buffers, by which reads run ahead.
  std::size_t count = 0;
  std::set<std::pair<const TileRegion*, std::int64_t>> seen;
  while (count < std::min(lent_.memory.size(), total)) {
    const TileRef& tile = update_order_[total - count - 1];
    if (!seen.emplace(tile.region, tile.tile).second) break;
    ++count;
  }
  const auto buffers = static_cast<std::size_t>(ring_->buffers());
  const auto usable = [&] {
    for (std::size_t i = 0; i < count; ++i) {
      if (lent_.memory[i].after + buffers > total - count + i) return false;
    }
    return true;
  };
  while (count > 0 && !usable()) --count;
  lent_.memory.resize(count);
  std::erase_if(lent_.lenders, [count](const auto& lender) { return lender.second >= count; });
}

void OffloadedState::close() noexcept {
  if (ring_) ring_->abandon();  // ends a pass that an error left open, while its stream exists
  for (Stream* stream : {host_.get(), disk_writes_.get(), disk_reads_.get(), &link_.from_host_stream(),
                         &link_.to_host_stream()}) {
    if (stream == nullptr) continue;
    try {
      stream->synchronize();
    } catch (...) {  // the user of the failed work has the error
    }
  }
}

// --- Gradients ------------------------------------------------------------------------------------------

void OffloadedState::send_gradients(FlatBuffer& flat, kernels::GradientStatistics* statistics) {
  Stream& stream = link_.to_host_stream();
  stream.wait(flat.reduce_done);
  kernels::gradient_statistics(stream, residency_.gradients(flat, flat.owned()), statistics);
  const TensorView kept = residency_.gradients(flat, residency_.optimizer_range(flat));
  const std::array ready{flat.host_gradients_free};
  flat.gradients_on_host = link_.copy_to_host(flat.host_gradients.data(), kept.data, kept.bytes(), ready);
  flat.transient_gradients.release(flat.gradients_on_host);
  if (!config_.overlap) flat.gradients_on_host.wait();
}

// --- Parameters -----------------------------------------------------------------------------------------

Event OffloadedState::fetch_shard(FlatBuffer& flat, void* place, std::vector<Event> ready) {
  const std::int64_t bytes = flat.layout.shard_elements() * size_of(config_.precision.compute);
  if (flat.parameters_tier == OffloadTier::cpu) {
    return link_.copy_from_host(place, flat.parameters.data(), bytes, ready);
  }
  HostSlot& slot = take(shards_, next_shard_);
  disk_reads_->wait(slot.free);
  disk_reads_->wait(flat.shard_ready);
  const std::int64_t transferred = round_up(bytes, io_alignment);
  note_disk(*disk_reads_, WorkKind::disk_read, flat.name, transferred);
  disk_->ask();
  disk_reads_->enqueue("read " + flat.name,
                       [this, memory = slot.memory.data(), offset = flat.parameters_offset, transferred] {
                         const DiskMeter::Transfer transfer(*disk_, /*asked=*/true);
                         io_->wait(io_->read(swap_->file(), offset, memory, transferred));
                       });
  parameters_read_ += transferred;
  ready.push_back(disk_reads_->record());
  slot.free = link_.copy_from_host(place, slot.memory.data(), bytes, ready);
  return slot.free;
}

const ShardSlice& OffloadedState::open_weights(FlatBuffer& flat, const ShardSlice& slice) {
  open_ = {&flat, slice, nullptr, nullptr, nullptr};
  Stream& worker = *slice.stream;
  void* data = nullptr;
  if (!slice.on_host) {
    open_.device = &take(device_weights_, next_device_weights_);
    worker.wait(open_.device->free);
    data = open_.device->memory.data();
  } else if (flat.parameters_tier != OffloadTier::cpu) {
    open_.host = &take(host_weights_, next_host_weights_);
    worker.wait(open_.host->free);
    data = open_.host->memory.data();
  } else if (flat.master || flat.tiles.elements > 0) {
    data = residency_.parameters(flat, slice.range).data;  // written in place
  }
  open_.slice.weight = {data, config_.precision.compute, Shape{slice.range.size()}};
  if (slice.on_host) {
    open_.begun = std::make_shared<double>(0.0);
    worker.enqueue("update " + flat.name, [begun = open_.begun] { *begun = seconds_now(); });
  }
  return open_.slice;
}

void OffloadedState::close_weights() {
  FlatBuffer& flat = *open_.flat;
  const ShardSlice& slice = open_.slice;
  Stream& worker = *slice.stream;
  if (slice.on_host) {
    worker.enqueue("updated " + flat.name, [begun = open_.begun, sum = update_seconds_] {
      sum->fetch_add(seconds_now() - *begun);  // report() takes it
    });
  }
  const std::int64_t width = size_of(config_.precision.compute), bytes = slice.range.size() * width;
  const std::int64_t first = slice.range.begin - flat.shard().begin;
  Event written = worker.record();
  if (flat.parameters_tier == OffloadTier::none) {
    // Kernels of the previous step and peers may still read the old weights.
    const std::vector<Event> ready{written, compute_.record(), flat.gather_done};
    open_.host->free = flat.shard_ready =
        link_.copy_from_host(residency_.parameters(flat, slice.range).data, slice.weight.data, bytes, ready);
    return;
  }
  if (flat.parameters_tier == OffloadTier::cpu) {
    if (open_.device != nullptr) {
      const std::vector<Event> ready{written, flat.gather_done};
      written = open_.device->free = link_.copy_to_host(
          static_cast<std::byte*>(flat.parameters.data()) + first * width, slice.weight.data, bytes, ready);
    }
    flat.shard_ready = written;
    return;
  }
  HostSlot* slot = open_.host;
  if (open_.device != nullptr) {
    slot = &take(host_weights_, next_host_weights_);
    const std::vector<Event> ready{written, slot->free};
    written = open_.device->free = link_.copy_to_host(slot->memory.data(), slice.weight.data, bytes, ready);
  }
  const std::int64_t transferred = round_up(bytes, io_alignment);
  disk_writes_->wait(written);
  disk_writes_->wait(flat.gather_done);
  note_disk(*disk_writes_, WorkKind::disk_write, flat.name, transferred);
  disk_writes_->enqueue("write " + flat.name, [this, memory = slot->memory.data(), transferred,
                                               offset = flat.parameters_offset + first * width] {
    const DiskMeter::Transfer transfer(*disk_);
    io_->wait(io_->write(swap_->file(), offset, memory, transferred));
  });
  parameters_written_ += transferred;
  slot->free = flat.shard_ready = disk_writes_->record();
}

void OffloadedState::publish(FlatBuffer& flat, const ShardSlice& slice) {
  const std::int64_t tile = config_.offload.tile_elements;
  for (std::int64_t begin = slice.range.begin; begin < slice.range.end; begin += tile) {
    copy_master_to_weight(
        open_weights(flat, part_of(slice, {begin, std::min(begin + tile, slice.range.end)})));
    close_weights();
  }
}

// --- The update -----------------------------------------------------------------------------------------

void OffloadedState::begin_update() {
  if (update_order_.empty() || updating_) return;
  ring_->begin(update_order_, true, lent_.memory);
  updating_ = true;
  expected_ = 0;
}

void OffloadedState::expect_update(const FlatBuffer& flat) {
  if (flat.tiles.elements == 0) return;
  const auto next = update_order_.begin() + static_cast<std::ptrdiff_t>(expected_);
  expected_ += static_cast<std::size_t>(flat.tiles.tiles());
  if (updating_ && next->region == &flat.tiles) return;
  std::stable_partition(next, update_order_.end(),
                        [&](const TileRef& ref) { return ref.region == &flat.tiles; });
  if (updating_) ring_->abandon();  // otherwise a visit has done so
  ring_->begin({next, update_order_.end()});
  updating_ = true;
}

void OffloadedState::visit_next(FlatBuffer& flat, const std::function<void(const ShardSlice&)>& visit) {
  for (std::int64_t tile = 0; tile < flat.tiles.tiles(); ++tile) {
    visit(slice_of(flat, ring_->open(*host_)));
    ring_->close(*host_, true);
  }
}

std::int64_t OffloadedState::update_tiles(const FlatBuffer& flat) const {
  const std::int64_t tile = config_.offload.tile_elements;
  return (residency_.optimizer_range(flat).size() + tile - 1) / tile;
}

ShardSlice OffloadedState::open_tile(FlatBuffer& flat, std::int64_t tile, StateObserver* observer) {
  const bool on_host = flat.optimizer_tier != OffloadTier::none;
  if (on_host && tile == 0) {
    host_->wait(flat.gradients_on_host);
    if (flat.parameters_tier == OffloadTier::cpu) host_->wait(flat.gather_done);
  }
  ShardSlice slice;
  if (flat.optimizer_tier == OffloadTier::nvme) {
    slice = slice_of(flat, ring_->open(*host_));
  } else {
    const ElementRange kept = residency_.optimizer_range(flat);
    const std::int64_t begin = kept.begin + tile * config_.offload.tile_elements;
    slice = residency_.slice(flat, {begin, std::min(begin + config_.offload.tile_elements, kept.end)});
    slice.stream = on_host ? host_.get() : &compute_;
  }
  if (flat.in_tiles() && observer != nullptr) observer->before_update(flat, slice);
  slice.gradient =
      on_host ? residency_.host_gradients(flat, slice.range) : residency_.gradients(flat, slice.range);
  return open_weights(flat, slice);
}

void OffloadedState::close_tile() {
  close_weights();
  if (open_.flat->optimizer_tier == OffloadTier::nvme) ring_->close(*host_, true);
}

void OffloadedState::end_update() {
  const std::vector<Event> given_back = updating_ ? ring_->end(*host_) : std::vector<Event>();
  for (const auto& [flat, first] : lent_.lenders) {
    if (!given_back.empty()) flat->host_gradients_free = given_back[first];
  }
  updating_ = false;
  if (!config_.overlap) host_->synchronize();
}

// --- Between steps --------------------------------------------------------------------------------------

ShardSlice OffloadedState::slice_of(const FlatBuffer& flat, const TileMemory& tile) const {
  const std::int64_t first = residency_.optimizer_range(flat).begin + tile.first;
  const Shape shape{tile.elements};
  ShardSlice slice;
  slice.range = {first, first + tile.elements};
  slice.stream = host_.get();
  slice.on_host = true;
  slice.master = {tile.data[0], residency_.master_type(flat), shape};
  slice.rounding = residency_.rounding();
  for (std::size_t s = 0; s < flat.states.size(); ++s) {
    slice.state.push_back({tile.data[s + 1], flat.states[s].dtype, shape});
  }
  return slice;
}

void OffloadedState::visit_tiles(FlatBuffer& flat, ElementRange range, bool read, bool write,
                                 const std::function<void(const ShardSlice&)>& visit) {
  if (updating_) {  // between the last micro-batch and step(): the step begins its pass anew
    ring_->abandon();
    updating_ = false;
  }
  const std::int64_t kept = residency_.optimizer_range(flat).begin;
  const TileRegion& region = flat.tiles;
  const std::int64_t first = (range.begin - kept) / region.tile_elements;
  const std::int64_t last = (range.end - 1 - kept) / region.tile_elements;
  ring_->begin(tiles_of(region, first, last + 1), read);
  for (std::int64_t tile = first; tile <= last; ++tile) {
    const TileMemory open = ring_->open(*host_);
    host_->synchronize();
    visit(slice_of(flat, open));
    host_->synchronize();
    ring_->close(*host_, write);
  }
  ring_->end(*host_);
  host_->synchronize();
}

void OffloadedState::await_updates() {
  host_->synchronize();
}

std::int64_t OffloadedState::place_of(const FlatBuffer& flat, std::int64_t element) const {
  return flat.parameters_offset + (element - flat.shard().begin) * size_of(config_.precision.compute);
}

void OffloadedState::read_parameters(FlatBuffer& flat, ElementRange range, void* to) {
  disk_writes_->synchronize();
  if (simulated()) return;
  const DiskMeter::Transfer transfer(*disk_);
  io_->wait(io_->read(swap_->file(), place_of(flat, range.begin), to,
                      range.size() * size_of(config_.precision.compute)));
}

void OffloadedState::write_parameters(FlatBuffer& flat, ElementRange range, const void* from) {
  disk_writes_->synchronize();
  disk_reads_->synchronize();
  if (simulated()) return;
  const DiskMeter::Transfer transfer(*disk_);
  io_->wait(io_->write(swap_->file(), place_of(flat, range.begin), from,
                       range.size() * size_of(config_.precision.compute)));
}

// --- Reports --------------------------------------------------------------------------------------------

void OffloadedState::begin_report() {
  before_ = {link_.counts(), ring_ ? ring_->counts() : TileRingCounts(), parameters_read_,
             parameters_written_};
}

void OffloadedState::report(StepResult& result) {
  const HostLinkCounts moved = link_.counts();
  const HostLink::Busy busy = link_.take_busy_seconds();
  OffloadTraffic& traffic = result.offload_traffic;
  traffic.to_host = moved.bytes_to_host - before_.link.bytes_to_host;
  traffic.from_host = moved.bytes_from_host - before_.link.bytes_from_host;
  traffic.nvme_read = parameters_read_ - before_.parameters_read;
  traffic.nvme_written = parameters_written_ - before_.parameters_written;
  if (ring_) {
    const TileRingCounts tiles = ring_->counts();
    traffic.nvme_read += tiles.bytes_read - before_.ring.bytes_read;
    traffic.nvme_written += tiles.bytes_written - before_.ring.bytes_written;
  }
  if (disk_ && !simulated()) {
    const DiskMeter::Seconds disk = disk_->take();
    result.offload.disk = disk.busy;
    result.disk_idle = {disk.nothing_asked, disk.no_buffer, disk.norm};
  }
  result.offload.to_host = busy.to_host;
  result.offload.from_host = busy.from_host;
  result.offload.host_update = update_seconds_->exchange(0.0);
}

}  // namespace tranche::detail
