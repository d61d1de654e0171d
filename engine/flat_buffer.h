#pragma once
/// Flat buffers, and the units of a model that are made of them: the state that a rank keeps. Private to
/// engine/.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "offload/tile_ring.h"
#include "partition/placement.h"
#include "tranche/comm/communicator.h"
#include "tranche/config/config.h"
#include "tranche/device/replay.h"
#include "tranche/device/step_arena.h"
#include "tranche/engine/model_spec.h"
#include "tranche/optim/optimizer.h"
#include "tranche/partition/mesh.h"

namespace tranche::detail {

class GradientExchange;
class WeightExchange;

/// Bytes that so many elements (whole blocks) take in all states.
inline std::int64_t state_bytes(std::span<const OptimizerStateTensor> states, std::int64_t elements) {
  std::int64_t bytes = 0;
  for (const OptimizerStateTensor& state : states) bytes += bytes_of(state.dtype, elements);
  return bytes;
}

/// One tensor of the model as the engine sees it.
struct TensorState {
  std::string name;
  std::vector<std::string> aliases;  ///< other names of the same elements
  Shape shape;                       ///< of the whole tensor
  Shape local;                       ///< of what this rank's part of the buffer has of it
  Box box = {};                      ///< that part, where the axis `tensor` cuts the tensor; else empty
  Initializer initializer;
  std::uint64_t model_index = 0;  ///< position over all units; keys random numbers and digests
  int unit = 0;
  int buffer = 0;      ///< position of its flat buffer in UnitState::buffers
  int flat_index = 0;  ///< position in that buffer's layout
  bool frozen = false;
  GroupOptions group;
  int matrices = 0;  ///< as TrainableTensor has them
  bool outputs_first = false;
  bool cut() const { return !box.empty(); }
};

/// Elements of a tensor that follow each other both in the part that this rank has of it and in the whole
/// tensor.
struct TensorRun {
  std::int64_t local = 0;   ///< number of the first one in the part,
  std::int64_t global = 0;  ///< in the whole tensor
  std::int64_t elements = 0;
};
/// Calls visit() for elements `range` of the part, in ascending order.
template <typename Visit>
void for_each_run(const TensorState& tensor, ElementRange range, const Visit& visit) {
  if (range.empty()) return;
  if (!tensor.cut()) {
    visit(TensorRun{range.begin, range.begin, range.size()});
    return;
  }
  common_runs(tensor.shape, tensor.box, whole_box(tensor.shape), range, [&](const CommonRun& run) {
    visit(TensorRun{run.first, run.tensor, run.elements});
  });
}

/// A tensor as optimizers see it.
inline TrainableTensor trainable_tensor(const TensorState& tensor) {
  return {tensor.name, tensor.shape, tensor.group, tensor.matrices, tensor.outputs_first};
}

/// Tensors of one unit whose values one group of ranks holds in common, laid end to end and sharded over that
/// group; and the copies of them that this rank keeps. Trainable tensors, which have gradients and optimizer
/// state, and frozen ones, which have neither, are in different buffers, and so are trainable tensors of
/// which the optimizer keeps different states.
struct FlatBuffer {
  /// Sharded over `of_group`, whose ranks contribute gradients to the tensors; `other_replicas` (null: none)
  /// hold the same shard as this rank. Both outlive the buffer. `of_layout` is laid out over as many ranks.
  /// Without a group this rank does not hold the buffer: it is empty here, and knows only where it lies on
  /// others.
  FlatBuffer(std::string buffer_name, bool is_trainable, Communicator* of_group, Communicator* other_replicas,
             FlatLayout of_layout, std::vector<int> tensor_indices,
             std::vector<OptimizerStateTensor> of_states = {})
      : name(std::move(buffer_name)),
        trainable(is_trainable),
        group(of_group),
        replicas(other_replicas),
        layout(std::move(of_layout)),
        states(std::move(of_states)),
        tensors(std::move(tensor_indices)) {}

  std::string name;  ///< the unit's; with " frozen" for frozen tensors, and from the second class of states
                     ///< on with that of its first state
  bool trainable;
  bool whole_matrices = false;  ///< an owner computes each of its tensors whole
  bool persistent = false;      ///< so small that stage 3 keeps its parameters whole on the device
  int trainable_index = -1;     ///< position among the trainable buffers of all units
  Communicator* group;          ///< null: this rank does not hold the buffer
  Communicator* replicas;       ///< ranks with the same shard, this one among them; null: only this one
  FlatLayout layout;
  std::vector<OptimizerStateTensor> states;  ///< that the optimizer keeps of each tensor
  std::vector<int> tensors;                  ///< engine tensor index of each layout tensor
  int stages = 1;   ///< of a pipeline, that share the buffer: each contributes a gradient of its own
  int sharers = 1;  ///< ranks of the axis `tensor`, likewise
  std::int64_t largest_part = 0;  ///< padded elements of the buffer on the ranks of `tensor` that have most
  std::vector<int> uses;  ///< of the unit, on this rank, whose gradients are told apart; empty: together

  Buffer parameters;  ///< compute dtype; the whole buffer or this rank's shard, see Residency
  Buffer master;  ///< master weights, or their lower halves; empty when they are the weights, and for frozen
                  ///< tensors
  Buffer gradients;           ///< the main gradient in the accumulation dtype; the whole buffer or the shard
  std::vector<Buffer> state;  ///< one for each of `states`

  // Offloaded state. What is not on the device leaves the buffers above empty (nvme) or in host memory (cpu).
  OffloadTier optimizer_tier = OffloadTier::none;   ///< of master and state
  OffloadTier parameters_tier = OffloadTier::none;  ///< of parameters
  // Asked for on nvme, but in host memory (the tier cpu), where tranche.host_state has room.
  bool optimizer_stays = false, parameters_stay = false;
  TileRegion tiles;                    ///< nvme: master, then state
  std::int64_t parameters_offset = 0;  ///< nvme: of the shard in the swap file
  Buffer host_gradients;               ///< the main gradient of the range whose state this rank keeps
  /// Gradients of the buffer's last use, summed over micro-batches. It exists when the gradients of two uses
  /// are kept apart and are reduced once a step; `gradients` then holds those of the first use.
  Buffer last_use_gradients;
  StepBuffer transient_gradients;  ///< in place of `gradients` where one micro-batch makes the step

  // The way to and from other ranks (with_exchanges()).
  std::shared_ptr<GradientExchange> gradients_over;  ///< null for frozen tensors
  std::shared_ptr<WeightExchange> weights;

  // The order of work on the buffer.
  Event gather_done;  ///< the last gather of the weights: they are whole here, and no peer reads the shard
  Event shard_ready;  ///< this rank's shard holds the newest weights
  Event reduce_done;  ///< the main gradient is complete as far as its reduction was launched
  Event gradients_on_host;  ///< host_gradients is filled, its statistics are taken

  /// The gradients of several uses are added up by use on this rank.
  bool sums_uses() const { return uses.size() > 1; }
  /// The gradients of several uses are added up by use, on this rank or over the stages that have them.
  bool adds_by_use() const { return sums_uses() || stages > 1; }
  /// The axis beside `shard` and `context` over which its group is spread; `shard` if there is none.
  MeshAxis axis() const {
    return stages > 1 ? MeshAxis::pipeline : sharers > 1 ? MeshAxis::tensor : MeshAxis::shard;
  }
  /// Ranks of its group that see different tokens: shard x context.
  int data_ranks() const { return layout.ranks() / givers_a_data_rank(); }
  /// Ranks that see the same tokens and contribute gradients of their own.
  int givers_a_data_rank() const { return stages * sharers; }
  int rank() const { return group->rank(); }
  ElementRange shard() const { return empty() ? ElementRange() : layout.shard_range(rank()); }
  int replica_count() const { return replicas == nullptr ? 1 : replicas->size(); }
  int replica() const { return replicas == nullptr ? 0 : replicas->rank(); }
  /// Every element has one owner among the ranks of the group and their replicas, each of which owns an equal
  /// part of the buffer: it adds the part up over the replicas, counts it in norms and digests, and stores it
  /// in checkpoints.
  int owners() const { return group->size() * replica_count(); }
  int owner() const { return rank() * replica_count() + replica(); }
  /// The part of a rank's shard that it, or one of its replicas, owns.
  ElementRange owned_by(int of_rank, int of_replica) const {
    return owned_part(layout.shard_range(of_rank), of_replica, replica_count());
  }
  ElementRange owned() const { return empty() ? ElementRange() : owned_by(rank(), replica()); }
  /// True when this rank holds nothing of it: no rank does, as it has no tensors, or other ranks do.
  bool empty() const { return group == nullptr || layout.padded_elements() == 0; }
  /// Master and state have the layout of the nvme tier, and a save takes them tile by tile.
  bool in_tiles() const { return optimizer_tier == OffloadTier::nvme || optimizer_stays; }
  void* gradients_data() const { return gradients ? gradients.data() : transient_gradients.data(); }
};

/// A unit of gathering and its flat buffers.
struct UnitState {
  std::string name;
  std::vector<int> uses = {0};  ///< in a micro-batch, on this rank; backward takes them in descending order
  int uses_in_model = 1;
  int uses_per_micro_batch() const { return static_cast<int>(uses.size()); }
  std::vector<int> tensors;  ///< engine tensor indices in UnitSpec order
  std::vector<FlatBuffer> buffers;

  /// Elements of its whole buffers but the persistent ones, padding included.
  std::int64_t gathered_elements() const;
};

}  // namespace tranche::detail
