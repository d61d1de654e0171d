#pragma once
/// Which dimension of each tensor the axis `tensor` of a mesh cuts. Private to engine/.

#include <vector>

#include "partition/slices.h"
#include "tranche/config/config.h"
#include "tranche/engine/model_spec.h"

namespace tranche::detail {

/// The cut of each tensor, in declared order; empty for one rank. Throws ConfigurationError for a model that
/// names no dimension that is cut (ModelSpec::tensor_dimensions, as Config::layout changes them), a tensor
/// with two such dimensions, "heads" that do not divide among the ranks, "key_value_heads" that neither
/// divide nor are divided by their number, and any other dimension that is smaller than their number; and for
/// a layout that names a dimension which no tensor has, or which the model cannot leave whole or cannot
/// compute in parts. A name that no tensor has is refused for one rank too.
std::vector<TensorCut> tensor_cuts(const ModelSpec& model, const Config& config, int ranks);

}  // namespace tranche::detail
