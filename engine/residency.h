#pragma once
/// Which elements of a flat buffer's copies a rank keeps by stage, reduction policy and offload
/// settings, and where they lie in the memory that it keeps them in. Private to engine/.

#include <cstddef>
#include <cstdint>

#include "engine/unit_state.h"
#include "tranche/engine/config.h"

namespace tranche {

class Residency {
 public:
  /// Of this rank among `ranks`. `config` outlives it.
  Residency(const Config& config, int rank, int ranks);

  bool whole_parameters() const {
    return (config_.stage < 3 || ranks_ == 1) && config_.offload.parameters == OffloadTier::none;
  }
  bool whole_optimizer() const { return config_.stage == 0 || ranks_ == 1; }
  /// G has room for the whole buffer: it is the local accumulator, or stage 0 wants all of it.
  bool whole_gradients() const {
    return ranks_ == 1 || config_.stage == 0 || policy_ == ReductionPolicy::boundary;
  }
  /// Kernels add straight into the persistent accumulator.
  bool direct_accumulation() const {
    return policy_ == ReductionPolicy::boundary && config_.precision.accumulation == DataType::float32;
  }
  /// One micro-batch makes a step, and nobody needs G on the device behind it.
  bool lends_gradients(const FlatState& flat) const {
    return flat.optimizer_tier != OffloadTier::none && config_.accumulation_steps == 1;
  }
  /// Anything of the unit lives off the device.
  bool offloaded(const UnitState& unit) const {
    return unit.trainable.optimizer_tier != OffloadTier::none ||
           config_.offload.parameters != OffloadTier::none;
  }

  /// Range of the flat buffer whose optimizer state this rank keeps.
  ElementRange optimizer_range(const FlatState& flat) const;
  /// Range of the flat buffer whose parameters this rank keeps between gathers.
  ElementRange parameters_range(const FlatState& flat) const;

  /// Address of element `position` of the flat buffer in the memory that keeps it, which is not on nvme.
  std::byte* parameters_at(const FlatState& flat, std::int64_t position) const;
  std::byte* gradients_at(const FlatState& flat, std::int64_t position) const;
  /// The fp32 weight, of trainable elements.
  std::byte* master_at(const FlatState& flat, std::int64_t position) const;
  std::byte* state_at(const FlatState& flat, std::size_t state, DataType dtype, std::int64_t position) const;
  /// The begin of this rank's shard of the main gradient.
  std::byte* gradients_shard(const FlatState& flat) const {
    return gradients_at(flat, flat.layout.shard_range(rank_).begin);
  }

 private:
  std::byte* at(const FlatState& flat, void* memory, bool whole, std::int64_t position, DataType dtype) const;

  const Config& config_;
  int rank_, ranks_;
  ReductionPolicy policy_;
};

}  // namespace tranche
