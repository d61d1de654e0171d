#pragma once
/// Bytes that a step moves and holds.

#include <cstdint>

namespace tranche {

/// Bytes of the last step's data that were sent to other nodes: from this rank, and from all ranks of its
/// node, which are assumed to send equal amounts.
struct CrossingBytes {
  std::int64_t rank = 0, node = 0;
};

/// The packed memory of a step, all 0 until it has been recorded (two steps).
struct StepMemory {
  std::int64_t block = 0;      ///< bytes of the block that contains all its buffers
  std::int64_t live_peak = 0;  ///< the most bytes of a training step's buffers that are held at once
  std::int64_t packings = 0;   ///< plans made or extended so far, for all kinds of passes
};

}  // namespace tranche
