#include "engine/start_notes.h"

#include <fmt/format.h>

#include <algorithm>

namespace tranche::detail {

namespace {

/// Below it a message's latency is no small part of its time.
constexpr std::int64_t short_message_bytes = 64 << 10;
/// Below it the beginning of a tile's transfers and of its update is no small part of their time.
constexpr std::int64_t small_tile_elements = 64 << 10;

/// The two neighbours in forward order with the most gathered elements.
std::size_t largest_pair(const std::vector<UnitState>& units) {
  std::size_t first = 0;
  const auto elements = [&](std::size_t u) {
    return units[u].gathered_elements() + units[u + 1].gathered_elements();
  };
  for (std::size_t u = 0; u + 1 < units.size(); ++u) {
    if (elements(u) > elements(first)) first = u;
  }
  return first;
}

}  // namespace

std::vector<std::string> notes_on_overlap(const StateStore& store, const Config& config, const Ledger& ledger,
                                          Device& device) {
  const std::vector<UnitState>& units = store.units();
  std::vector<std::string> notes;
  const bool gathers = std::any_of(units.begin(), units.end(),
                                   [&](const UnitState& unit) { return store.residency().gathers(unit); });
  if (gathers && units.size() > 1) {
    const UnitState& one = units[largest_pair(units)];
    const UnitState& other = units[largest_pair(units) + 1];
    const std::int64_t pair = one.gathered_elements() + other.gathered_elements();
    const std::int64_t pair_bytes = pair * size_of(config.precision.compute);
    const std::string both = "the unit in use and the next (" + one.name + " and " + other.name + ")";
    if (!config.overlap) {
      notes.emplace_back(
          "zero_optimization.overlap_comm false: no unit is prefetched, and every gather is waited for");
    } else if (config.depth == 1) {
      notes.emplace_back(
          "tranche.depth 1: no unit is prefetched, and every gather is waited for; 2 gathers the next while "
          "one "
          "is in use");
    } else {
      if (pair > config.max_live_elements) {
        notes.push_back(fmt::format(
            "zero_optimization.stage3_max_live_parameters {} is less than the {} elements of {}, which "
            "are gathered all the same; tranche.depth 1 gathers one at a time, without overlap",
            config.max_live_elements, pair, both));
      }
      const auto must_hold = [&](const std::string& whose, std::int64_t left) {
        if (left >= pair_bytes) return;
        notes.push_back(fmt::format(
            "{} leaves {} for the steps, less than the {} of {}: the run will end out of memory; "
            "tranche.depth 1 "
            "gathers one at a time, without overlap",
            whose, format_bytes(std::max<std::int64_t>(left, 0)), format_bytes(pair_bytes), both));
      };
      if (const std::int64_t limit = config.device_memory_limit; limit > 0) {
        must_hold("tranche.device_memory " + format_bytes(limit), limit - ledger.total(Tier::device));
      }
      if (const MemoryInfo memory = device.memory_info(); memory.total > 0) {
        must_hold("the device's memory", memory.free + memory.mapped - memory.placed);
      }
    }
  }
  std::int64_t largest_shard = 0;
  int ranks = 1;
  for (const FlatBuffer* flat : store.trainable()) {
    largest_shard = std::max(largest_shard, flat->layout.shard_elements());
    ranks = std::max(ranks, flat->layout.ranks());
  }
  const auto cut = [&](const char* key, std::int64_t bucket, DataType dtype) {
    const std::int64_t message = std::max<std::int64_t>(bucket / ranks, 1);
    if (ranks == 1 || message >= largest_shard || message * size_of(dtype) >= short_message_bytes) return;
    notes.push_back(fmt::format(
        "{} {}: a rank's shard of up to {} elements travels in messages of at most {}, whose latency "
        "may be longer than their way; raise it, or leave it out",
        key, bucket, largest_shard, message));
  };
  cut("zero_optimization.reduce_bucket_size", config.reduce_bucket_elements, config.precision.communication);
  cut("zero_optimization.allgather_bucket_size", config.allgather_bucket_elements, config.precision.compute);
  if (config.offload.optimizer != OffloadTier::none && config.offload.tile_elements < small_tile_elements &&
      config.offload.tile_elements < largest_shard) {
    notes.push_back(fmt::format(
        "zero_optimization.sub_group_size or tranche.offload_tile: offloaded state of up to {} elements "
        "a unit is updated in tiles of {}, each of which begins anew; raise it, or leave it out",
        largest_shard, config.offload.tile_elements));
  }
  return notes;
}

}  // namespace tranche::detail
