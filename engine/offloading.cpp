// State that lives in host memory or on NVMe: what is kept where, how gradients get there, the update at
// home, and how new weights come back.

#include "engine/offloading.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/clock.h"
#include "device/process_memory.h"
#include "device/work_recorder.h"
#include "engine/offload_share.h"
#include "engine/saving.h"
#include "offload/calibration.h"
#include "tranche/kernels/elementwise.h"

namespace tranche {

namespace {

/// For norms of gradients on their way to the host; a GPU takes as many blocks at a time as fit.
constexpr std::int64_t norm_workspace_bytes = 64 * 1024;

/// For a plan's simulation: what streams are given besides kernels and copies.
void note_disk(Stream& stream, WorkKind kind, const std::string& unit, std::int64_t bytes) {
  if (stream.recorder() == nullptr) return;
  RecordedWork work;
  work.kind = kind;
  work.name = name_of(kind);
  work.detail = unit;
  (kind == WorkKind::disk_read ? work.bytes_read : work.bytes_written) = static_cast<double>(bytes);
  stream.recorder()->add(stream.lane(), std::move(work));
}

HostSlot& take(std::vector<HostSlot>& slots, std::size_t& next) {
  HostSlot& slot = slots[next];
  next = (next + 1) % slots.size();
  return slot;
}

}  // namespace

/// Also of an engine that could not be made: what works on the slots ends before they go.
Engine::Impl::Offloading::~Offloading() {
  host.reset();
  disk_writes.reset();
  disk_reads.reset();
  for (Stream* stream : {&link.from_host(), &link.to_host()}) {
    try {
      stream->synchronize();
    } catch (...) {  // whoever used what failed has been told
    }
  }
}

// --- What lives where -----------------------------------------------------------------------------------

void Engine::Impl::choose_tiers() {
  const OffloadConfig& offload_config = config.offload;
  for (UnitState& unit : units) {
    unit.trainable.parameters_tier = unit.frozen.parameters_tier = offload_config.parameters;
  }
  if (offload_config.optimizer == OffloadTier::none) return;
  if (offload_config.optimizer == OffloadTier::nvme && updater->has_sums()) {
    throw ConfigurationError(
        "optimizer " + optimizer->name() +
        " looks at its whole state before it updates, which would read the nvme tier twice a "
        "step; set offload_optimizer.device to \"cpu\" or \"none\"");
  }
  std::vector<std::int64_t> sizes;
  for (const UnitState& unit : units) sizes.push_back(unit.trainable.layout.padded_elements());
  const std::vector<bool> moves = units_that_move(sizes, offload_config.ratio);
  for (std::size_t u = 0; u < units.size(); ++u) {
    if (moves[u]) units[u].trainable.optimizer_tier = offload_config.optimizer;
  }
}

void Engine::Impl::check_host_memory() const {
  // A CPU's device memory is the host's; a limit of it has its own words.
  const bool device_counts = runtime.device().host_accessible() && config.device_memory_limit == 0;
  if (simulated() || !(config.offload.any() || device_counts)) return;
  std::int64_t needed = 0;
  const std::int64_t accumulation = size_of(config.precision.accumulation);
  std::int64_t state_bytes = 4;
  for (const OptimizerStateTensor& state : state_tensors) state_bytes += size_of(state.dtype);
  std::int64_t largest = 0;
  for (const UnitState& unit : units) {
    const std::int64_t kept = residency.optimizer_range(unit.trainable).size();
    if (unit.trainable.optimizer_tier != OffloadTier::none) needed += kept * accumulation;
    if (unit.trainable.optimizer_tier == OffloadTier::cpu) needed += kept * state_bytes;
    const std::int64_t shard_bytes =
        (unit.trainable.layout.shard_elements() + unit.frozen.layout.shard_elements()) *
        size_of(config.precision.compute);
    if (config.offload.parameters == OffloadTier::cpu) needed += shard_bytes;
    largest = std::max(largest, shard_bytes);
  }
  if (config.offload.parameters == OffloadTier::nvme) needed += config.offload.parameter_buffers * largest;
  if (config.offload.optimizer == OffloadTier::nvme) {
    needed += config.offload.tile_buffers * config.offload.tile_elements * state_bytes;
  }
  if (device_counts) {
    const StateFormulas::Bytes bytes = formulas.bytes();
    const StateFormulas::Bytes::OnTier& here = bytes.tiers[static_cast<std::size_t>(Tier::device)];
    needed += here.parameters + here.gradients + here.optimizer;
  }
  const AvailableMemory available = available_memory();
  const std::int64_t sharing = std::max(1, shard.local_size());
  if (needed * sharing <= available.bytes) return;
  throw OutOfMemory(
      "model state takes " + format_bytes(needed) + " of host memory on each of " + std::to_string(sharing) +
      " ranks of this host, " + format_bytes(needed * sharing) + " together, but " +
      format_bytes(available.bytes) + " are " +
      (available.of_group ? "left by the control group's limit" : "available") +
      "; use a higher stage or more hosts, move the optimizer to nvme, or lower offload_optimizer.ratio");
}

void Engine::Impl::Offloading::allocate(UnitState& unit) {
  FlatState& flat = unit.trainable;
  if (flat.optimizer_tier == OffloadTier::none || flat.layout.padded_elements() == 0) return;
  MemoryResource& host_memory = engine.runtime.memory(Tier::host);
  const std::int64_t kept = engine.residency.optimizer_range(flat).size();
  flat.host_gradients = Buffer(host_memory, kept * size_of(engine.config.precision.accumulation),
                               Category::gradients, unit.name + " gradients");
  if (flat.optimizer_tier != OffloadTier::nvme) return;
  std::vector<std::int64_t> widths{size_of(DataType::float32)};
  for (const OptimizerStateTensor& state : engine.state_tensors) widths.push_back(size_of(state.dtype));
  flat.tiles = reserve_region(*swap, kept, engine.config.offload.tile_elements, std::move(widths),
                              Category::optimizer, unit.name + " optimizer");
}

void Engine::Impl::Offloading::prepare() {
  const OffloadConfig& offload_config = engine.config.offload;
  MemoryResource& host_memory = engine.runtime.memory(Tier::host);
  const std::int64_t compute_bytes = size_of(engine.config.precision.compute);
  const bool optimizer_away =
      std::any_of(engine.units.begin(), engine.units.end(),
                  [](const UnitState& unit) { return unit.trainable.optimizer_tier != OffloadTier::none; });
  const bool optimizer_here =
      std::any_of(engine.units.begin(), engine.units.end(), [](const UnitState& unit) {
        return unit.trainable.optimizer_tier == OffloadTier::none &&
               unit.trainable.layout.padded_elements() > 0;
      });
  std::int64_t largest_update = 0, largest_shard = 0, largest_tile = 0;
  for (const UnitState& unit : engine.units) {
    largest_update = std::max(
        largest_update,
        std::min(offload_config.tile_elements, engine.residency.optimizer_range(unit.trainable).size()));
    for (const FlatState* flat : {&unit.trainable, &unit.frozen}) {
      largest_shard = std::max(largest_shard, flat->layout.shard_elements() * compute_bytes);
    }
    if (unit.trainable.tiles.elements > 0) {
      largest_tile = std::max(largest_tile, unit.trainable.tiles.bytes_of(0));
      for (std::int64_t tile = 0; tile < unit.trainable.tiles.tiles(); ++tile) {
        update_order.push_back({&unit.trainable.tiles, tile});
      }
    }
  }
  if (optimizer_away) {
    norm_workspace =
        Buffer(engine.memory, norm_workspace_bytes, Category::workspace, "norms of offloaded gradients");
  }
  const OffloadTier parameters = offload_config.parameters;
  const auto slots = [&](std::vector<HostSlot>& into, int count, std::int64_t bytes, Category category,
                         const char* tag) {
    for (int i = 0; i < count; ++i) {
      into.push_back({AlignedBuffer(host_memory, round_up(bytes, io_alignment), category, tag), {}});
      // Pages are made here, once; and what goes to the disk beyond the last element is defined.
      if (!engine.simulated())
        std::memset(into.back().memory.data(), 0, static_cast<std::size_t>(into.back().memory.bytes()));
    }
  };
  if ((optimizer_away && parameters != OffloadTier::cpu) || parameters == OffloadTier::nvme) {
    slots(host_weights, offload_config.tile_buffers, largest_update * compute_bytes, Category::parameters,
          "updated weights");
  }
  if (optimizer_here && parameters != OffloadTier::none) {
    for (int i = 0; i < 2; ++i) {
      device_weights.push_back(
          {Buffer(engine.memory, largest_update * compute_bytes, Category::parameters, "updated weights"),
           {}});
    }
  }
  if (parameters == OffloadTier::nvme) {
    slots(shards, offload_config.parameter_buffers, largest_shard, Category::parameters, "shards from nvme");
    for (UnitState& unit : engine.units) {
      for (FlatState* flat : {&unit.trainable, &unit.frozen}) {
        if (flat->layout.padded_elements() == 0) continue;
        flat->parameters_offset =
            swap->reserve(flat->layout.shard_elements() * compute_bytes, Category::parameters,
                          unit.name + (flat == &unit.frozen ? " frozen" : "") + " parameters");
      }
    }
  }
  const int threads = engine.runtime.host_threads();
  host = engine.runtime.device().create_host_stream("host update", threads);
  host->set_trace(engine.runtime.trace());
  if (!offload_config.uses_nvme()) return;
  disk_reads = engine.runtime.device().create_host_stream("disk reads", 1);
  disk_writes = engine.runtime.device().create_host_stream("disk writes", 1);
  disk_reads->set_trace(engine.runtime.trace());
  disk_writes->set_trace(engine.runtime.trace());
  if (!engine.simulated()) {
    swap->check_space();
    BlockIoOptions options;
    options.engine = offload_config.io_engine == "uring"     ? BlockIoEngine::uring
                     : offload_config.io_engine == "threads" ? BlockIoEngine::threads
                                                             : BlockIoEngine::automatic;
    if (offload_config.io_block_bytes > 0) options.block_bytes = offload_config.io_block_bytes;
    if (offload_config.io_depth > 0) options.depth = offload_config.io_depth;
    io = make_block_io(options);
    if (!io->fallback_reason().empty()) {
      engine.runtime.log().info("offload to nvme goes through threads: " + io->fallback_reason());
    }
    for (std::vector<HostSlot>* list : {&host_weights, &shards}) {
      for (HostSlot& slot : *list) {
        registered.push_back(io->register_memory(slot.memory.data(), slot.memory.bytes()));
      }
    }
  }
  if (!update_order.empty()) {
    ring = std::make_unique<TileRing>(
        TileRingOptions{offload_config.tile_buffers, largest_tile, host->recorder()}, *swap, io.get(),
        host_memory);
  }
}

void Engine::Impl::Offloading::close() noexcept {
  if (ring) ring->abandon();  // of a pass that an error left open, while its stream lives
  for (Stream* stream :
       {host.get(), disk_writes.get(), disk_reads.get(), &link.from_host(), &link.to_host()}) {
    if (stream == nullptr) continue;
    try {
      stream->synchronize();
    } catch (...) {  // whoever used what failed has been told
    }
  }
}

// --- Gradients ------------------------------------------------------------------------------------------

void Engine::Impl::lend_gradients(UnitState& unit) {
  FlatState& flat = unit.trainable;
  const std::int64_t elements =
      residency.whole_gradients() ? flat.layout.padded_elements() : flat.layout.shard_elements();
  flat.lent_gradients = arena->acquire(elements * size_of(config.precision.accumulation), Category::gradients,
                                       unit.name + " reduced gradients");
  for (const Event& event : flat.lent_gradients.ready()) compute.wait(event);
}

void Engine::Impl::Offloading::send_gradients_home(UnitState& unit) {
  FlatState& flat = unit.trainable;
  const DataType accumulation = engine.config.precision.accumulation;
  Stream& stream = link.to_host();
  stream.wait(unit.reduced);
  kernels::gradient_statistics(
      stream, {engine.residency.gradients_shard(flat), accumulation, Shape{flat.layout.shard_elements()}},
      engine.scalars.statistics() + (&unit - engine.units.data()),
      {norm_workspace.data(), norm_workspace.bytes()});
  const ElementRange kept = engine.residency.optimizer_range(flat);
  const void* from = engine.residency.gradients_at(flat, kept.begin);
  flat.gradients_home =
      link.copy_to_host(flat.host_gradients.data(), from, kept.size() * size_of(accumulation), {});
  flat.lent_gradients.release(flat.gradients_home);
  if (!engine.config.overlap) flat.gradients_home.wait();
}

// --- Parameters -----------------------------------------------------------------------------------------

Event Engine::Impl::Offloading::bring_shard(UnitState& unit, FlatState& flat, void* place,
                                            std::vector<Event> ready) {
  const std::int64_t bytes = flat.layout.shard_elements() * size_of(engine.config.precision.compute);
  if (flat.parameters_tier == OffloadTier::cpu) {
    return link.copy_from_host(place, flat.parameters.data(), bytes, ready);
  }
  HostSlot& slot = take(shards, next_shard);
  disk_reads->wait(slot.free);
  disk_reads->wait(unit.shard_ready);
  const std::int64_t transferred = round_up(bytes, io_alignment);
  note_disk(*disk_reads, WorkKind::disk_read, unit.name, transferred);
  disk_reads->enqueue("read " + unit.name,
                      [this, memory = slot.memory.data(), offset = flat.parameters_offset, transferred] {
                        io->wait(io->read(swap->file(), offset, memory, transferred));
                      });
  parameters_read += transferred;
  ready.push_back(disk_reads->record());
  slot.free = link.copy_from_host(place, slot.memory.data(), bytes, ready);
  return slot.free;
}

Engine::Impl::Offloading::NewWeights Engine::Impl::Offloading::begin_weights(FlatState& flat,
                                                                             ElementRange range,
                                                                             Stream& worker) {
  NewWeights weights;
  weights.range = range;
  const bool on_host = flat.optimizer_tier != OffloadTier::none;
  if (on_host && flat.parameters_tier == OffloadTier::cpu) {
    // Straight to where they live; null where they are the master weights.
    if (flat.master || flat.tiles.elements > 0) {
      weights.data = engine.residency.parameters_at(flat, range.begin);
    }
    return weights;
  }
  if (on_host) {
    weights.host = &take(host_weights, next_host_weights);
    worker.wait(weights.host->free);
    weights.data = static_cast<std::byte*>(weights.host->memory.data());
  } else {
    weights.device = &device_weights[next_device_weights];
    next_device_weights = (next_device_weights + 1) % device_weights.size();
    worker.wait(weights.device->free);
    weights.data = static_cast<std::byte*>(weights.device->memory.data());
  }
  return weights;
}

Event Engine::Impl::Offloading::finish_weights(UnitState& unit, FlatState& flat, NewWeights& weights,
                                               Stream& worker) {
  const DataType dtype = engine.config.precision.compute;
  const std::int64_t bytes = weights.range.size() * size_of(dtype);
  Event written = worker.record();
  if (flat.parameters_tier == OffloadTier::none) {
    // Kernels of the step before, and peers, read the old weights.
    const std::vector<Event> ready{written, engine.compute.record(), flat.filled};
    weights.host->free = link.copy_from_host(engine.residency.parameters_at(flat, weights.range.begin),
                                             weights.data, bytes, ready);
    return weights.host->free;
  }
  const std::int64_t first = weights.range.begin - flat.layout.shard_range(engine.rank).begin;
  if (flat.parameters_tier == OffloadTier::cpu) {
    if (weights.device == nullptr) return written;
    const std::vector<Event> ready{written, flat.filled};
    weights.device->free = link.copy_to_host(
        static_cast<std::byte*>(flat.parameters.data()) + first * size_of(dtype), weights.data, bytes, ready);
    return weights.device->free;
  }
  HostSlot* slot = weights.host;
  if (weights.device != nullptr) {
    slot = &take(host_weights, next_host_weights);
    const std::vector<Event> ready{written, slot->free};
    written = weights.device->free = link.copy_to_host(slot->memory.data(), weights.data, bytes, ready);
  }
  const std::int64_t transferred = round_up(bytes, io_alignment);
  disk_writes->wait(written);
  disk_writes->wait(flat.filled);
  note_disk(*disk_writes, WorkKind::disk_write, unit.name, transferred);
  disk_writes->enqueue("write " + unit.name, [this, memory = slot->memory.data(), transferred,
                                              offset = flat.parameters_offset + first * size_of(dtype)] {
    io->wait(io->write(swap->file(), offset, memory, transferred));
  });
  parameters_written += transferred;
  slot->free = disk_writes->record();
  return slot->free;
}

Event Engine::Impl::Offloading::publish_stretch(UnitState& unit, const Stretch& stretch) {
  OptimizerStep masked;
  masked.apply = false;
  update_stretch(unit, stretch, masked);
  return unit.shard_ready;
}

// --- The update -----------------------------------------------------------------------------------------

void Engine::Impl::Offloading::update_stretch(UnitState& unit, const Stretch& stretch,
                                              const OptimizerStep& step) {
  FlatState& flat = unit.trainable;
  const DataType accumulation = engine.config.precision.accumulation;
  const DataType dtype = engine.config.precision.compute;
  Stream& worker = *stretch.stream;
  const std::int64_t tile = engine.config.offload.tile_elements;
  for (std::int64_t begin = stretch.range.begin; begin < stretch.range.end; begin += tile) {
    UpdateMemory part;
    part.range = {begin, std::min(begin + tile, stretch.range.end)};
    const std::int64_t skipped = begin - stretch.range.begin;
    part.master = stretch.master + skipped * size_of(DataType::float32);
    for (std::size_t s = 0; s < engine.state_tensors.size(); ++s) {
      part.state.push_back(stretch.state[s] + skipped * size_of(engine.state_tensors[s].dtype));
    }
    part.gradient = flat.optimizer_tier != OffloadTier::none
                        ? static_cast<std::byte*>(flat.host_gradients.data()) +
                              (begin - engine.residency.optimizer_range(flat).begin) * size_of(accumulation)
                        : engine.residency.gradients_at(flat, begin);
    NewWeights weights = begin_weights(flat, part.range, worker);
    part.weight = weights.data;
    auto begun = std::make_shared<double>(0.0);
    const bool timed = stretch.on_host;
    if (timed) worker.enqueue("update " + unit.name, [begun] { *begun = seconds_now(); });
    if (step.apply) {
      engine.updater->apply(worker, step, {flat.layout, flat.tensors, part, stretch.on_host}, true);
    } else if (weights.data != nullptr) {
      // A skipped step moves the same bytes, and the weights are those that it found.
      const ConstTensorView master{part.master, DataType::float32, Shape{part.range.size()}};
      const TensorView weight{weights.data, dtype, Shape{part.range.size()}};
      if (dtype == DataType::float32) {
        kernels::copy(worker, master, weight);
      } else {
        kernels::cast(worker, master, weight);
      }
    }
    if (timed) {
      worker.enqueue("updated " + unit.name, [begun, sum = update_seconds] {
        sum->fetch_add(seconds_now() - *begun);  // taken by the issuing thread now and then
      });
    }
    unit.shard_ready = finish_weights(unit, flat, weights, worker);
  }
}

void Engine::Impl::Offloading::read_ahead() {
  if (!ring || reading_ahead) return;
  ring->begin(update_order);
  reading_ahead = true;
}

void Engine::Impl::Offloading::update(const OptimizerStep& step) {
  read_ahead();
  for (UnitState& unit : engine.units) {
    FlatState& flat = unit.trainable;
    if (flat.optimizer_tier == OffloadTier::none || flat.layout.padded_elements() == 0) continue;
    host->wait(flat.gradients_home);
    if (flat.parameters_tier == OffloadTier::cpu) host->wait(flat.filled);
    Stretch stretch;
    stretch.stream = host.get();
    stretch.on_host = true;
    const ElementRange kept = engine.residency.optimizer_range(flat);
    if (flat.optimizer_tier == OffloadTier::cpu) {
      stretch.range = kept;
      stretch.master = engine.residency.master_at(flat, kept.begin);
      for (Buffer& state : flat.state) stretch.state.push_back(static_cast<std::byte*>(state.data()));
      update_stretch(unit, stretch, step);
      continue;
    }
    for (std::int64_t tile = 0; tile < flat.tiles.tiles(); ++tile) {
      const TileMemory open = ring->open(*host);
      stretch.range = {kept.begin + open.first, kept.begin + open.first + open.elements};
      stretch.master = static_cast<std::byte*>(open.data[0]);
      stretch.state.clear();
      for (std::size_t s = 0; s < engine.state_tensors.size(); ++s) {
        stretch.state.push_back(static_cast<std::byte*>(open.data[s + 1]));
      }
      engine.saving->hand_over_in_stream(static_cast<int>(&unit - engine.units.data()),
                                         stretch);  // of a save: before it changes
      update_stretch(unit, stretch, step);
      ring->close(*host, true);
    }
  }
  engine.saving->finish_handing_over(*host);
  if (ring) ring->end(*host);
  reading_ahead = false;
  if (!engine.config.overlap) host->synchronize();
}

/// Stages 1-2: the new weights travel behind what follows; gather() waits for them unit by unit.
void Engine::Impl::gather_updated(UnitState& unit, const char* phase) {
  FlatState& flat = unit.trainable;
  if (ranks == 1 || !residency.whole_parameters() || residency.whole_optimizer() ||
      flat.layout.padded_elements() == 0)
    return;
  const std::vector<Event> ready{unit.shard_ready};
  flat.filled =
      all_gather_shard(flat, flat.parameters.data(), config.precision.compute, ready, unit.name, phase);
  if (!config.overlap) flat.filled.wait();
}

void Engine::Impl::Offloading::report(StepResult& result) {
  const HostLinkCounts moved = link.counts();
  const HostLink::Busy busy = link.take_busy_seconds();
  OffloadTraffic& traffic = step_traffic;
  traffic.to_host = moved.bytes_to_host - link_before.bytes_to_host;
  traffic.from_host = moved.bytes_from_host - link_before.bytes_from_host;
  traffic.nvme_read = parameters_read - parameters_read_before;
  traffic.nvme_written = parameters_written - parameters_written_before;
  if (ring) {
    const TileRingCounts tiles = ring->counts();
    traffic.nvme_read += tiles.bytes_read - ring_before.bytes_read;
    traffic.nvme_written += tiles.bytes_written - ring_before.bytes_written;
    result.offload.disk = ring->take_busy_seconds();
  }
  result.offload.to_host = busy.to_host;
  result.offload.from_host = busy.from_host;
  result.offload.host_update = update_seconds->exchange(0.0);
  result.offload_traffic = traffic;
}

/// Work that is issued from here on counts to the step that begins.
void Engine::Impl::Offloading::begin_report() {
  link_before = link.counts();
  if (ring) ring_before = ring->counts();
  parameters_read_before = parameters_read;
  parameters_written_before = parameters_written;
}

}  // namespace tranche
