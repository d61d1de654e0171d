#pragma once
/// The tensors of a model in flat buffers. Private to engine/.

#include <functional>
#include <vector>

#include "engine/flat_buffer.h"
#include "engine/stages.h"
#include "partition/placement.h"
#include "tranche/optim/parameter_groups.h"

namespace tranche::detail {

/// Trainable tensors of which the optimizer keeps the same states, and that it updates in the same way.
struct StateClass {
  std::vector<OptimizerStateTensor> states;
  bool whole_matrices = false;
  friend bool operator==(const StateClass&, const StateClass&) = default;
};

/// The classes of a model's trainable tensors, in the order in which the model has them.
struct StateClasses {
  std::vector<StateClass> classes;
  std::vector<int> of_tensor;  ///< by tensor, in declared order; -1: frozen
};

/// Throws ConfigurationError for settings of a parameter group that the optimizer cannot honour.
StateClasses classify(const ModelSpec& model, const ParameterGroups& groups, const Optimizer& optimizer);

/// Places the model's tensors on `mesh`. Tensors have the numbers of StateLayout::tensors.
Placement place(const ModelSpec& model, const StateClasses& classes, const Mesh& mesh,
                const Stages& stages = {});
/// The same for a configuration that names the rule, the groups and the mesh, which is that of `ranks`. It
/// tells a planner what an engine of this configuration has. `model` has its adapters. Throws as classify()
/// and Mesh::parse() do.
Placement place(const ModelSpec& model, const Config& config, int ranks);

struct StateLayout {
  Placement placement;
  std::vector<TensorState> tensors;
  std::vector<UnitState> units;
  std::vector<StateClass> state_classes;
};

/// The communicators of a buffer's group and of its replicas (null: none), as this rank has them; without a
/// group the rank does not hold the buffer. They outlive the layout.
struct BufferRanks {
  Communicator* group = nullptr;
  Communicator* replicas = nullptr;
};
using RanksOfBuffer = std::function<BufferRanks(const Placement& placement, int buffer)>;

/// The model's tensors and their flat buffers as `rank` of the mesh has them, each sharded over the ranks
/// that `ranks_of` tells. Throws ConfigurationError for a pattern that matches no tensor, a model without
/// units or without trainable tensors, settings of a parameter group that the optimizer cannot honour, and
/// more state classes than a checkpoint can tell apart.
StateLayout lay_out(const ModelSpec& model, const ParameterGroups& groups, const Optimizer& optimizer,
                    const Mesh& mesh, const Stages& stages, int rank, const RanksOfBuffer& ranks_of);
/// The same where all buffers are sharded over `group`, the ranks of the mesh's axis `shard`, and `replicas`
/// hold the same shards.
StateLayout lay_out(const ModelSpec& model, const ParameterGroups& groups, const Optimizer& optimizer,
                    const Mesh& mesh, Communicator& group, Communicator* replicas = nullptr);

}  // namespace tranche::detail
