#pragma once
/// Checks of tranche.tensor_sums chain at the start. Private to engine/.

#include <span>

#include "partition/slices.h"
#include "tranche/config/config.h"
#include "tranche/device/device.h"
#include "tranche/engine/model_spec.h"

namespace tranche::detail {

/// Throws ConfigurationError where chains of sums would not have the bits of one rank: on a path of matrix
/// products that does not add up in ascending order, or adds several elements at once across which a tensor
/// is cut; and for a model that does not compute in chains. `ranks` are those of the axis `tensor`, `cuts`
/// those of the tensors in declared order. Nothing to check where the configuration asks for no chain.
void check_chains(const ModelSpec& model, const Config& config, std::span<const TensorCut> cuts, int ranks,
                  DeviceKind device);

}  // namespace tranche::detail
