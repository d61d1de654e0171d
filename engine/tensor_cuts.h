#pragma once
/// Determines the dimension of each tensor that the mesh axis `tensor` cuts. Private to engine/.

#include <vector>

#include "partition/slices.h"
#include "tranche/config/config.h"
#include "tranche/engine/model_spec.h"

namespace tranche::detail {

/// The cut of each tensor, in declared order; empty for one rank. Throws ConfigurationError for a model
/// without cut dimensions (ModelSpec::tensor_dimensions, modified by Config::layout), a tensor with two such
/// dimensions, "heads" not divisible by the number of ranks, "key_value_heads" that are neither a multiple
/// nor a divisor of it, and any other dimension that is smaller than it. It also throws for a layout with a
/// dimension that no tensor has, or that the model cannot keep whole or cannot compute in parts. An unknown
/// name is refused for one rank too.
std::vector<TensorCut> tensor_cuts(const ModelSpec& model, const Config& config, int ranks);

}  // namespace tranche::detail
