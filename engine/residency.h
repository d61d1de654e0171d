#pragma once
/// The elements of a flat buffer's copies that a rank keeps by stage, reduction policy and offload settings,
/// and their places in its memory. Private to engine/.

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
  /// It outlives this.
  explicit Residency(const Config& config) : config_(config) {}

  const PrecisionConfig& precision() const { return config_.precision; }
  /// Decides where the state of buffers lives, in the order of units.
  void assign_tiers(std::vector<UnitState>& units) const;

  /// The gradients and the optimizer's state are sharded over the replicas of the buffer too, each of which
  /// keeps what it owns.
  bool over_replicas(const FlatBuffer& flat) const {
    return flat.replicas != nullptr && config_.stage > 0 && config_.replicate == Replicate::parameters;
  }
  /// The group's sums are accumulated in the shard, and added up over the replicas once a step.
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
  /// The main gradient has room for the whole buffer: it is the local accumulator, or stage 0 wants all of
  /// it.
  bool whole_gradients(const FlatBuffer& flat) const {
    return whole_optimizer(flat) || policy(flat) == ReductionPolicy::boundary;
  }
  /// Every rank gathers the whole main gradient once a step's is complete.
  bool gathers_gradients() const { return config_.stage == 0; }
  /// Kernels add straight into the persistent accumulator.
  bool direct_accumulation(const FlatBuffer& flat) const {
    return policy(flat) == ReductionPolicy::boundary && config_.precision.accumulation == DataType::float32;
  }
  /// The gradients of two uses are added up over micro-batches, each by itself.
  bool keeps_last_use(const FlatBuffer& flat) const {
    return flat.sums_uses() && policy(flat) == ReductionPolicy::boundary;
  }
  /// Some of the unit's parameters must be gathered before they can be used.
  bool gathers(const UnitState& unit) const;
  /// The main gradient takes memory of the step only: one micro-batch makes the step, and nothing needs it on
  /// the device behind that.
  bool transient_gradients(const FlatBuffer& flat) const {
    return !keeps_last_use(flat) && flat.optimizer_tier != OffloadTier::none &&
           config_.accumulation_steps == 1;
  }
  /// Anything of the buffer, or of the unit, lives off the device.
  bool offloaded(const FlatBuffer& flat) const {
    return flat.optimizer_tier != OffloadTier::none || flat.parameters_tier != OffloadTier::none;
  }
  bool offloaded(const UnitState& unit) const;
  /// Training reads the weights as int8 blocks say them. Frozen ones have no master weights, and stay exact.
  bool quantizes(const FlatBuffer& flat) const { return config_.quantized_weights && flat.trainable; }
  /// Its gradients travel as int8 blocks. Where they are added by use, each use's is rounded to the
  /// communication dtype instead, on every mesh: blocks of a sum would not be the sum of blocks.
  bool quantizes_gradients(const FlatBuffer& flat) const {
    return config_.quantized_gradients && !flat.adds_by_use();
  }
  /// The weights that updates start from lie where the parameters do, and are what training reads.
  bool parameters_beside_state(const FlatBuffer& flat) const {
    return !flat.in_tiles() && flat.optimizer_tier == flat.parameters_tier &&
           !(quantizes(flat) && whole_parameters(flat));
  }
  /// Dtype of the master weights of a trainable buffer; uint16 for the lower halves of fp32 numbers, whose
  /// upper halves are the parameters.
  DataType master_type(const FlatBuffer& flat) const;
  /// The master weights, where they are not on nvme, have memory of their own: the parameters hold other
  /// values, or lie elsewhere.
  bool separate_master(const FlatBuffer& flat) const {
    return master_type(flat) != config_.precision.compute || !parameters_beside_state(flat);
  }
  /// Dtype of the master weights in checkpoints, where halves are put together.
  DataType saved_master_type() const {
    return config_.precision.master == MasterFormat::none ? DataType::bfloat16 : DataType::float32;
  }
  /// How new values are rounded to weights.
  kernels::WeightRounding rounding() const;

  // These are empty for a buffer that this rank does not hold.
  /// Bytes of the weights that this rank keeps between gathers.
  std::int64_t parameter_bytes(const FlatBuffer& flat) const;
  /// Bytes of master weights and state of a trainable buffer that is in tiles.
  std::int64_t tile_bytes(const FlatBuffer& flat) const;
  /// Elements that are updated at a time, of state that is not on the device.
  std::int64_t tile_elements() const { return config_.offload.tile_elements; }
  /// Range of the flat buffer whose optimizer state this rank keeps.
  ElementRange optimizer_range(const FlatBuffer& flat) const;
  /// Range of the flat buffer whose main gradient this rank keeps, wherever it lies.
  ElementRange gradients_range(const FlatBuffer& flat) const;
  /// Range of the flat buffer whose parameters this rank keeps between gathers.
  ElementRange parameters_range(const FlatBuffer& flat) const;

  // Elements [range) of a flat buffer in the memory that keeps them, which is not on nvme.
  TensorView parameters(const FlatBuffer& flat, ElementRange range) const;
  TensorView gradients(const FlatBuffer& flat, ElementRange range) const;
  /// The main gradient in host memory, of a buffer whose optimizer state is off the device.
  TensorView host_gradients(const FlatBuffer& flat, ElementRange range) const;
  /// The master weights of a trainable buffer.
  TensorView master(const FlatBuffer& flat, ElementRange range) const;
  TensorView state(const FlatBuffer& flat, std::size_t which, ElementRange range) const;
  /// Master weights, with upper halves if they are lower ones, and state; without a stream.
  ShardSlice slice(const FlatBuffer& flat, ElementRange range) const;

 private:
  /// Keeps state in host memory that is asked for on nvme, in the order of units, while bytes last.
  void choose_homes(std::vector<UnitState>& units) const;

  const Config& config_;
};

}  // namespace tranche::detail
