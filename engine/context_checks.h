#pragma once
/// Checks whether the ranks of the axis `context` can divide the model's work. Private to engine/.

#include "tranche/config/config.h"
#include "tranche/engine/model_spec.h"
#include "tranche/partition/mesh.h"

namespace tranche::detail {

/// Throws ConfigurationError for a model, samples or heads that ranks of the axis `context` cannot divide.
void check_context(const ModelSpec& model, const Config& config, const Mesh& mesh);

}  // namespace tranche::detail
