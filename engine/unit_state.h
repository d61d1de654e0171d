#pragma once
/// The state of a rank for one unit. Private to engine/.

#include <memory>
#include <vector>

#include "offload/tile_ring.h"
#include "partition/flat_layout.h"
#include "tranche/device/replay.h"
#include "tranche/device/step_arena.h"
#include "tranche/engine/config.h"
#include "tranche/engine/model_spec.h"
#include "tranche/optim/optimizer.h"

namespace tranche {

/// One tensor of the model as the engine sees it.
struct TensorState {
  std::string name;
  std::vector<std::string> aliases;  ///< other names of the same elements
  Shape shape;
  Initializer initializer;
  std::uint64_t model_index = 0;  ///< position over all units; keys random numbers and digests
  int unit = 0;
  bool frozen = false;
  int flat_index = 0;  ///< position in the unit's trainable or frozen flat buffer
  GroupOptions group;
};

/// A flat buffer and the copies of it that the stage keeps on this rank. A unit has two: trainable tensors,
/// which have gradients and optimizer state, and frozen ones, which have neither.
struct FlatState {
  FlatState(std::span<const std::int64_t> sizes, int ranks) : layout(sizes, ranks) {}

  FlatLayout layout;
  std::vector<int> tensors;   ///< engine tensor index of each layout tensor
  Buffer parameters;          ///< compute dtype; the whole buffer (stages 0-2, one rank) or the shard
  Buffer master;              ///< fp32; empty when the weights themselves are fp32, and for frozen tensors
  Buffer gradients;           ///< G in the accumulation dtype; the whole buffer or the shard
  std::vector<Buffer> state;  ///< one per optimizer state tensor
  StepBuffer gathered;        ///< the whole buffer while gathered (stage 3)
  Event filled;               ///< last gather of the weights is done: `gathered` is filled (stage 3), full
                              ///< weights are current (stages 1-2), and no peer reads this rank's shard

  // Offloaded state. What is not on the device leaves the buffers above empty (nvme) or in host memory (cpu).
  OffloadTier optimizer_tier = OffloadTier::none;   ///< of master and state
  OffloadTier parameters_tier = OffloadTier::none;  ///< of parameters
  TileRegion tiles;                                 ///< nvme: master, then state
  std::int64_t parameters_offset = 0;               ///< nvme: of the shard in the swap file
  Buffer host_gradients;      ///< G of the range whose state this rank keeps, once it has been sent home
  StepBuffer lent_gradients;  ///< in place of `gradients` where one micro-batch makes the step
  Event gradients_home;       ///< host_gradients is filled, its statistics are taken
  void* gradients_data() const { return gradients ? gradients.data() : lent_gradients.data(); }
};

struct UnitState {
  UnitState(std::string unit_name, int uses, FlatState trainable_flat, FlatState frozen_flat)
      : name(std::move(unit_name)),
        uses_per_pass(uses),
        trainable(std::move(trainable_flat)),
        frozen(std::move(frozen_flat)) {}

  std::string name;
  int uses_per_pass;
  FlatState trainable;
  FlatState frozen;
  std::vector<int> tensors;  ///< engine tensor indices in UnitSpec order

  // Parameters.
  bool resident = false;           ///< gathered, or being gathered (stage 3)
  int holders = 0;                 ///< live GatheredUnit handles
  Event shard_ready;               ///< this rank's shard holds the newest weights
  std::unique_ptr<Replay> update;  ///< the optimizer's work, the same in every step

  // Gradients of the open micro-batch and step.
  int uses_begun = 0;
  int uses_submitted = 0;
  bool handle_open = false;
  bool accumulated = false;     ///< G or the local accumulator already holds something of this step
  StepBuffer gradient_slot;     ///< fp32; empty where the accumulator itself is the slot
  std::vector<char> unwritten;  ///< by trainable tensor: nothing was added and nothing cleared yet
  std::vector<StepBuffer> frozen_scratch;  ///< by tensor of the unit; gradients nobody keeps
  Event reduced;                           ///< G is complete as far as it was launched

  std::int64_t gathered_elements() const {
    return trainable.layout.padded_elements() + frozen.layout.padded_elements();
  }
};

}  // namespace tranche
