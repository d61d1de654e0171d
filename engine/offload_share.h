#pragma once
/// The choice of units that leave the device when only a share of the optimizer's state does.

#include <cstdint>
#include <span>
#include <vector>

namespace tranche::detail {

/// `padded_elements`: of each unit's trainable flat buffer, in forward order; `ratio`: the share that is
/// asked to move, 0 to 1. Whole units move, so that the share that does is `ratio` or above. The units that a
/// forward pass uses first stay: their gradients come last, and their weights are needed first.
std::vector<bool> units_that_move(std::span<const std::int64_t> padded_elements, double ratio);

}  // namespace tranche::detail
