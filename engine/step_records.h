#pragma once
/// Internal: what a rank notes during a step, and what it tells the others at its end.

#include <cstdint>
#include <vector>

#include "tranche/device/event.h"

namespace tranche {

/// What each rank tells all others at the boundary, after the per-unit sums of squares.
struct BoundaryRecord {
  double loss_sum = 0;
  std::int64_t tokens = 0;
  std::int64_t non_finite_unit = -1;     ///< first unit with an infinity or NaN in this rank's share of G
  std::int64_t non_finite_element = -1;  ///< its position in the unit's flat buffer
  std::uint64_t sequence_hash = 0;
  std::int64_t save_at_rest = 1;  ///< 0: this rank's part of a save is being written
  std::int64_t stop_requested = 0;
};

/// The order in which units were asked for in one micro-batch of a program (training, evaluation), recorded
/// in the first one.
struct GatherOrder {
  std::vector<int> units;
  bool known = false;
  std::size_t position = 0;  ///< next expected request
};

/// The compute stream waited for a collective.
struct ExposedWait {
  Event arrived;  ///< where the compute stream began to wait; without a time of its own where work is inline
  double issued = 0;
  Event awaited;
  double* seconds = nullptr;
};

}  // namespace tranche
