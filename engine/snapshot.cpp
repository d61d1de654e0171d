// The snapshot that a save takes of a rank: memory is copied at once, tiles of the nvme tier as they come by
// anyway.

#include <cstring>

#include "checkpoint/shard_writer.h"
#include "core/clock.h"
#include "engine/offloading.h"
#include "engine/saved_arrays.h"
#include "engine/saving.h"
#include "engine/sections.h"
#include "tranche/core/shape.h"
#include "tranche/kernels/elementwise.h"

namespace tranche {

namespace {
/// Of one pass over the nvme tier between two looks at the clock.
constexpr std::int64_t tiles_a_pass = 16;
}  // namespace

SnapshotLayout Engine::Impl::Saving::lay_out_snapshot(const checkpoint::ShardPlan& of) const {
  SnapshotLayout laid;
  laid.tiles.resize(engine.units.size());
  for (std::size_t u = 0; u < engine.units.size(); ++u) {
    for (const checkpoint::SectionPiece& piece : of.pieces()) {
      if (piece.unit != static_cast<int>(u) || piece.range.empty()) continue;
      const bool frozen = of.layout().sections[static_cast<std::size_t>(piece.section)].frozen;
      if (!frozen && engine.units[u].trainable.optimizer_tier == OffloadTier::nvme) {
        laid.tiles[u] = piece.range;  // the same in every section
        laid.image = false;
      } else {
        laid.parts.push_back({piece, of.offset_of(piece.section, piece.unit, piece.range)});
      }
    }
  }
  laid.bytes = of.file_bytes();
  laid.arrays = of.array_offsets();
  if (laid.image) return laid;
  laid.bytes = 0;
  for (SnapshotLayout::Part& part : laid.parts) {
    part.offset = laid.bytes;
    const DataType dtype = of.layout().sections[static_cast<std::size_t>(part.piece.section)].dtype;
    laid.bytes += round_up(part.piece.range.size() * size_of(dtype), io_alignment);
  }
  for (std::size_t a = 0; a < laid.arrays.size(); ++a) {
    if (laid.arrays[a] < 0) continue;
    laid.arrays[a] = laid.bytes;
    laid.bytes += round_up(of.array_bytes(static_cast<int>(a)), io_alignment);
  }
  laid.staging = laid.bytes;
  laid.bytes += checkpoint::ShardWriter::most_staging_bytes(of);
  return laid;
}

void Engine::Impl::Saving::reserve_snapshot(const checkpoint::ShardPlan& of) {
  layout = lay_out_snapshot(of);
  const std::int64_t bytes = layout.bytes;
  if (snapshot.bytes() == bytes) return;
  snapshot = AlignedBuffer();
  snapshot = AlignedBuffer(engine.runtime.memory(Tier::host), bytes, Category::other, "checkpoint snapshot");
  if (engine.simulated()) return;
  // Pages are made here, once, and not while training waits for the copy.
  std::memset(snapshot.data(), 0, static_cast<std::size_t>(bytes));
}

void Engine::Impl::Saving::take_snapshot(const std::vector<SavedArray>& arrays) {
  reserve_snapshot(*plan);
  if (engine.simulated()) return;
  for (std::size_t a = 0; a < arrays.size(); ++a) {
    if (layout.arrays[a] < 0) continue;
    std::memcpy(static_cast<std::byte*>(snapshot.data()) + layout.arrays[a],
                stored_part(plan->layout().arrays[a], arrays[a], engine.rank),
                static_cast<std::size_t>(plan->array_bytes(static_cast<int>(a))));
  }
  const auto section_at = [&](const SnapshotLayout::Part& part) -> const checkpoint::SectionRecord& {
    return plan->layout().sections[static_cast<std::size_t>(part.piece.section)];
  };
  const auto place_of = [&](const SnapshotLayout::Part& part, ElementRange range) {
    return static_cast<std::byte*>(snapshot.data()) + part.offset +
           (range.begin - part.piece.range.begin) * size_of(section_at(part).dtype);
  };
  std::vector<std::vector<const SnapshotLayout::Part*>> trainable(engine.units.size());
  for (const SnapshotLayout::Part& part : layout.parts) {
    const auto unit = static_cast<std::size_t>(part.piece.unit);
    if (section_at(part).frozen) {
      engine.read_parameters(engine.units[unit].frozen, part.piece.range, place_of(part, part.piece.range));
    } else {
      trainable[unit].push_back(&part);
    }
  }
  for (std::size_t u = 0; u < engine.units.size(); ++u) {
    if (trainable[u].empty()) continue;
    // A rank stores the same range of every section.
    const auto copy_out = [&](const Stretch& stretch) {
      for (const SnapshotLayout::Part* part : trainable[u]) {
        const ElementRange range = intersect(part->piece.range, stretch.range);
        if (range.empty()) continue;
        const Kept kept = section_of(stretch, section_at(*part), engine.state_tensors);
        const std::byte* from =
            static_cast<const std::byte*>(kept.data) + (range.begin - kept.range.begin) * size_of(kept.dtype);
        const std::int64_t bytes = range.size() * size_of(kept.dtype);
        if (stretch.on_host) {
          kernels::copy(*stretch.stream, {from, DataType::uint8, Shape{bytes}},
                        {place_of(*part, range), DataType::uint8, Shape{bytes}});
        } else {
          engine.runtime.device().copy_to_host(engine.compute, place_of(*part, range), from, bytes);
        }
      }
    };
    const ElementRange range = trainable[u].front()->piece.range;
    if (engine.units[u].trainable.optimizer_tier == OffloadTier::none) {
      copy_out(engine.stretch_of(engine.units[u], range));  // waited for once, below
    } else {
      engine.visit_state(engine.units[u], range, Access::read, copy_out);
    }
  }
  engine.compute.synchronize();
}

// --- Tiles ----------------------------------------------------------------------------------------------

void Engine::Impl::Saving::open_tile_feed() {
  feed.reset();
  giver.reset();
  missing = layout.tiles;
  if (layout.image) return;
  feed = std::make_shared<TileFeed>();
  giver = std::make_shared<TileGiver>(feed);
}

TileFeed::Tile Engine::Impl::Saving::tile_of(int unit, ElementRange range, const Stretch& stretch) const {
  const std::int64_t skipped = range.begin - stretch.range.begin;
  TileFeed::Tile tile{unit, range, {stretch.master + skipped * size_of(DataType::float32)}};
  for (std::size_t s = 0; s < engine.state_tensors.size(); ++s) {
    tile.data.push_back(stretch.state[s] + skipped * size_of(engine.state_tensors[s].dtype));
  }
  return tile;
}

void Engine::Impl::Saving::hand_over_in_stream(int unit, const Stretch& stretch) {
  if (!giver) return;
  ElementRange& rest = missing[static_cast<std::size_t>(unit)];
  const ElementRange range = intersect(rest, stretch.range);
  if (range.empty()) return;
  stretch.stream->enqueue("tile to checkpoint", [giver = giver, tile = tile_of(unit, range, stretch)] {
    giver->feed().hand_over(tile);
  });
  rest.begin = range.end;  // tiles come in ascending order
}

void Engine::Impl::Saving::finish_handing_over(Stream& stream) {
  if (!giver) return;
  stream.enqueue("last tile to checkpoint", [giver = giver] { giver->feed().finish(); });
  giver.reset();
}

bool Engine::Impl::Saving::hand_over_tiles(double seconds) {
  if (!giver) return true;
  const double until = seconds_now() + seconds;
  for (std::size_t u = 0; u < engine.units.size(); ++u) {
    const FlatState& flat = engine.units[u].trainable;
    ElementRange& rest = missing[u];
    while (!rest.empty() && feed->wanted()) {
      if (seconds_now() >= until) return false;
      const std::int64_t first = engine.residency.optimizer_range(flat).begin;
      const std::int64_t tile = (rest.begin - first) / flat.tiles.tile_elements;
      const std::int64_t end = std::min(rest.end, first + (tile + tiles_a_pass) * flat.tiles.tile_elements);
      engine.visit_state(engine.units[u], {rest.begin, end}, Access::read, [&](const Stretch& stretch) {
        feed->hand_over(tile_of(static_cast<int>(u), stretch.range, stretch));
      });
      rest.begin = end;
    }
  }
  feed->finish();
  giver.reset();
  return true;
}

}  // namespace tranche
