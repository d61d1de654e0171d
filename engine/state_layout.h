#pragma once
/// Assigns the tensors of a model to flat buffers. Private to engine/.

#include <functional>
#include <vector>

#include "engine/flat_buffer.h"
#include "engine/stages.h"
#include "partition/placement.h"
#include "tranche/optim/parameter_groups.h"

namespace tranche::detail {

/// Trainable tensors with the same optimizer states and the same kind of update.
struct StateClass {
  std::vector<OptimizerStateTensor> states;
  bool whole_matrices = false;
  friend bool operator==(const StateClass&, const StateClass&) = default;
};

/// The classes of a model's trainable tensors, in order of first appearance.
struct StateClasses {
  std::vector<StateClass> classes;
  std::vector<int> of_tensor;  ///< by tensor, in declared order; -1: frozen
};

/// Throws ConfigurationError for settings of a parameter group that the optimizer does not support.
StateClasses classify(const ModelSpec& model, const ParameterGroups& groups, const Optimizer& optimizer);

/// Places the model's tensors on `mesh`. Tensors have the numbers of StateLayout::tensors.
Placement place(const ModelSpec& model, const StateClasses& classes, const Mesh& mesh,
                const Stages& stages = {});
/// The same for a configuration that sets the rule, the groups and the mesh, with `ranks` ranks. A planner
/// uses it to predict an engine's placement. `model` must include its adapters. Throws like classify() and
/// Mesh::parse().
Placement place(const ModelSpec& model, const Config& config, int ranks);

struct StateLayout {
  Placement placement;
  std::vector<TensorState> tensors;
  std::vector<UnitState> units;
  std::vector<StateClass> state_classes;
};

/// This rank's communicators of a buffer's group and of its replicas (null: none); if the group is null, the
/// rank does not hold the buffer. They must outlive the layout.
struct BufferRanks {
  Communicator* group = nullptr;
  Communicator* replicas = nullptr;
};
using RanksOfBuffer = std::function<BufferRanks(const Placement& placement, int buffer)>;

/// The model's tensors and their flat buffers on `rank` of the mesh, each sharded over the ranks from
/// `ranks_of`. Throws ConfigurationError for a pattern that matches no tensor, a model without units or
/// without trainable tensors, settings of a parameter group that the optimizer does not support, and more
/// state classes than a checkpoint's format allows.
StateLayout lay_out(const ModelSpec& model, const ParameterGroups& groups, const Optimizer& optimizer,
                    const Mesh& mesh, const Stages& stages, int rank, const RanksOfBuffer& ranks_of);
/// The same with all buffers sharded over `group`, the ranks of the mesh axis `shard`; `replicas` hold the
/// same shards.
StateLayout lay_out(const ModelSpec& model, const ParameterGroups& groups, const Optimizer& optimizer,
                    const Mesh& mesh, Communicator& group, Communicator* replicas = nullptr);

}  // namespace tranche::detail
