#include "engine/start_notes.h"

#include <fmt/format.h>

#include <algorithm>

namespace tranche::detail {

namespace {

/// In shorter messages the latency is a considerable part of the time.
constexpr std::int64_t short_message_bytes = 64 << 10;
/// For smaller tiles the latencies of transfers and update are a considerable part of the time.
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

/// Adds a note if less memory is left than the `needed` bytes that steps gather at once.
void note_memory(std::int64_t needed, const std::string& of, const char* advice, const Config& config,
                 const Ledger& ledger, Device& device, std::vector<std::string>& notes) {
  const auto must_hold = [&](const std::string& whose, std::int64_t left) {
    if (left >= needed) return;
    notes.push_back(
        fmt::format("{} leaves {} for the steps, less than the {} of {}: the run will end out of memory; {}",
                    whose, format_bytes(std::max<std::int64_t>(left, 0)), format_bytes(needed), of, advice));
  };
  if (const std::int64_t limit = config.device_memory_limit; limit > 0) {
    must_hold("tranche.device_memory " + format_bytes(limit), limit - ledger.total(Tier::device));
  }
  if (const MemoryInfo memory = device.memory_info(); memory.total > 0) {
    must_hold("the device's memory", memory.free + memory.mapped - memory.placed);
  }
}

void note_kept_for_step(const StateStore& store, const Config& config, const Ledger& ledger, Device& device,
                        std::vector<std::string>& notes) {
  std::int64_t elements = 0;
  for (const UnitState& unit : store.units()) elements += unit.gathered_elements();
  if (!config.overlap || config.depth == 1) {
    notes.push_back(
        fmt::format("{}: no unit is prefetched, and the first use of each in a step waits for its gather",
                    config.overlap ? "tranche.depth 1" : "zero_optimization.overlap_comm false"));
  }
  if (elements > config.max_live_elements) {
    notes.push_back(fmt::format(
        "zero_optimization.stage3_max_live_parameters {} bounds prefetching alone: tranche.gather_for step "
        "keeps all {} elements gathered",
        config.max_live_elements, elements));
  }
  note_memory(elements * size_of(config.precision.compute), "all units, which tranche.gather_for step keeps",
              "tranche.gather_for use gathers them anew for each use", config, ledger, device, notes);
}

/// Adds a note about gradients that keep their dtype while others are sent as int8 blocks.
void note_added_by_use(const StateStore& store, const Config& config, std::vector<std::string>& notes) {
  for (const FlatBuffer* flat : store.trainable()) {
    if (!config.quantized_gradients || flat->empty() || store.residency().quantizes_gradients(*flat))
      continue;
    notes.push_back(
        fmt::format("zero_optimization.zero_quantized_gradients: gradients of {} and of other tied tensors "
                    "travel in {}: the gradients of the uses are each rounded before they are added",
                    store.tensors()[static_cast<std::size_t>(flat->tensors.front())].name,
                    name_of(config.precision.communication)));
    return;
  }
}

/// Adds a note about the buffers that stage 3 keeps whole, and their cost.
void note_persistent(const StateStore& store, const Config& config, std::vector<std::string>& notes) {
  std::int64_t elements = 0, bytes = 0;
  std::size_t count = 0;
  for (const UnitState& unit : store.units()) {
    bool any = false;
    for (const FlatBuffer& flat : unit.buffers) {
      if (!flat.persistent) continue;
      any = true;
      elements += flat.layout.elements();
      bytes += flat.layout.padded_elements() - flat.layout.shard_elements();
    }
    count += any ? 1 : 0;
  }
  const std::string key = fmt::format("zero_optimization.stage3_param_persistence_threshold {}",
                                      config.persistent_tensor_elements);
  if (count == 0) {
    notes.push_back(key +
                    " keeps nothing whole: a unit's tensors are gathered together, and every unit has a "
                    "larger tensor, or exceeds stage3_model_persistence_threshold");
    return;
  }
  notes.push_back(fmt::format(
      "{} keeps {} elements of {} of {} units whole on every rank: they take {} more than their shards, and "
      "only new weights are gathered, after the update",
      key, elements, count, store.units().size(), format_bytes(bytes * size_of(config.precision.compute))));
}

}  // namespace

std::vector<std::string> notes_on_overlap(const StateStore& store, const Config& config, const Ledger& ledger,
                                          Device& device) {
  const std::vector<UnitState>& units = store.units();
  std::vector<std::string> notes;
  note_added_by_use(store, config, notes);
  const bool gathers = std::any_of(units.begin(), units.end(),
                                   [&](const UnitState& unit) { return store.residency().gathers(unit); });
  if (config.gather_for == GatherFor::step && config.stage == 3 && !gathers) {
    notes.emplace_back("tranche.gather_for: step has no effect: every rank has all weights");
  }
  if (config.stage == 3 && config.persistent_tensor_elements > 0 && units[0].buffers[0].layout.ranks() > 1) {
    note_persistent(store, config, notes);
  }
  if (gathers && config.gather_for == GatherFor::step) {
    note_kept_for_step(store, config, ledger, device, notes);
  } else if (gathers && units.size() > 1) {
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
      note_memory(pair_bytes, both, "tranche.depth 1 gathers one at a time, without overlap", config, ledger,
                  device, notes);
    }
  }
  if (config.precision.master == MasterFormat::split) {
    std::int64_t whole = 0;
    for (const FlatBuffer* flat : store.trainable()) {
      const bool fp32 = store.residency().master_type(*flat) == DataType::float32;
      whole += fp32 ? store.residency().optimizer_range(*flat).size() : 0;
    }
    if (whole > 0) {
      notes.push_back(fmt::format(
          "tranche.master split: the weights of {} elements are not kept together with the optimizer's "
          "state, which therefore holds fp32 master weights: 4 bytes each, not 2; the bits are the same",
          whole));
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
    notes.push_back(
        fmt::format("{} {}: a rank's shard of up to {} elements travels in messages of at most {}, whose "
                    "latency may exceed their transfer time; raise it, or leave it out",
                    key, bucket, largest_shard, message));
  };
  cut("zero_optimization.reduce_bucket_size", config.reduce_bucket_elements, config.precision.communication);
  cut("zero_optimization.allgather_bucket_size", config.allgather_bucket_elements, config.precision.compute);
  if (config.offload.optimizer != OffloadTier::none && config.offload.tile_elements < small_tile_elements &&
      config.offload.tile_elements < largest_shard) {
    notes.push_back(fmt::format(
        "zero_optimization.sub_group_size or tranche.offload_tile: offloaded state of up to {} elements a "
        "unit is updated in tiles of {}, each with its own start-up cost; raise it, or leave it out",
        largest_shard, config.offload.tile_elements));
  }
  return notes;
}

void note_update(const Config& config, const std::string& need, std::vector<std::string>& notes) {
  if (config.update == UpdateTime::as_reduced) {
    notes.emplace_back(
        "tranche.update: as_reduced: each unit is updated once its gradient is complete; a gradient that is "
        "not finite ends the run, as does a step that does not learn from every token, or whose samples do "
        "not have their full length");
  } else if (config.offload.optimizer != OffloadTier::none && need.empty() && config.gradient_clipping == 0 &&
             !config.loss_scaling && !config.gradient_noise_scale && !config.offload.activations) {
    notes.emplace_back(
        "no update of this run needs the norm: if every token of every sample is learned, and every sample "
        "has its full length, tranche.update: as_reduced would update offloaded units while the backward "
        "pass goes on");
  }
}

}  // namespace tranche::detail
