#include "engine/residency.h"

namespace tranche {

Residency::Residency(const Config& config, int rank, int ranks)
    : config_(config), rank_(rank), ranks_(ranks), policy_(config.effective_reduction(ranks)) {}

std::byte* Residency::at(const FlatState& flat, void* memory, bool whole, std::int64_t position,
                         DataType dtype) const {
  const std::int64_t first = whole ? 0 : flat.layout.shard_range(rank_).begin;
  return static_cast<std::byte*>(memory) + (position - first) * size_of(dtype);
}

std::byte* Residency::parameters_at(const FlatState& flat, std::int64_t position) const {
  return at(flat, flat.parameters.data(), whole_parameters(), position, config_.precision.compute);
}

std::byte* Residency::gradients_at(const FlatState& flat, std::int64_t position) const {
  return at(flat, flat.gradients_data(), whole_gradients(), position, config_.precision.accumulation);
}

std::byte* Residency::master_at(const FlatState& flat, std::int64_t position) const {
  return flat.master ? at(flat, flat.master.data(), whole_optimizer(), position, DataType::float32)
                     : at(flat, flat.parameters.data(), whole_parameters(), position, DataType::float32);
}

std::byte* Residency::state_at(const FlatState& flat, std::size_t state, DataType dtype,
                               std::int64_t position) const {
  return at(flat, flat.state[state].data(), whole_optimizer(), position, dtype);
}

ElementRange Residency::optimizer_range(const FlatState& flat) const {
  return whole_optimizer() ? ElementRange{0, flat.layout.padded_elements()} : flat.layout.shard_range(rank_);
}

ElementRange Residency::parameters_range(const FlatState& flat) const {
  return whole_parameters() ? ElementRange{0, flat.layout.padded_elements()} : flat.layout.shard_range(rank_);
}

}  // namespace tranche
