#pragma once
/// The tensors of a model in flat buffers. Private to engine/.

#include <vector>

#include "engine/flat_buffer.h"
#include "tranche/optim/parameter_groups.h"

namespace tranche::detail {

/// Trainable tensors of which the optimizer keeps the same states, and that it updates in the same way.
struct StateClass {
  std::vector<OptimizerStateTensor> states;
  bool whole_matrices = false;
  friend bool operator==(const StateClass&, const StateClass&) = default;
};

struct StateLayout {
  std::vector<TensorState> tensors;
  std::vector<UnitState> units;
  std::vector<StateClass> state_classes;  ///< of trainable tensors, in the order in which the model has them
};

/// For each unit a flat buffer of each state class, and one of frozen tensors (empty where there are no such
/// tensors), sharded over `group`; `replicas` (null: none) hold the same shards. Throws ConfigurationError
/// for a pattern that matches no tensor, a model without units or without trainable tensors, settings of a
/// parameter group that the optimizer cannot honour, and more state classes than a checkpoint can tell apart.
StateLayout lay_out(const ModelSpec& model, const ParameterGroups& groups, const Optimizer& optimizer,
                    Communicator& group, Communicator* replicas = nullptr);

}  // namespace tranche::detail
