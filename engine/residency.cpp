#include "engine/residency.h"

#include <algorithm>

#include "engine/offload_share.h"

namespace tranche::detail {

namespace {

/// Elements [range) in `memory`, which holds the elements `kept` of the buffer.
TensorView view(void* memory, ElementRange kept, ElementRange range, DataType dtype) {
  return part_of({memory, dtype, Shape{kept.size()}}, kept.begin, range);
}

}  // namespace

bool PersistentBuffers::keeps(const FlatLayout& buffer) {
  if (buffer.tensors() == 0 || buffer.elements() > left_) return false;
  for (int tensor = 0; tensor < buffer.tensors(); ++tensor) {
    if (buffer.tensor_elements(tensor) > largest_) return false;
  }
  left_ -= buffer.elements();
  return true;
}

void Residency::assign_tiers(std::vector<UnitState>& units) const {
  PersistentBuffers persistent(config_);
  std::vector<FlatBuffer*> trainable;
  std::vector<std::int64_t> sizes;
  for (UnitState& unit : units) {
    for (FlatBuffer& flat : unit.buffers) {
      // Pipeline stages that share a tensor use it at different times, and would wait for each other in its
      // gathers. So they keep it whole, as ranks of the axis tensor do with what they share.
      flat.persistent = flat.group != nullptr && (persistent.keeps(flat.layout) ||
                                                  (config_.stage == 3 && flat.givers_a_data_rank() > 1));
      flat.parameters_tier = flat.persistent ? OffloadTier::none : config_.offload.parameters;
      if (!flat.trainable) continue;
      trainable.push_back(&flat);
      // The parts of a buffer may differ in size between ranks of the axis tensor. The largest one counts, so
      // that these ranks offload the same units.
      sizes.push_back(flat.empty() ? 0 : std::max(flat.largest_part, flat.layout.padded_elements()));
    }
  }
  if (config_.offload.optimizer == OffloadTier::none) return choose_homes(units);
  const std::vector<bool> moves = units_that_move(sizes, config_.offload.ratio);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (moves[i]) trainable[i]->optimizer_tier = config_.offload.optimizer;
  }
  choose_homes(units);
}

void Residency::choose_homes(std::vector<UnitState>& units) const {
  HostHomes homes(config_.offload);
  for (UnitState& unit : units) {
    for (FlatBuffer& flat : unit.buffers) {
      if (flat.parameters_tier != OffloadTier::nvme || flat.empty()) continue;
      flat.parameters_stay = homes.take_weights(parameters_range(flat).size(), parameter_bytes(flat));
      if (flat.parameters_stay) flat.parameters_tier = OffloadTier::cpu;
    }
  }
  for (UnitState& unit : units) {
    for (FlatBuffer& flat : unit.buffers) {
      if (flat.optimizer_tier != OffloadTier::nvme || flat.empty()) continue;
      flat.optimizer_stays = homes.take_state(tile_bytes(flat));
      if (flat.optimizer_stays) flat.optimizer_tier = OffloadTier::cpu;
    }
  }
}

std::int64_t Residency::parameter_bytes(const FlatBuffer& flat) const {
  return aligned_bytes(parameters_range(flat).size() * size_of(config_.precision.compute));
}

std::int64_t Residency::tile_bytes(const FlatBuffer& flat) const {
  const std::int64_t kept = optimizer_range(flat).size();
  std::int64_t bytes = aligned_bytes(bytes_of(master_type(flat), kept));
  for (const OptimizerStateTensor& state : flat.states) bytes += aligned_bytes(bytes_of(state.dtype, kept));
  return bytes;
}

bool Residency::gathers(const UnitState& unit) const {
  return std::any_of(unit.buffers.begin(), unit.buffers.end(),
                     [this](const FlatBuffer& flat) { return !flat.empty() && !whole_parameters(flat); });
}

bool Residency::offloaded(const UnitState& unit) const {
  return std::any_of(unit.buffers.begin(), unit.buffers.end(),
                     [this](const FlatBuffer& flat) { return offloaded(flat); });
}

TensorView Residency::parameters(const FlatBuffer& flat, ElementRange range) const {
  return view(flat.parameters.data(), parameters_range(flat), range, config_.precision.compute);
}

TensorView Residency::gradients(const FlatBuffer& flat, ElementRange range) const {
  return view(flat.gradients_data(), gradients_range(flat), range, config_.precision.accumulation);
}

TensorView Residency::host_gradients(const FlatBuffer& flat, ElementRange range) const {
  return view(flat.host_gradients.data(), optimizer_range(flat), range, config_.precision.accumulation);
}

TensorView Residency::master(const FlatBuffer& flat, ElementRange range) const {
  return flat.master ? view(flat.master.data(), optimizer_range(flat), range, master_type(flat))
                     : view(flat.parameters.data(), parameters_range(flat), range, master_type(flat));
}

DataType Residency::master_type(const FlatBuffer& flat) const {
  const bool halves = config_.precision.master == MasterFormat::split && parameters_beside_state(flat);
  return halves ? DataType::uint16 : saved_master_type();
}

kernels::WeightRounding Residency::rounding() const {
  const PrecisionConfig& precision = config_.precision;
  return precision.stochastic_rounding             ? kernels::WeightRounding::stochastic
         : precision.master == MasterFormat::split ? kernels::WeightRounding::half_away
                                                   : kernels::WeightRounding::nearest_even;
}

TensorView Residency::state(const FlatBuffer& flat, std::size_t which, ElementRange range) const {
  return view(flat.state[which].data(), optimizer_range(flat), range, flat.states[which].dtype);
}

ShardSlice Residency::slice(const FlatBuffer& flat, ElementRange range) const {
  ShardSlice slice;
  slice.range = range;
  slice.on_host = flat.optimizer_tier == OffloadTier::cpu;
  slice.master = master(flat, range);
  if (slice.in_halves()) slice.weight = parameters(flat, range);
  slice.rounding = rounding();
  for (std::size_t s = 0; s < flat.states.size(); ++s) slice.state.push_back(state(flat, s, range));
  return slice;
}

ElementRange Residency::optimizer_range(const FlatBuffer& flat) const {
  if (flat.empty()) return {};
  if (whole_optimizer(flat)) return {0, flat.layout.padded_elements()};
  return over_replicas(flat) ? flat.owned() : flat.shard();
}

ElementRange Residency::gradients_range(const FlatBuffer& flat) const {
  if (flat.empty()) return {};
  if (whole_gradients(flat)) return {0, flat.layout.padded_elements()};
  return over_replicas(flat) && !sums_replicas_once(flat) ? flat.owned() : flat.shard();
}

ElementRange Residency::parameters_range(const FlatBuffer& flat) const {
  if (flat.empty()) return {};
  return whole_parameters(flat) ? ElementRange{0, flat.layout.padded_elements()} : flat.shard();
}

}  // namespace tranche::detail
