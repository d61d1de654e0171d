#pragma once
/// A thread's part of an optimizer's pass, and the constants of its memory accesses. Internal to
/// optimizer_update.cpp.

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/reduction.h"
#include "tranche/core/random.h"
#include "tranche/kernels/optimizer_update.h"

namespace tranche::kernels::cpu {

/// Ranges of at least this many elements write their weights with non-temporal stores: such a range moves so
/// much data (28 bytes an element, 7 MiB) that its first weights are evicted from the caches before the last
/// are written.
inline constexpr std::int64_t streaming_elements = 262144;

/// The number of elements that are widened, updated and rounded together, in the core's own cache.
inline constexpr std::int64_t block_elements = 512;

struct UpdatePart {
  const UpdateRule* rule = nullptr;
  RulePhase phase = RulePhase::update;
  const RuleOperands* operands = nullptr;
  const UpdateSegment* segment = nullptr;
  RandomKey rounding_stream;             ///< of the segment's tensor, with stochastic rounding
  const std::byte* arguments = nullptr;  ///< of the segment's group
  float ratio = 1;
  std::int64_t ahead = 0;  ///< UpdateTuning::prefetch_bytes
  mutable RunningSquares sums[2];
};

}  // namespace tranche::kernels::cpu
