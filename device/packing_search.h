#pragma once
/// The search used by packing.h; internal to device/.

#include <cstdint>
#include <vector>

namespace tranche::detail {

/// An interval with bytes > 0 (aligned) and end > begin.
struct PackingItem {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t bytes = 0;
};

struct PackingAttempt {
  std::vector<std::int64_t> offsets;
  std::int64_t bytes = 0;
};

/// Renumbers instants without changing which items overlap: all acquires between two releases become one
/// instant.
void normalize_times(std::vector<PackingItem>& items);

/// The highest sum of live bytes.
std::int64_t packing_live_peak(const std::vector<PackingItem>& items);

/// Packs one indivisible part. It may use `share` in (0, 1] of the whole budget, which is counted in
/// comparisons, never in time.
PackingAttempt search_packing(const std::vector<PackingItem>& items, double share);

}  // namespace tranche::detail
