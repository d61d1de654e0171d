#pragma once
/// The tensors of a model in flat buffers. Private to engine/.

#include <vector>

#include "engine/flat_buffer.h"
#include "tranche/optim/parameter_groups.h"

namespace tranche::detail {

struct StateLayout {
  std::vector<TensorState> tensors;
  std::vector<UnitState> units;
  std::vector<OptimizerStateTensor> state_tensors;  ///< of every trainable tensor
};

/// Two flat buffers for each unit, trainable and frozen (empty where there are no such tensors), sharded over
/// `group`; `replicas` (null: none) hold the same shards. Throws ConfigurationError for a pattern that
/// matches no tensor, a model without units or without trainable tensors, settings of a parameter group that
/// the optimizer cannot honour, and optimizer state that differs from tensor to tensor.
StateLayout lay_out(const ModelSpec& model, const ParameterGroups& groups, const Optimizer& optimizer,
                    Communicator& group, Communicator* replicas = nullptr);

}  // namespace tranche::detail
