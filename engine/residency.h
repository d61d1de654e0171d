#pragma once
/// The elements of a flat buffer's copies that a rank keeps by stage, reduction policy and offload settings,
/// and their places in its memory. Private to engine/.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/flat_buffer.h"
#include "engine/shard_slice.h"
#include "tranche/engine/config.h"

namespace tranche::detail {

class Residency {
 public:
  /// Both outlive it.
  Residency(const Config& config, const std::vector<OptimizerStateTensor>& state_tensors)
      : config_(config), state_tensors_(state_tensors) {}

  // True when a rank keeps the whole of a buffer that is sharded over `ranks`.
  bool whole_parameters(int ranks) const {
    return (config_.stage < 3 || ranks == 1) && config_.offload.parameters == OffloadTier::none;
  }
  bool whole_optimizer(int ranks) const { return config_.stage == 0 || ranks == 1; }
  /// The main gradient has room for the whole buffer: it is the local accumulator, or stage 0 wants all of
  /// it.
  bool whole_gradients(int ranks) const {
    return ranks == 1 || config_.stage == 0 || policy(ranks) == ReductionPolicy::boundary;
  }
  /// Kernels add straight into the persistent accumulator.
  bool direct_accumulation(int ranks) const {
    return policy(ranks) == ReductionPolicy::boundary && config_.precision.accumulation == DataType::float32;
  }
  ReductionPolicy policy(int ranks) const { return config_.effective_reduction(ranks); }

  bool whole_parameters(const FlatBuffer& flat) const { return whole_parameters(flat.layout.ranks()); }
  bool whole_optimizer(const FlatBuffer& flat) const { return whole_optimizer(flat.layout.ranks()); }
  bool whole_gradients(const FlatBuffer& flat) const { return whole_gradients(flat.layout.ranks()); }
  bool direct_accumulation(const FlatBuffer& flat) const { return direct_accumulation(flat.layout.ranks()); }
  ReductionPolicy policy(const FlatBuffer& flat) const { return policy(flat.layout.ranks()); }
  /// Some of the unit's parameters must be gathered before they can be used.
  bool gathers(const UnitState& unit) const;
  /// The main gradient takes memory of the step only: one micro-batch makes the step, and nothing needs it on
  /// the device behind that.
  bool transient_gradients(const FlatBuffer& flat) const {
    return flat.optimizer_tier != OffloadTier::none && config_.accumulation_steps == 1;
  }
  /// Anything of the buffer, or of the unit, lives off the device.
  bool offloaded(const FlatBuffer& flat) const {
    return flat.optimizer_tier != OffloadTier::none || config_.offload.parameters != OffloadTier::none;
  }
  bool offloaded(const UnitState& unit) const;

  /// Range of the flat buffer whose optimizer state this rank keeps.
  ElementRange optimizer_range(const FlatBuffer& flat) const;
  /// Range of the flat buffer whose parameters this rank keeps between gathers.
  ElementRange parameters_range(const FlatBuffer& flat) const;

  // Elements [range) of a flat buffer in the memory that keeps them, which is not on nvme.
  TensorView parameters(const FlatBuffer& flat, ElementRange range) const;
  TensorView gradients(const FlatBuffer& flat, ElementRange range) const;
  /// The main gradient in host memory, of a buffer whose optimizer state is off the device.
  TensorView host_gradients(const FlatBuffer& flat, ElementRange range) const;
  /// The fp32 weights, of a trainable buffer.
  TensorView master(const FlatBuffer& flat, ElementRange range) const;
  TensorView state(const FlatBuffer& flat, std::size_t which, ElementRange range) const;
  /// Master weights and state, without a stream.
  ShardSlice slice(const FlatBuffer& flat, ElementRange range) const;

 private:
  const Config& config_;
  const std::vector<OptimizerStateTensor>& state_tensors_;
};

}  // namespace tranche::detail
