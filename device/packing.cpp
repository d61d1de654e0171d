#include "tranche/device/packing.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "tranche/core/error.h"
#include "tranche/device/memory.h"

namespace tranche {
namespace {

void check(std::span<const PackingInterval> intervals) {
  for (std::size_t i = 0; i < intervals.size(); ++i) {
    const PackingInterval& interval = intervals[i];
    if (interval.bytes < 0) {
      throw InvalidArgument("packing interval " + std::to_string(i) + " has " +
                            std::to_string(interval.bytes) + " bytes");
    }
    if (interval.end < interval.begin) {
      throw InvalidArgument("packing interval " + std::to_string(i) + " ends at " +
                            std::to_string(interval.end) + ", before it begins at " +
                            std::to_string(interval.begin));
    }
  }
}

}  // namespace

Packing pack_intervals(std::span<const PackingInterval> intervals) {
  check(intervals);
  Packing result;
  result.offsets.assign(intervals.size(), 0);
  std::vector<std::size_t> order;
  std::vector<std::pair<std::int64_t, std::int64_t>> edges;
  for (std::size_t i = 0; i < intervals.size(); ++i) {
    if (intervals[i].bytes == 0 || intervals[i].begin == intervals[i].end) continue;
    order.push_back(i);
    edges.emplace_back(intervals[i].begin, aligned_bytes(intervals[i].bytes));
    edges.emplace_back(intervals[i].end, -aligned_bytes(intervals[i].bytes));
  }
  std::sort(edges.begin(), edges.end());
  std::int64_t live = 0;
  for (const auto& [time, bytes] : edges) {
    live += bytes;
    result.live_peak = std::max(result.live_peak, live);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return intervals[a].bytes > intervals[b].bytes; });
  std::vector<std::size_t> placed;  // by offset
  for (const std::size_t i : order) {
    const std::int64_t bytes = aligned_bytes(intervals[i].bytes);
    std::int64_t offset = 0;
    for (const std::size_t j : placed) {
      if (intervals[j].begin >= intervals[i].end || intervals[i].begin >= intervals[j].end) continue;
      if (result.offsets[j] >= offset + bytes) break;
      offset = std::max(offset, result.offsets[j] + aligned_bytes(intervals[j].bytes));
    }
    result.offsets[i] = offset;
    result.bytes = std::max(result.bytes, offset + bytes);
    placed.insert(
        std::upper_bound(placed.begin(), placed.end(), i,
                         [&](std::size_t a, std::size_t b) { return result.offsets[a] < result.offsets[b]; }),
        i);
  }
  return result;
}

}  // namespace tranche
