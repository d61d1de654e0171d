#include "offload/tile_ring.h"

#include <fmt/core.h>

#include <algorithm>
#include <functional>
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

  /// Records the flow's disk requests in a simulation: the read of a tile starts when its buffer's previous
  /// tile has been written.
  void record_read(std::size_t index) {
    const TileRef& ref = tiles[index];
    RecordedWork work;
    work.kind = WorkKind::disk_read;
    work.name = name_of(work.kind);
    work.detail = "optimizer tile";
    work.bytes_read = static_cast<double>(reads ? ref.region->bytes_of(ref.tile) : 0);
    const Event& free = buffer_free[buffer_of(index)];
    tile_read[buffer_of(index)] = options.recorder->add(read_lane, std::move(work), {&free, 1});
  }
  void record_write(const TileRef& ref, Stream& from, bool write) {
    RecordedWork work;
    work.kind = WorkKind::disk_write;
    work.name = name_of(work.kind);
    work.detail = "optimizer tile";
    work.bytes_written = static_cast<double>(write ? ref.region->bytes_of(ref.tile) : 0);
    const Event worked = from.record();
    buffer_free[buffer_of(opened - 1)] = options.recorder->add(write_lane, std::move(work), {&worked, 1});
    const std::size_t next = opened - 1 + static_cast<std::size_t>(options.buffers);
    if (next < tiles.size()) record_read(next);
  }
  std::size_t buffer_of(std::size_t index) const {
    return (static_cast<std::size_t>(position) + index) % static_cast<std::size_t>(options.buffers);
  }

  const TileRingOptions options;
  SwapFile& file;
  const std::shared_ptr<DiskMeter> meter;
  std::vector<AlignedBuffer> buffers;
  std::vector<std::unique_ptr<RegisteredMemory>> registrations;
  std::shared_ptr<TileFlow> flow;  // null in a simulation

  bool in_pass = false;
  bool reads = true;
  std::vector<TileRef> tiles;  // of the current pass
  std::size_t opened = 0;      // number of tiles opened in the pass
  bool tile_is_open = false;
  std::int64_t position = 0;  // position of the pass's first tile, see TileFlow
  Stream* stream = nullptr;   // the pass's stream, once it is known
  Event ended;                // the end of the previous pass
  TileRingCounts counts;
  int read_lane = 0, write_lane = 0;          // only with a recorder
  std::vector<Event> buffer_free, tile_read;  // only with a recorder, by buffer
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
  std::vector<char*> addresses;
  for (int i = 0; i < options.buffers; ++i) {
    AlignedBuffer& buffer =
        impl_->buffers.emplace_back(host, options.buffer_bytes, Category::optimizer, "nvme tiles");
    addresses.push_back(static_cast<char*>(buffer.data()));
    if (file.simulated() || options.buffer_bytes == 0) continue;
    impl_->registrations.push_back(io->register_memory(buffer.data(), options.buffer_bytes));
  }
  if (options.recorder != nullptr) {
    impl_->read_lane = options.recorder->add_lane("tile reads");
    impl_->write_lane = options.recorder->add_lane("tile writes");
    impl_->buffer_free.resize(static_cast<std::size_t>(options.buffers));
    impl_->tile_read.resize(static_cast<std::size_t>(options.buffers));
  }
  if (file.simulated()) return;
  impl_->flow = std::make_shared<TileFlow>(
      *io, std::move(addresses),
      static_cast<std::size_t>(options.at_once > 0 ? options.at_once : options.buffers), impl_->meter);
}

TileRing::~TileRing() {
  abandon();
  if (impl_->flow) impl_->flow->finish();
}

void TileRing::begin(std::vector<TileRef> tiles, bool read) {
  Impl& self = *impl_;
  self.check(!self.in_pass, "begin() while a pass is open: end() or abandon() it first");
  std::vector<TileFlow::Tile> ranges;
  ranges.reserve(tiles.size());
  for (const TileRef& ref : tiles) {
    if (ref.region == nullptr || ref.tile < 0 || ref.tile >= ref.region->tiles()) {
      throw InvalidArgument(fmt::format("tile ring: there is no tile {} in a region of {}", ref.tile,
                                        ref.region == nullptr ? 0 : ref.region->tiles()));
    }
    const TileFlow::Tile range{ref.region->offset_of(ref.tile), ref.region->bytes_of(ref.tile)};
    if (range.bytes > self.options.buffer_bytes || range.offset + range.bytes > self.file.bytes()) {
      throw InvalidArgument(fmt::format(
          "tile ring: tile {} has {} B at {}, which do not fit buffers of {} B or a swap file of {} B",
          ref.tile, range.bytes, range.offset, self.options.buffer_bytes, self.file.bytes()));
    }
    ranges.push_back(range);
  }
  if (self.flow) self.position = self.flow->add(self.file.file(), ranges, read);
  self.reads = read;
  self.tiles = std::move(tiles);
  self.opened = 0;
  self.stream = nullptr;
  self.in_pass = true;
  for (std::size_t i = 0; self.options.recorder != nullptr && i < self.buffers.size(); ++i) {
    if (i < self.tiles.size()) self.record_read(i);
  }
}

TileMemory TileRing::open(Stream& stream) {
  Impl& self = *impl_;
  self.use(stream);
  self.check(!self.tile_is_open, "open() before the last tile was closed");
  self.check(self.opened < self.tiles.size(), "open() after the last tile of the pass");
  const TileRef ref = self.tiles[self.opened];
  const std::int64_t position = self.position + static_cast<std::int64_t>(self.opened);
  if (self.flow) {
    self.flow->issued(position);
    self.enqueue(stream, "wait for tile", [position](TileFlow& flow) { flow.await_tile(position); });
  }
  if (self.options.recorder != nullptr) stream.wait(self.tile_read[self.buffer_of(self.opened)]);
  ++self.opened;
  self.tile_is_open = true;
  ++self.counts.tiles;
  if (self.reads) self.counts.bytes_read += ref.region->bytes_of(ref.tile);
  TileMemory memory;
  memory.first = ref.region->first_element(ref.tile);
  memory.elements = ref.region->elements_of(ref.tile);
  auto* base =
      static_cast<char*>(self.buffers[static_cast<std::size_t>(position % self.options.buffers)].data());
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
  if (self.options.recorder != nullptr) self.record_write(ref, stream, write);
  if (write) self.counts.bytes_written += ref.region->bytes_of(ref.tile);
}

void TileRing::end(Stream& stream) {
  Impl& self = *impl_;
  self.use(stream);
  self.check(!self.tile_is_open && self.opened == self.tiles.size(),
             "end() before all tiles were opened and closed: abandon() the pass to leave some out");
  const std::int64_t end = self.position + static_cast<std::int64_t>(self.opened);
  if (self.flow) {
    self.enqueue(stream, "wait for written tiles", [end](TileFlow& flow) { flow.await_left(end); });
    self.ended = stream.record();
  }
  if (self.options.recorder != nullptr) {
    for (const Event& written : self.buffer_free) stream.wait(written);
    self.ended = stream.record();
  }
  self.position = end;
  self.in_pass = false;
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
