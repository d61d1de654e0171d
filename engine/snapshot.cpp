#include "engine/snapshot.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "checkpoint/shard_writer.h"
#include "core/clock.h"
#include "engine/offloaded_state.h"
#include "engine/saved_arrays.h"
#include "engine/sections.h"
#include "tranche/core/shape.h"
#include "tranche/kernels/elementwise.h"

namespace tranche::detail {

namespace {
/// The number of tiles in one pass over a buffer before the time is checked.
constexpr std::int64_t tiles_a_pass = 16;
}  // namespace

Snapshot::Snapshot(StateStore& store, Device& device, MemoryResource& host_memory)
    : store_(store), device_(device), host_memory_(host_memory) {
  store_.observe(this);
}

Snapshot::~Snapshot() {
  store_.observe(nullptr);
}

SnapshotLayout Snapshot::lay_out(const checkpoint::ShardPlan& plan) const {
  SnapshotLayout laid;
  laid.tiles.resize(store_.trainable().size());
  for (std::size_t u = 0; u < store_.units().size(); ++u) {
    for (const checkpoint::SectionPiece& piece : plan.pieces()) {
      if (piece.unit != static_cast<int>(u) || piece.range.empty()) continue;
      if (const FlatBuffer& flat = buffer_of(store_, plan.layout(), piece);
          flat.trainable && flat.in_tiles()) {
        laid.tiles[static_cast<std::size_t>(flat.trainable_index)] = piece;
        laid.image = false;
      } else {
        laid.parts.push_back({piece, plan.offset_of(piece)});
      }
    }
  }
  laid.bytes = plan.file_bytes();
  laid.arrays = plan.array_offsets();
  if (laid.image) return laid;
  laid.bytes = 0;
  for (SnapshotLayout::Part& part : laid.parts) {
    part.offset = laid.bytes;
    const checkpoint::SectionRecord& section =
        plan.layout().sections[static_cast<std::size_t>(part.piece.section)];
    laid.bytes += round_up(section.bytes(part.piece.range.size()), io_alignment);
  }
  for (std::size_t a = 0; a < laid.arrays.size(); ++a) {
    if (laid.arrays[a] < 0) continue;
    laid.arrays[a] = laid.bytes;
    laid.bytes += round_up(plan.array_bytes(static_cast<int>(a)), io_alignment);
  }
  laid.staging = laid.bytes;
  laid.bytes += checkpoint::ShardWriter::most_staging_bytes(plan);
  return laid;
}

void Snapshot::reserve(const checkpoint::ShardPlan& plan) {
  layout_ = lay_out(plan);
  const std::int64_t bytes = layout_.bytes;
  if (memory_.bytes() == bytes) return;
  memory_ = AlignedBuffer();
  memory_ = AlignedBuffer(host_memory_, bytes, Category::other, "checkpoint snapshot");
  if (device_.kind() == DeviceKind::meta) return;
  // Pages are touched here, once, rather than while training waits for the copy.
  std::memset(memory_.data(), 0, static_cast<std::size_t>(bytes));
}

std::span<std::byte> Snapshot::memory() const {
  return {static_cast<std::byte*>(memory_.data()), static_cast<std::size_t>(memory_.bytes())};
}

void Snapshot::take(const checkpoint::ShardPlan& plan, const std::vector<SavedArray>& arrays, int rank) {
  reserve(plan);
  if (device_.kind() == DeviceKind::meta) return;
  for (std::size_t a = 0; a < arrays.size(); ++a) {
    if (layout_.arrays[a] < 0) continue;
    std::memcpy(memory().data() + layout_.arrays[a], stored_part(plan.layout().arrays[a], arrays[a], rank),
                static_cast<std::size_t>(plan.array_bytes(static_cast<int>(a))));
  }
  const auto section_at = [&](const SnapshotLayout::Part& part) -> const checkpoint::SectionRecord& {
    return plan.layout().sections[static_cast<std::size_t>(part.piece.section)];
  };
  const auto place_of = [&](const SnapshotLayout::Part& part, ElementRange range) {
    return memory().data() + part.offset + section_at(part).bytes(range.begin - part.piece.range.begin);
  };
  std::vector<std::vector<const SnapshotLayout::Part*>> trainable(store_.trainable().size());
  for (const SnapshotLayout::Part& part : layout_.parts) {
    if (section_at(part).frozen) {
      store_.read_parameters(buffer_of(store_, plan.layout(), part.piece), part.piece.range,
                             place_of(part, part.piece.range));
    } else {
      const FlatBuffer& flat = buffer_of(store_, plan.layout(), part.piece);
      trainable[static_cast<std::size_t>(flat.trainable_index)].push_back(&part);
    }
  }
  Stream& compute = device_.compute_stream();
  for (const std::vector<const SnapshotLayout::Part*>& parts : trainable) {
    if (parts.empty()) continue;
    const ElementRange whole = parts.front()->piece.range;
    FlatBuffer& flat = buffer_of(store_, plan.layout(), parts.front()->piece);
    // A rank stores the same range of every section.
    const auto copy_out = [&](const ShardSlice& slice) {
      for (const SnapshotLayout::Part* part : parts) {
        const ElementRange range = intersect(part->piece.range, slice.range);
        if (range.empty()) continue;
        const TensorView from =
            part_of(section_of(slice, section_at(*part), flat.states), slice.range.begin, range);
        if (section_at(*part).kind == "weight" && slice.in_halves()) {
          store_.read_halves(part_of(slice, range), reinterpret_cast<float*>(place_of(*part, range)));
          continue;
        }
        const Shape bytes{from.bytes()};
        if (slice.on_host) {
          kernels::copy(*slice.stream, {from.data, DataType::uint8, bytes},
                        {place_of(*part, range), DataType::uint8, bytes});
        } else {
          device_.copy_to_host(compute, place_of(*part, range), from.data, from.bytes());
        }
      }
    };
    if (flat.optimizer_tier == OffloadTier::none) {
      copy_out(store_.slice(flat, whole));  // synchronized below, once for all
    } else {
      store_.visit(flat, whole, StateStore::Access::read, copy_out);
    }
  }
  compute.synchronize();
}

// --- Tiles ----------------------------------------------------------------------------------------------

void Snapshot::open_tile_feed() {
  feed_.reset();
  giver_.reset();
  missing_ = layout_.tiles;
  if (layout_.image) return;
  feed_ = std::make_shared<TileFeed>();
  giver_ = std::make_shared<TileGiver>(feed_);
}

void Snapshot::before_update(const FlatBuffer& flat, const ShardSlice& slice) {
  if (!giver_) return;
  const int buffer = flat.trainable_index;
  ElementRange& rest = missing_[static_cast<std::size_t>(buffer)].range;
  const ElementRange range = intersect(rest, slice.range);
  if (range.empty()) return;
  slice.stream->enqueue("tile to checkpoint",
                        [giver = giver_, tile = TileFeed::Tile{buffer, part_of(slice, range)}] {
                          giver->feed().hand_over(tile);
                        });
  rest.begin = range.end;  // tiles come in ascending order
}

void Snapshot::updates_issued(Stream& stream) {
  if (!giver_) return;
  stream.enqueue("last tile to checkpoint", [giver = giver_] { giver->feed().finish(); });
  giver_.reset();
}

void Snapshot::before_write() {
  (void)hand_over_tiles(std::numeric_limits<double>::infinity());
}

bool Snapshot::hand_over_tiles(double seconds) {
  if (!giver_) return true;
  const double until = seconds_now() + seconds;
  for (std::size_t b = 0; b < missing_.size(); ++b) {
    ElementRange& rest = missing_[b].range;
    while (!rest.empty() && feed_->wanted()) {
      if (seconds_now() >= until) return false;
      FlatBuffer& flat = *store_.trainable()[b];
      const std::int64_t first = store_.residency().optimizer_range(flat).begin;
      const std::int64_t of_tile = store_.residency().tile_elements();
      const std::int64_t tile = (rest.begin - first) / of_tile;
      const std::int64_t end = std::min(rest.end, first + (tile + tiles_a_pass) * of_tile);
      store_.visit(flat, {rest.begin, end}, StateStore::Access::read, [&](const ShardSlice& slice) {
        feed_->hand_over({static_cast<int>(b), slice});
      });
      rest.begin = end;
    }
  }
  // An update that was issued before step() hands over its tiles on the host stream, so that the feed ends
  // behind it.
  updates_issued(store_.offload()->host());
  return true;
}

}  // namespace tranche::detail
