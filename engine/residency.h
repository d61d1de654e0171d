#pragma once
/// Says which elements of a flat buffer's weights, gradients and optimizer state a rank keeps, and where they
/// lie. Both follow from stage, reduction policy and offload settings. Private to engine/.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/flat_buffer.h"
#include "engine/shard_slice.h"
#include "tranche/config/config.h"

namespace tranche::detail {

/// Decides, in the order of units, which buffers stage 3 keeps whole on the device.
class PersistentBuffers {
 public:
  explicit PersistentBuffers(const Config& config)
      : largest_(config.stage < 3 ? 0 : config.persistent_tensor_elements),
        left_(config.persistent_model_elements) {}
  /// True when each tensor of the next buffer is small enough, and the bound on all of them has room for it.
  bool keeps(const FlatLayout& buffer);

 private:
  std::int64_t largest_, left_;
};

class Residency {
 public:
  /// `config` must outlive it.
  explicit Residency(const Config& config) : config_(config) {}

  const PrecisionConfig& precision() const { return config_.precision; }
  /// Sets the tiers of all buffers, in the order of units.
  void assign_tiers(std::vector<UnitState>& units) const;

  /// True when gradients and optimizer state are sharded over the buffer's replicas as well: each replica
  /// keeps the part that it owns.
  bool over_replicas(const FlatBuffer& flat) const {
    return flat.replicas != nullptr && config_.stage > 0 && config_.replicate == Replicate::parameters;
  }
  /// True when the sums of the buffer's group are accumulated in the shard, and the replicas add them up once
  /// a step.
  bool sums_replicas_once(const FlatBuffer& flat) const {
    return flat.replicas != nullptr && config_.replica_sum == ReplicaSum::step &&
           policy(flat) == ReductionPolicy::micro_batch;
  }
  ReductionPolicy policy(const FlatBuffer& flat) const {
    return config_.effective_reduction(over_replicas(flat) ? flat.owners() / flat.givers_a_data_rank()
                                                           : flat.data_ranks());
  }
  // True when a rank keeps the whole of a buffer.
  bool whole_parameters(const FlatBuffer& flat) const {
    if (flat.persistent) return true;
    return (config_.stage < 3 || flat.layout.ranks() == 1) && config_.offload.parameters == OffloadTier::none;
  }
  bool whole_optimizer(const FlatBuffer& flat) const {
    return config_.stage == 0 || (flat.layout.ranks() == 1 && !over_replicas(flat));
  }
  /// True when the main gradient covers the whole buffer: it is the local accumulator, or stage 0 keeps all
  /// of it.
  bool whole_gradients(const FlatBuffer& flat) const {
    return whole_optimizer(flat) || policy(flat) == ReductionPolicy::boundary;
  }
  /// True when every rank gathers the whole main gradient, once that of the step is complete.
  bool gathers_gradients() const { return config_.stage == 0; }
  /// True when kernels add gradients directly to the main gradient, which persists over micro-batches.
  bool direct_accumulation(const FlatBuffer& flat) const {
    return policy(flat) == ReductionPolicy::boundary && config_.precision.accumulation == DataType::float32;
  }
  /// True when the gradients of two uses are summed over micro-batches separately.
  bool keeps_last_use(const FlatBuffer& flat) const {
    return flat.sums_uses() && policy(flat) == ReductionPolicy::boundary;
  }
  /// True when some of the unit's parameters must be gathered before they can be used.
  bool gathers(const UnitState& unit) const;
  /// True when the main gradient takes step memory and has no buffer of its own: the step has one
  /// micro-batch, and the gradient leaves the device as soon as it is reduced.
  bool transient_gradients(const FlatBuffer& flat) const {
    return !keeps_last_use(flat) && flat.optimizer_tier != OffloadTier::none &&
           config_.accumulation_steps == 1;
  }
  /// True when some state of the buffer, or of the unit, is not on the device.
  bool offloaded(const FlatBuffer& flat) const {
    return flat.optimizer_tier != OffloadTier::none || flat.parameters_tier != OffloadTier::none;
  }
  bool offloaded(const UnitState& unit) const;
  /// True when training uses weights that were rounded to int8 blocks. Frozen weights stay exact, because
  /// they have no master weights.
  bool quantizes(const FlatBuffer& flat) const { return config_.quantized_weights && flat.trainable; }
  /// True when its gradients are sent as int8 blocks. Gradients that are added by use are rounded to the
  /// communication dtype instead, on every mesh, because blocks of a sum differ from the sum of blocks.
  bool quantizes_gradients(const FlatBuffer& flat) const {
    return config_.quantized_gradients && !flat.adds_by_use();
  }
  /// True when the parameters lie in the same memory as the optimizer state, and have the values that updates
  /// start from (not those of int8 blocks).
  bool parameters_beside_state(const FlatBuffer& flat) const {
    return !flat.in_tiles() && flat.optimizer_tier == flat.parameters_tier &&
           !(quantizes(flat) && whole_parameters(flat));
  }
  /// Dtype of the master weights of a trainable buffer; uint16 for the lower halves of fp32 numbers, whose
  /// upper halves are the parameters.
  DataType master_type(const FlatBuffer& flat) const;
  /// True when master weights that are not on nvme have a buffer of their own, because the parameters have
  /// other values or lie elsewhere.
  bool separate_master(const FlatBuffer& flat) const {
    return master_type(flat) != config_.precision.compute || !parameters_beside_state(flat);
  }
  /// Dtype of the master weights in checkpoints, which hold whole numbers in place of halves.
  DataType saved_master_type() const {
    return config_.precision.master == MasterFormat::none ? DataType::bfloat16 : DataType::float32;
  }
  /// The rounding of updated values to weights.
  kernels::WeightRounding rounding() const;

  // The sizes and ranges below are 0 or empty for a buffer that this rank does not hold.
  /// Bytes of the weights that this rank keeps between gathers.
  std::int64_t parameter_bytes(const FlatBuffer& flat) const;
  /// Bytes of master weights and state of a trainable buffer that is in tiles.
  std::int64_t tile_bytes(const FlatBuffer& flat) const;
  /// The elements of a tile; offloaded state is updated tile by tile.
  std::int64_t tile_elements() const { return config_.offload.tile_elements; }
  /// Range of the flat buffer whose optimizer state this rank keeps.
  ElementRange optimizer_range(const FlatBuffer& flat) const;
  /// Range of the flat buffer whose main gradient this rank keeps, wherever it lies.
  ElementRange gradients_range(const FlatBuffer& flat) const;
  /// Range of the flat buffer whose parameters this rank keeps between gathers.
  ElementRange parameters_range(const FlatBuffer& flat) const;

  // Views of elements [range) in the memory that holds them, which is not on nvme.
  TensorView parameters(const FlatBuffer& flat, ElementRange range) const;
  TensorView gradients(const FlatBuffer& flat, ElementRange range) const;
  /// The main gradient in host memory, of a buffer whose optimizer state is off the device.
  TensorView host_gradients(const FlatBuffer& flat, ElementRange range) const;
  /// The master weights of a trainable buffer.
  TensorView master(const FlatBuffer& flat, ElementRange range) const;
  TensorView state(const FlatBuffer& flat, std::size_t which, ElementRange range) const;
  /// The master weights and optimizer state of a range, without a stream. If the master weights are lower
  /// halves, `weight` has the upper ones.
  ShardSlice slice(const FlatBuffer& flat, ElementRange range) const;

 private:
  /// Lets state that is requested on nvme stay in host memory as long as tranche.host_state has bytes, in the
  /// order of units: weights first, then optimizer state.
  void choose_homes(std::vector<UnitState>& units) const;

  const Config& config_;
};

}  // namespace tranche::detail
