#pragma once
/// Static packing: places buffers with known lifetimes in one block.

#include <cstdint>
#include <span>
#include <vector>

namespace tranche::detail {

/// A buffer that lives from instant `begin` up to but not including `end`. Instants are positions in the
/// sequence of acquires and releases.
struct PackingInterval {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t bytes = 0;
};

struct Packing {
  std::vector<std::int64_t> offsets;  ///< one per interval, multiples of memory_alignment
  std::int64_t bytes = 0;             ///< size of the block
  std::int64_t live_peak = 0;         ///< highest sum of live (aligned) bytes: the lower bound
};

/// Deterministic: a pure function of the intervals, independent of time and thread count. Tries several
/// greedy orders (size, area, start, lifetime) with best-fit placement, then repairs the best by local
/// search with a fixed budget of tries; aims at bytes <= 1.02 * live_peak.
/// Throws InvalidArgument on a negative size or an interval that ends before it begins.
Packing pack_intervals(std::span<const PackingInterval> intervals);

}  // namespace tranche::detail
