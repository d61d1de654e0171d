// What a save takes of a rank: memory is copied at once, tiles of the nvme tier as they come by anyway.

#include <cstring>

#include "tranche/checkpoint/shard_writer.h"
#include "tranche/core/clock.h"
#include "tranche/core/shape.h"
#include "tranche/engine/offloading.h"
#include "tranche/engine/saving.h"
#include "tranche/kernels/elementwise.h"

namespace tranche {

namespace {
/// Of one pass over the nvme tier between two looks at the clock.
constexpr std::int64_t tiles_a_pass = 16;
}  // namespace

Engine::Impl::Kept Engine::Impl::section_of(const Stretch& stretch,
                                            const checkpoint::SectionRecord& section) const {
  if (section.kind == "weight") return {stretch.master, DataType::float32, stretch.range};
  const auto state = static_cast<std::size_t>(find_state(section.kind));
  return {stretch.state[state], state_tensors[state].dtype, stretch.range};
}

ElementRange Engine::Impl::kept_range(const UnitState& unit, bool frozen) const {
  if (!frozen) return optimizer_range(unit.trainable);
  const FlatLayout& layout = unit.frozen.layout;
  return whole_parameters() ? ElementRange{0, layout.padded_elements()} : layout.shard_range(rank);
}

checkpoint::Layout Engine::Impl::checkpoint_layout() const {
  std::vector<checkpoint::UnitDescription> described;
  for (const UnitState& unit : units) {
    checkpoint::UnitDescription description{unit.name, unit.uses_per_pass, {}};
    for (const int index : unit.tensors) {
      const TensorState& tensor = tensors[static_cast<std::size_t>(index)];
      description.tensors.push_back({tensor.name, tensor.shape, tensor.frozen, tensor.aliases});
    }
    described.push_back(std::move(description));
  }
  std::vector<checkpoint::StateDescription> states;
  for (const OptimizerStateTensor& state : state_tensors) states.push_back({state.name, state.dtype});
  return checkpoint::make_layout(described, states, DataType::float32, config.precision.compute, ranks);
}

SnapshotLayout Engine::Impl::lay_out_snapshot(const checkpoint::ShardPlan& plan) const {
  SnapshotLayout layout;
  layout.tiles.resize(units.size());
  for (std::size_t u = 0; u < units.size(); ++u) {
    for (const checkpoint::SectionPiece& piece : plan.pieces()) {
      if (piece.unit != static_cast<int>(u) || piece.range.empty()) continue;
      const bool frozen = plan.layout().sections[static_cast<std::size_t>(piece.section)].frozen;
      if (!frozen && units[u].trainable.optimizer_tier == OffloadTier::nvme) {
        layout.tiles[u] = piece.range;  // the same in every section
        layout.image = false;
      } else {
        layout.parts.push_back({piece, plan.offset_of(piece.section, piece.unit, piece.range)});
      }
    }
  }
  layout.bytes = plan.file_bytes();
  if (layout.image) return layout;
  layout.bytes = 0;
  for (SnapshotLayout::Part& part : layout.parts) {
    part.offset = layout.bytes;
    const DataType dtype = plan.layout().sections[static_cast<std::size_t>(part.piece.section)].dtype;
    layout.bytes += round_up(part.piece.range.size() * size_of(dtype), io_alignment);
  }
  layout.staging = layout.bytes;
  layout.bytes += checkpoint::ShardWriter::most_staging_bytes(plan);
  return layout;
}

void Engine::Impl::reserve_snapshot(const checkpoint::ShardPlan& plan) {
  saving->layout = lay_out_snapshot(plan);
  const std::int64_t bytes = saving->layout.bytes;
  if (saving->snapshot.bytes() == bytes) return;
  saving->snapshot = AlignedBuffer();
  saving->snapshot = AlignedBuffer(runtime.memory(Tier::host), bytes, Category::other, "checkpoint snapshot");
  if (simulated()) return;
  // Pages are made here, once, and not while training waits for the copy.
  std::memset(saving->snapshot.data(), 0, static_cast<std::size_t>(bytes));
}

void Engine::Impl::take_snapshot() {
  Saving& save = *saving;
  reserve_snapshot(*save.plan);
  if (simulated()) return;
  const auto section_at = [&](const SnapshotLayout::Part& part) -> const checkpoint::SectionRecord& {
    return save.plan->layout().sections[static_cast<std::size_t>(part.piece.section)];
  };
  const auto place_of = [&](const SnapshotLayout::Part& part, ElementRange range) {
    return static_cast<std::byte*>(save.snapshot.data()) + part.offset +
           (range.begin - part.piece.range.begin) * size_of(section_at(part).dtype);
  };
  std::vector<std::vector<const SnapshotLayout::Part*>> trainable(units.size());
  for (const SnapshotLayout::Part& part : save.layout.parts) {
    const auto unit = static_cast<std::size_t>(part.piece.unit);
    if (section_at(part).frozen) {
      read_parameters(units[unit].frozen, part.piece.range, place_of(part, part.piece.range));
    } else {
      trainable[unit].push_back(&part);
    }
  }
  for (std::size_t u = 0; u < units.size(); ++u) {
    if (trainable[u].empty()) continue;
    // A rank stores the same range of every section.
    const auto copy_out = [&](const Stretch& stretch) {
      for (const SnapshotLayout::Part* part : trainable[u]) {
        const ElementRange range = intersect(part->piece.range, stretch.range);
        if (range.empty()) continue;
        const Kept kept = section_of(stretch, section_at(*part));
        const std::byte* from =
            static_cast<const std::byte*>(kept.data) + (range.begin - kept.range.begin) * size_of(kept.dtype);
        const std::int64_t bytes = range.size() * size_of(kept.dtype);
        if (stretch.on_host) {
          kernels::copy(*stretch.stream, {from, DataType::uint8, Shape{bytes}},
                        {place_of(*part, range), DataType::uint8, Shape{bytes}});
        } else {
          runtime.device().copy_to_host(compute, place_of(*part, range), from, bytes);
        }
      }
    };
    const ElementRange range = trainable[u].front()->piece.range;
    if (units[u].trainable.optimizer_tier == OffloadTier::none) {
      copy_out(stretch_of(units[u], range));  // waited for once, below
    } else {
      visit_state(units[u], range, Access::read, copy_out);
    }
  }
  compute.synchronize();
}

// --- Tiles ----------------------------------------------------------------------------------------------

void Engine::Impl::open_tile_feed() {
  Saving& save = *saving;
  save.feed.reset();
  save.giver.reset();
  save.missing = save.layout.tiles;
  if (save.layout.image) return;
  save.feed = std::make_shared<TileFeed>();
  save.giver = std::make_shared<TileGiver>(save.feed);
}

TileFeed::Tile Engine::Impl::tile_of(int unit, ElementRange range, const Stretch& stretch) const {
  const std::int64_t skipped = range.begin - stretch.range.begin;
  TileFeed::Tile tile{unit, range, {stretch.master + skipped * size_of(DataType::float32)}};
  for (std::size_t s = 0; s < state_tensors.size(); ++s) {
    tile.data.push_back(stretch.state[s] + skipped * size_of(state_tensors[s].dtype));
  }
  return tile;
}

void Engine::Impl::hand_over_in_stream(int unit, const Stretch& stretch) {
  Saving& save = *saving;
  if (!save.giver) return;
  ElementRange& missing = save.missing[static_cast<std::size_t>(unit)];
  const ElementRange range = intersect(missing, stretch.range);
  if (range.empty()) return;
  stretch.stream->enqueue("tile to checkpoint", [giver = save.giver, tile = tile_of(unit, range, stretch)] {
    giver->feed().hand_over(tile);
  });
  missing.begin = range.end;  // tiles come in ascending order
}

void Engine::Impl::finish_handing_over(Stream& stream) {
  Saving& save = *saving;
  if (!save.giver) return;
  stream.enqueue("last tile to checkpoint", [giver = save.giver] { giver->feed().finish(); });
  save.giver.reset();
}

bool Engine::Impl::hand_over_tiles(double seconds) {
  Saving& save = *saving;
  if (!save.giver) return true;
  const double until = seconds_now() + seconds;
  for (std::size_t u = 0; u < units.size(); ++u) {
    const FlatState& flat = units[u].trainable;
    ElementRange& missing = save.missing[u];
    while (!missing.empty() && save.feed->wanted()) {
      if (seconds_now() >= until) return false;
      const std::int64_t first = optimizer_range(flat).begin;
      const std::int64_t tile = (missing.begin - first) / flat.tiles.tile_elements;
      const std::int64_t end =
          std::min(missing.end, first + (tile + tiles_a_pass) * flat.tiles.tile_elements);
      visit_state(units[u], {missing.begin, end}, Access::read, [&](const Stretch& stretch) {
        save.feed->hand_over(tile_of(static_cast<int>(u), stretch.range, stretch));
      });
      missing.begin = end;
    }
  }
  save.feed->finish();
  save.giver.reset();
  return true;
}

}  // namespace tranche
