#pragma once
/// Flat buffers, and a model's units, which consist of them: the state that a rank keeps. The note in
/// partition/placement.h explains the choice of a buffer's group. Private to engine/.

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

/// Bytes of `elements` elements (whole blocks) in all states.
inline std::int64_t state_bytes(std::span<const OptimizerStateTensor> states, std::int64_t elements) {
  std::int64_t bytes = 0;
  for (const OptimizerStateTensor& state : states) bytes += bytes_of(state.dtype, elements);
  return bytes;
}

/// One tensor of the model with its location.
struct TensorState {
  std::string name;
  std::vector<std::string> aliases;  ///< other names of the same elements
  Shape shape;                       ///< of the whole tensor
  Shape local;                       ///< the shape of this rank's part of the buffer
  Box box = {};                      ///< that part, if the axis `tensor` cuts the tensor; otherwise empty
  Initializer initializer;
  std::uint64_t model_index = 0;  ///< position over all units; keys random numbers and digests
  int unit = 0;
  int buffer = 0;      ///< position of its flat buffer in UnitState::buffers
  int flat_index = 0;  ///< position in that buffer's layout
  bool frozen = false;
  GroupOptions group;
  int matrices = 0;  ///< as in TrainableTensor
  bool outputs_first = false;
  bool cut() const { return !box.empty(); }
};

/// Elements that are contiguous both in this rank's part of a tensor and in the whole tensor.
struct TensorRun {
  std::int64_t local = 0;   ///< index of the first one in the part
  std::int64_t global = 0;  ///< index of the first one in the whole tensor
  std::int64_t elements = 0;
};
/// Calls visit() for the runs of elements `range` of the part, in ascending order.
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

/// The properties of a tensor that optimizers use.
inline TrainableTensor trainable_tensor(const TensorState& tensor) {
  return {tensor.name, tensor.shape, tensor.group, tensor.matrices, tensor.outputs_first};
}

/// Tensors of one unit of which one group of ranks holds equal values, stored contiguously and sharded over
/// that group, with the copies that this rank keeps. Trainable tensors, which have gradients and optimizer
/// state, and frozen ones, which have neither, are in different buffers. So are trainable tensors with
/// different optimizer states.
struct FlatBuffer {
  /// The buffer is sharded over `of_group`, whose ranks contribute gradients to the tensors; `other_replicas`
  /// (null: none) hold the same shard as this rank. Both must outlive the buffer. `of_layout` is for as many
  /// ranks. If the group is null, this rank does not hold the buffer: it is empty here, and only its layout
  /// on other ranks is known.
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

  std::string name;  ///< the unit's name; " frozen" is appended for frozen tensors, and the name of the first
                     ///< state from the second class of states on
  bool trainable;
  bool whole_matrices = false;  ///< one rank computes each of its tensors as a whole
  bool persistent = false;      ///< so small that stage 3 keeps its parameters whole on the device
  int trainable_index = -1;     ///< position among the trainable buffers of all units
  Communicator* group;          ///< null: this rank does not hold the buffer
  Communicator* replicas;       ///< ranks with the same shard, including this one; null: only this one
  FlatLayout layout;
  std::vector<OptimizerStateTensor> states;  ///< of each tensor
  std::vector<int> tensors;                  ///< the engine's index of each tensor in the layout
  int stages = 1;                 ///< pipeline stages that share the buffer, each with its own gradient
  int sharers = 1;                ///< ranks of the axis `tensor` that share it, each with its own gradient
  std::int64_t largest_part = 0;  ///< the largest padded size of the buffer on any rank of `tensor`
  std::vector<int> uses;  ///< this rank's uses of the unit, if their gradients are kept separate; empty: they
                          ///< are added together

  Buffer parameters;  ///< compute dtype; the whole buffer or this rank's shard (Residency)
  Buffer master;  ///< master weights, or their lower halves; empty if the parameters are the master weights,
                  ///< and for frozen tensors
  Buffer gradients;           ///< the main gradient in the accumulation dtype; the whole buffer or the shard
  std::vector<Buffer> state;  ///< one for each of `states`

  // Offloaded state. The buffers above are empty for state on nvme, and in host memory for state on cpu.
  OffloadTier optimizer_tier = OffloadTier::none;   ///< tier of master and state
  OffloadTier parameters_tier = OffloadTier::none;  ///< tier of parameters
  // Requested on nvme, but kept in host memory (the tier cpu), where tranche.host_state has room.
  bool optimizer_stays = false, parameters_stay = false;
  TileRegion tiles;                    ///< nvme: tiles of master, then state
  std::int64_t parameters_offset = 0;  ///< nvme: offset of the shard in the swap file
  Buffer host_gradients;               ///< the main gradient of the range whose state this rank keeps
  /// Gradients of the buffer's last use, summed over micro-batches. It exists when the gradients of two uses
  /// are kept separate and are reduced once a step; `gradients` then holds those of the first use.
  Buffer last_use_gradients;
  StepBuffer transient_gradients;  ///< replaces `gradients` if a step has one micro-batch

  // How gradients are reduced and weights gathered (with_exchanges()).
  std::shared_ptr<GradientExchange> gradients_over;  ///< null for frozen tensors
  std::shared_ptr<WeightExchange> weights;

  // Events that order the work on the buffer.
  Event gather_done;  ///< the last gather of the weights is done: they are complete here, and no peer reads
                      ///< the shard
  Event shard_ready;  ///< this rank's shard holds the newest weights
  Event reduce_done;  ///< all launched reductions into the main gradient are done
  Event host_gradients_free;  ///< the disk no longer uses host_gradients, which were lent to it
  Event gradients_on_host;    ///< host_gradients is filled, and its statistics are computed

  /// True when this rank adds the gradients of several uses by use.
  bool sums_uses() const { return uses.size() > 1; }
  /// True when gradients of several uses are added by use, on this rank or over the stages that have them.
  bool adds_by_use() const { return sums_uses() || stages > 1; }
  /// The axis besides `shard` and `context` over which its group extends; `shard` if there is none.
  MeshAxis axis() const {
    return stages > 1 ? MeshAxis::pipeline : sharers > 1 ? MeshAxis::tensor : MeshAxis::shard;
  }
  /// The number of ranks of its group with different tokens: shard x context.
  int data_ranks() const { return layout.ranks() / givers_a_data_rank(); }
  /// The number of ranks with the same tokens, each contributing its own gradient.
  int givers_a_data_rank() const { return stages * sharers; }
  int rank() const { return group->rank(); }
  ElementRange shard() const { return empty() ? ElementRange() : layout.shard_range(rank()); }
  int replica_count() const { return replicas == nullptr ? 1 : replicas->size(); }
  int replica() const { return replicas == nullptr ? 0 : replicas->rank(); }
  /// Every element has one owner among the ranks of the group and their replicas, each of which owns an equal
  /// part of the buffer. The owner sums its part over the replicas, counts it in norms and digests, and
  /// stores it in checkpoints.
  int owners() const { return group->size() * replica_count(); }
  int owner() const { return rank() * replica_count() + replica(); }
  /// The part of the shard of rank `of_rank` that its replica `of_replica` owns.
  ElementRange owned_by(int of_rank, int of_replica) const {
    return owned_part(layout.shard_range(of_rank), of_replica, replica_count());
  }
  ElementRange owned() const { return empty() ? ElementRange() : owned_by(rank(), replica()); }
  /// True when this rank holds nothing of it: either it has no tensors, or only other ranks hold it.
  bool empty() const { return group == nullptr || layout.padded_elements() == 0; }
  /// Master and state have the layout of the nvme tier, and a save takes them tile by tile.
  bool in_tiles() const { return optimizer_tier == OffloadTier::nvme || optimizer_stays; }
  void* gradients_data() const { return gradients ? gradients.data() : transient_gradients.data(); }
};

/// A unit, which is gathered as a whole, and its flat buffers.
struct UnitState {
  std::string name;
  std::vector<int> uses = {0};  ///< in a micro-batch, on this rank; backward runs them in descending order
  int uses_in_model = 1;
  int uses_per_micro_batch() const { return static_cast<int>(uses.size()); }
  std::vector<int> tensors;  ///< engine tensor indices in UnitSpec order
  std::vector<FlatBuffer> buffers;

  /// Elements of its buffers that are gathered (not persistent), padding included.
  std::int64_t gathered_elements() const;
};

}  // namespace tranche::detail
