#pragma once
/// Chooses the units that are offloaded if only a share of the optimizer's state is. Private to engine/.

#include <cstdint>
#include <span>
#include <vector>

namespace tranche::detail {

/// `padded_elements`: those of each unit's trainable flat buffer, in forward order; `ratio`: the share to
/// offload, 0 to 1. Only whole units are offloaded, so that at least `ratio` is. The units at the beginning
/// of a forward pass stay on the device, because their gradients are computed last and their weights are
/// needed first.
std::vector<bool> units_that_move(std::span<const std::int64_t> padded_elements, double ratio);

}  // namespace tranche::detail
