#include "engine/start_checks.h"

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/json.h"
#include "device/process_memory.h"
#include "engine/sections.h"
#include "tranche/core/error.h"
#include "tranche/kernels/matmul.h"

namespace tranche::detail {

bool threads_change_bits(const Config& config, const Device& device) {
  return device.kind() == DeviceKind::cpu && config.precision.compute == DataType::bfloat16 &&
         !kernels::matmul_path(DeviceKind::cpu, DataType::bfloat16).starts_with("widened");
}

void check_threads(const Config& config, const Device& device) {
  if (!config.world_size_invariant || config.threads > 0 || !threads_change_bits(config, device)) return;
  throw ConfigurationError(
      "tranche.world_size_invariant: on this CPU oneDNN may multiply bf16, with bits that depend on the "
      "number of threads, which is the node's cores over its ranks; give tranche.threads (--threads), the "
      "same for "
      "every number of ranks");
}

std::string routing_of(const Optimizer& optimizer, std::span<const TensorState> tensors) {
  std::vector<TrainableTensor> trainable;
  for (const TensorState& tensor : tensors) {
    if (!tensor.frozen) trainable.push_back(trainable_tensor(tensor));
  }
  try {
    return optimizer.routing(trainable);
  } catch (const InvalidArgument& error) {
    throw ConfigurationError("optimizer " + error.message());
  }
}

std::string need_of_all_gradients(const Optimizer& optimizer, const StateStore& store, bool sums) {
  if (sums) return optimizer.name() + " computes sums over whole tensors first";
  const bool whole = std::any_of(store.trainable().begin(), store.trainable().end(),
                                 [](const FlatBuffer* flat) { return flat->whole_matrices; });
  return whole ? optimizer.name() + " computes whole matrices, which ranks exchange first" : std::string();
}

void check_update(const Config& config, const Optimizer& optimizer, const StateStore& store, bool sums) {
  const std::string need = need_of_all_gradients(optimizer, store, sums);
  if (config.update == UpdateTime::at_the_boundary || need.empty()) return;
  throw ConfigurationError("tranche.update: as_reduced cannot be used: optimizer " + need +
                           "; write at_the_boundary");
}

namespace {

std::string advice_on_host_memory(const OffloadConfig& offload) {
  if (offload.host_state_bytes() > 0) {
    return "; lower --host-state (tranche.host_state), now " + format_bytes(offload.host_state_bytes()) +
           ", or use a higher stage or more nodes";
  }
  if (offload.optimizer == OffloadTier::nvme) {
    return "; use a higher stage or more nodes, or lower offload_optimizer.ratio";
  }
  return "; use a higher stage or more nodes, move the optimizer to nvme, or lower offload_optimizer.ratio";
}

}  // namespace

void check_storable(const Optimizer& optimizer, const StateStore& store) {
  require_names(store);
  const std::string text = optimizer.describe();
  if (parse_json(text).is_object()) return;
  throw InvalidArgument("describe() of optimizer " + optimizer.name() +
                        " must be a JSON object, which checkpoints hold, not '" +
                        checkpoint::shown_name(text) + "'");
}

void check_host_memory(const Runtime& runtime, const Config& config, const StateStore& store,
                       const StateFormulas& formulas) {
  // On a CPU device memory is host memory; a limit of device memory has a separate error.
  const bool device_counts = runtime.device().host_accessible() && config.device_memory_limit == 0;
  if (runtime.device().kind() == DeviceKind::meta || !(config.offload.any() || device_counts)) return;
  std::int64_t needed = 0;
  const std::int64_t accumulation = size_of(config.precision.accumulation);
  std::int64_t largest = 0, largest_tile = 0, stay = 0;
  bool tiles = false;  // whether any state is on the disk
  for (const UnitState& unit : store.units()) {
    std::int64_t shard_bytes = 0;
    for (const FlatBuffer& flat : unit.buffers) {
      if (flat.parameters_tier == OffloadTier::nvme) {
        shard_bytes += flat.layout.shard_elements() * size_of(config.precision.compute);
      } else if (flat.parameters_tier == OffloadTier::cpu) {
        needed += store.residency().parameter_bytes(flat);
        stay += flat.parameters_stay ? store.residency().parameter_bytes(flat) : 0;
      }
      const std::int64_t kept = store.residency().optimizer_range(flat).size();
      if (flat.optimizer_tier != OffloadTier::none) needed += kept * accumulation;
      const auto bytes = [&](std::int64_t elements) {
        return bytes_of(store.residency().master_type(flat), elements) + state_bytes(flat.states, elements);
      };
      if (flat.optimizer_tier == OffloadTier::cpu) needed += bytes(kept);
      stay += flat.optimizer_stays ? bytes(kept) : 0;
      tiles = tiles || flat.optimizer_tier == OffloadTier::nvme;
      largest_tile = std::max(largest_tile, bytes(config.offload.tile_elements));
    }
    largest = std::max(largest, shard_bytes);
  }
  if (config.offload.parameters == OffloadTier::nvme) needed += config.offload.parameter_buffers * largest;
  if (tiles) {
    needed += config.offload.tile_buffers * largest_tile;
    needed += std::max<std::int64_t>(0, config.offload.host_state_bytes() - stay);
  }
  if (device_counts) {
    const StateFormulas::Bytes bytes = formulas.bytes();
    const StateFormulas::Bytes::OnTier& here = bytes.tiers[static_cast<std::size_t>(Tier::device)];
    needed += here.parameters + here.gradients + here.optimizer;
  }
  const AvailableMemory available = available_memory();
  const std::int64_t sharing = std::max(1, runtime.all().local_size());
  if (needed * sharing <= available.bytes) return;
  throw OutOfMemory("model state takes " + format_bytes(needed) + " of host memory on each of " +
                    std::to_string(sharing) + " ranks of this node, " + format_bytes(needed * sharing) +
                    " together, but " + format_bytes(available.bytes) + " are " +
                    (available.of_group ? "left by the control group's limit" : "available") +
                    advice_on_host_memory(config.offload));
}

}  // namespace tranche::detail
