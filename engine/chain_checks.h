#pragma once
/// Checks of tranche.tensor_sums chain at the start. Private to engine/.

#include <span>

#include "partition/slices.h"
#include "tranche/config/config.h"
#include "tranche/device/device.h"
#include "tranche/engine/model_spec.h"

namespace tranche::detail {

/// Throws ConfigurationError if chained sums would differ in bits from one rank's: if matrix products use a
/// path that does not add in ascending order, or that adds several elements at once and a cut separates
/// these. It also throws for a model that does not support chains. `ranks` is the size of the axis `tensor`,
/// `cuts` has the tensors' cuts in declared order. Does nothing unless the configuration sets chain.
void check_chains(const ModelSpec& model, const Config& config, std::span<const TensorCut> cuts, int ranks,
                  DeviceKind device);

}  // namespace tranche::detail
