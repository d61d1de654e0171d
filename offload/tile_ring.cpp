#include "offload/tile_ring.h"

#include <fmt/core.h>

#include <algorithm>
#include <functional>
#include <set>
#include <string_view>
#include <utility>

#include "device/work_recorder.h"
#include "offload/aligned_buffer.h"
#include "offload/disk_meter.h"
#include "offload/tile_flow.h"
#include "tranche/core/error.h"
#include "tranche/core/shape.h"

namespace tranche::detail {
namespace {

/// The work that the ring enqueues on the stream. A failed stream destroys its pending work without running
/// it; the destructor then stops the flow, so that no thread waits for it.
class Duty {
 public:
  explicit Duty(std::shared_ptr<TileFlow> flow) : flow_(std::move(flow)) {}
  ~Duty() {
    if (!begun_) flow_->stop(nullptr);
  }
  Duty(const Duty&) = delete;
  Duty& operator=(const Duty&) = delete;
  TileFlow& begin() {
    begun_ = true;
    return *flow_;
  }

 private:
  std::shared_ptr<TileFlow> flow_;
  bool begun_ = false;
};

/// Throws if two places share bytes: the second tile would wait for the first one's write, which waits for
/// the last read.
void check_apart(std::vector<LentMemory> lent) {
  std::sort(lent.begin(), lent.end(),
            [](const LentMemory& a, const LentMemory& b) { return std::less<>()(a.data, b.data); });
  for (std::size_t i = 1; i < lent.size(); ++i) {
    if (static_cast<char*>(lent[i - 1].data) + lent[i - 1].bytes > static_cast<char*>(lent[i].data)) {
      throw InvalidArgument("tile ring: two tiles are lent the same memory");
    }
  }
}

}  // namespace

std::int64_t TileRegion::tiles() const {
  return divide_round_up(elements, tile_elements);
}

std::int64_t TileRegion::elements_of(std::int64_t tile) const {
  return std::min(tile_elements, elements - first_element(tile));
}

std::int64_t TileRegion::offset_of(std::int64_t tile) const {
  return tile == 0 ? offset : offset + tile * bytes_of(0);
}

std::int64_t TileRegion::bytes_of(std::int64_t tile) const {
  return offset_in_tile(tile, static_cast<int>(widths.size()));
}

std::int64_t TileRegion::offset_in_tile(std::int64_t tile, int tensor) const {
  const std::int64_t count = divide_round_up(elements_of(tile), together);
  std::int64_t sum = 0;
  for (int i = 0; i < tensor; ++i) sum += round_up(count * widths[static_cast<std::size_t>(i)], io_alignment);
  return sum;
}

std::int64_t TileRegion::bytes() const {
  const std::int64_t count = tiles();
  return count == 0 ? 0 : offset_of(count - 1) + bytes_of(count - 1) - offset;
}

TileRegion reserve_region(SwapFile& file, std::int64_t elements, std::int64_t tile_elements,
                          std::vector<std::int64_t> widths, Category category, std::string_view tag,
                          std::int64_t together) {
  bool fits = elements >= 0 && tile_elements > 0 && !widths.empty();
  for (const std::int64_t width : widths) fits = fits && width > 0;
  if (!fits) {
    throw InvalidArgument(fmt::format(
        "'{}' on the nvme tier: {} elements in tiles of {}, {} tensors: elements must not be negative, tiles "
        "and widths positive, and there must be a tensor",
        tag, elements, tile_elements, widths.size()));
  }
  TileRegion region;
  region.elements = elements;
  region.tile_elements = std::min(tile_elements, std::max<std::int64_t>(elements, 1));
  region.widths = std::move(widths);
  region.together = together;
  region.offset = file.reserve(region.bytes(), category, tag);
  return region;
}

struct TileRing::Impl {
  Impl(TileRingOptions the_options, SwapFile& the_file)
      : options(std::move(the_options)),
        file(the_file),
        meter(options.meter ? options.meter : std::make_shared<DiskMeter>()) {}

  void check(bool fine, const char* what) const {
    if (!fine) throw LogicError(fmt::format("tile ring: {}", what));
  }
  void use(Stream& the_stream) {
    check(in_pass, "open, close and end need a pass: call begin() first");
    check(stream == nullptr || stream == &the_stream, "a pass uses one stream throughout");
    stream = &the_stream;
  }
  void enqueue(Stream& to, std::string_view name, std::function<void(TileFlow&)> work) {
    to.enqueue(name, [duty = std::make_shared<Duty>(flow), work = std::move(work)] { work(duty->begin()); });
  }

  /// Records the disk requests of a simulation, once `closed` tiles of the pass have been closed. Like
  /// TileFlow::start_reads(), a read starts in its order, when its buffer's previous tile has been written or
  /// its memory has been lent, and an earlier visit of the same tile has been written too.
  void record_reads(std::size_t closed) {
    while (tile_read.size() < tiles.size()) {
      const std::size_t index = tile_read.size();
      const bool lends = index >= own_tiles();
      if (lends ? lent[index - own_tiles()].after >= closed : index >= closed + buffers.size()) return;
      std::vector<Event> ready{lends ? worked[lent[index - own_tiles()].after]
                                     : buffer_free[buffer_of(index)]};
      for (std::size_t i = lends ? 0 : index - std::min(index, buffers.size() - 1); i < index; ++i) {
        if (tiles[i].region != tiles[index].region || tiles[i].tile != tiles[index].tile) continue;
        if (i >= closed) return;
        ready.push_back(tile_written[i]);
      }
      const std::int64_t bytes = reads ? tiles[index].region->bytes_of(tiles[index].tile) : 0;
      tile_read.push_back(record(read_lane, WorkKind::disk_read, bytes, ready));
    }
  }
  void record_write(std::size_t index) {
    const std::int64_t bytes = written[index] ? tiles[index].region->bytes_of(tiles[index].tile) : 0;
    tile_written[index] = record(write_lane, WorkKind::disk_write, bytes, {&worked[index], 1});
    if (index < own_tiles()) buffer_free[buffer_of(index)] = tile_written[index];
  }
  Event record(int lane, WorkKind kind, std::int64_t bytes, std::span<const Event> ready) {
    RecordedWork work;
    work.kind = kind;
    work.name = name_of(kind);
    work.detail = "optimizer tile";
    (kind == WorkKind::disk_read ? work.bytes_read : work.bytes_written) = static_cast<double>(bytes);
    return options.recorder->add(lane, std::move(work), ready);
  }

  /// The number of tiles of the pass that use the ring's buffers.
  std::size_t own_tiles() const { return tiles.size() - lent.size(); }
  std::size_t buffer_of(std::size_t index) const { return (first_buffer + index) % buffers.size(); }
  void* memory_of(std::size_t index) const {
    return index < own_tiles() ? buffers[buffer_of(index)].data() : lent[index - own_tiles()].data;
  }

  const TileRingOptions options;
  SwapFile& file;
  const std::shared_ptr<DiskMeter> meter;
  std::vector<AlignedBuffer> buffers;
  std::vector<std::unique_ptr<RegisteredMemory>> registrations;
  std::shared_ptr<TileFlow> flow;  // null in a simulation

  bool in_pass = false;
  bool reads = true;
  std::vector<TileRef> tiles;    // of the current pass
  std::vector<LentMemory> lent;  // memory of the last of them
  std::size_t first_buffer = 0;  // the buffer of the pass's first tile
  std::size_t opened = 0;        // number of tiles opened in the pass
  bool tile_is_open = false;
  std::int64_t position = 0;  // position of the pass's first tile, see TileFlow
  Stream* stream = nullptr;   // the pass's stream, once it is known
  Event ended;                // the end of the previous pass
  TileRingCounts counts;
  // These are used with a recorder only.
  int read_lane = 0, write_lane = 0;
  std::vector<Event> buffer_free;                      // by buffer
  std::vector<Event> tile_read, worked, tile_written;  // by tile of the pass
  std::vector<bool> written;                           // by tile of the pass
};

TileRing::TileRing(TileRingOptions options, SwapFile& file, BlockIo* io, MemoryResource& host)
    : impl_(std::make_unique<Impl>(options, file)) {
  if (options.buffers < 1 || options.buffer_bytes < 0) {
    throw InvalidArgument(
        fmt::format("a tile ring of {} buffers of {} B: it needs at least one, of no "
                    "negative size",
                    options.buffers, options.buffer_bytes));
  }
  if (io == nullptr && !file.simulated()) {
    throw InvalidArgument("a tile ring needs an I/O engine unless its swap file is simulated");
  }
  for (int i = 0; i < options.buffers; ++i) {
    AlignedBuffer& buffer =
        impl_->buffers.emplace_back(host, options.buffer_bytes, Category::optimizer, "nvme tiles");
    if (file.simulated() || options.buffer_bytes == 0) continue;
    impl_->registrations.push_back(io->register_memory(buffer.data(), options.buffer_bytes));
  }
  if (options.recorder != nullptr) {
    impl_->read_lane = options.recorder->add_lane("tile reads");
    impl_->write_lane = options.recorder->add_lane("tile writes");
    impl_->buffer_free.resize(static_cast<std::size_t>(options.buffers));
  }
  if (file.simulated()) return;
  impl_->flow = std::make_shared<TileFlow>(
      *io, static_cast<std::size_t>(options.at_once > 0 ? options.at_once : options.buffers), impl_->meter);
}

TileRing::~TileRing() {
  abandon();
  if (impl_->flow) impl_->flow->finish();
}

void TileRing::begin(std::vector<TileRef> tiles, bool read, std::vector<LentMemory> lent) {
  Impl& self = *impl_;
  self.check(!self.in_pass, "begin() while a pass is open: end() or abandon() it first");
  if (lent.size() > tiles.size())
    throw InvalidArgument("tile ring: more memory is lent than there are tiles");
  const std::size_t own = tiles.size() - lent.size();
  std::vector<TileFlow::Tile> ranges;
  std::set<std::pair<const TileRegion*, std::int64_t>> in_lent;
  ranges.reserve(tiles.size());
  for (const TileRef& ref : tiles) {
    const LentMemory* const place = ranges.size() < own ? nullptr : &lent[ranges.size() - own];
    if (place != nullptr && place->after >= ranges.size()) {
      throw InvalidArgument(
          fmt::format("tile ring: the memory of tile {} is lent after tile {}", ranges.size(), place->after));
    }
    if (place != nullptr && !in_lent.emplace(ref.region, ref.tile).second) {
      throw InvalidArgument(fmt::format("tile ring: tile {} is visited twice in lent memory", ranges.size()));
    }
    const std::int64_t room = place == nullptr ? self.options.buffer_bytes : place->bytes;
    if (ref.region == nullptr || ref.tile < 0 || ref.tile >= ref.region->tiles()) {
      throw InvalidArgument(fmt::format("tile ring: there is no tile {} in a region of {}", ref.tile,
                                        ref.region == nullptr ? 0 : ref.region->tiles()));
    }
    const TileFlow::Tile range{ref.region->offset_of(ref.tile), ref.region->bytes_of(ref.tile), nullptr,
                               place == nullptr ? -1 : static_cast<std::int64_t>(place->after)};
    if (range.bytes > room || range.offset + range.bytes > self.file.bytes()) {
      throw InvalidArgument(fmt::format(
          "tile ring: tile {} has {} B at {}, which do not fit buffers of {} B or a swap file of {} B",
          ref.tile, range.bytes, range.offset, room, self.file.bytes()));
    }
    ranges.push_back(range);
  }
  if (self.flow) check_apart(lent);
  self.reads = read;
  self.tiles = std::move(tiles);
  self.lent = std::move(lent);
  self.opened = 0;
  for (std::size_t i = 0; self.flow && i < ranges.size(); ++i) {
    ranges[i].memory = static_cast<char*>(self.memory_of(i));
  }
  if (self.flow) self.position = self.flow->add(self.file.file(), ranges, read);
  self.stream = nullptr;
  self.in_pass = true;
  if (self.options.recorder == nullptr) return;
  self.tile_read.clear();
  self.worked.clear();
  self.written.clear();
  self.tile_written.assign(self.tiles.size(), {});
  self.record_reads(0);
}

TileMemory TileRing::open(Stream& stream) {
  Impl& self = *impl_;
  self.use(stream);
  self.check(!self.tile_is_open, "open() before the last tile was closed");
  self.check(self.opened < self.tiles.size(), "open() after the last tile of the pass");
  const TileRef ref = self.tiles[self.opened];
  auto* const base = static_cast<char*>(self.memory_of(self.opened));
  const std::int64_t position = self.position + static_cast<std::int64_t>(self.opened);
  if (self.flow) {
    self.flow->issued(position);
    self.enqueue(stream, "wait for tile", [position](TileFlow& flow) { flow.await_tile(position); });
  }
  if (self.options.recorder != nullptr) stream.wait(self.tile_read[self.opened]);
  ++self.opened;
  self.tile_is_open = true;
  ++self.counts.tiles;
  if (self.reads) self.counts.bytes_read += ref.region->bytes_of(ref.tile);
  TileMemory memory;
  memory.first = ref.region->first_element(ref.tile);
  memory.elements = ref.region->elements_of(ref.tile);
  for (std::size_t i = 0; i < ref.region->widths.size(); ++i) {
    memory.data.push_back(base + ref.region->offset_in_tile(ref.tile, static_cast<int>(i)));
  }
  return memory;
}

void TileRing::close(Stream& stream, bool write) {
  Impl& self = *impl_;
  self.use(stream);
  self.check(self.tile_is_open, "close() without open()");
  const TileRef ref = self.tiles[self.opened - 1];
  const std::int64_t position = self.position + static_cast<std::int64_t>(self.opened) - 1;
  if (self.flow) {
    self.enqueue(stream, write ? "write tile" : "leave tile",
                 [position, write](TileFlow& flow) { flow.leave(position, write); });
  }
  self.tile_is_open = false;
  if (self.options.recorder != nullptr) {
    self.worked.push_back(stream.record());
    self.written.push_back(write);
    if (self.opened <= self.own_tiles()) self.record_write(self.opened - 1);
    self.record_reads(self.opened);
  }
  if (write) self.counts.bytes_written += ref.region->bytes_of(ref.tile);
}

std::vector<Event> TileRing::end(Stream& stream) {
  Impl& self = *impl_;
  self.use(stream);
  self.check(!self.tile_is_open && self.opened == self.tiles.size(),
             "end() before all tiles were opened and closed: abandon() the pass to leave some out");
  const std::int64_t end = self.position + static_cast<std::int64_t>(self.opened);
  std::vector<Event> given_back(self.lent.size());
  for (std::size_t i = self.lent.size(); i-- > 0;) {
    const std::size_t index = self.own_tiles() + i;
    if (self.flow) {
      self.enqueue(stream, "wait for lent memory",
                   [position = self.position + static_cast<std::int64_t>(index)](TileFlow& flow) {
                     flow.await_settled(position);
                   });
    }
    if (self.options.recorder != nullptr) {
      self.record_write(index);
      stream.wait(self.tile_written[index]);
    }
    given_back[i] = stream.record();
  }
  if (self.flow) {
    self.enqueue(stream, "wait for written tiles", [end](TileFlow& flow) { flow.await_left(end); });
    self.ended = stream.record();
  }
  if (self.options.recorder != nullptr) {
    for (const Event& written : self.buffer_free) stream.wait(written);
    self.ended = stream.record();
  }
  self.position = end;
  self.first_buffer = self.buffer_of(self.own_tiles());
  self.in_pass = false;
  return given_back;
}

void TileRing::abandon() noexcept {
  Impl& self = *impl_;
  if (self.flow) {
    const auto opened = static_cast<std::int64_t>(self.in_pass ? self.opened : 0);
    self.flow->cut(self.position + opened);
    // Work enqueued on the stream uses the buffers, so wait for it.
    try {
      self.ended.wait();
    } catch (...) {
      // Waiters on the stream get this error.
    }
    if (self.in_pass && self.stream != nullptr) {
      try {
        self.stream->record().wait();
      } catch (...) {
      }
    }
    self.flow->reset();
  }
  self.tile_is_open = false;
  self.in_pass = false;
  self.stream = nullptr;
  self.ended = {};
}

int TileRing::buffers() const noexcept {
  return impl_->options.buffers;
}

bool TileRing::in_pass() const noexcept {
  return impl_->in_pass;
}

TileRingCounts TileRing::counts() const {
  return impl_->counts;
}

double TileRing::take_busy_seconds() {
  return impl_->flow ? impl_->meter->take().busy : 0;
}

}  // namespace tranche::detail
