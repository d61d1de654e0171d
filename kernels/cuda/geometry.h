#pragma once
/// The division of work over a grid of thread blocks. It is plain integer arithmetic without CUDA names, so
/// that any machine can test it. The number of multiprocessors affects only the grid, never a kernel's
/// result.

#include <algorithm>
#include <cstdint>
#include <initializer_list>

namespace tranche::kernels::cuda {

/// Elements [0, elements) as groups of `width` that start where every operand is aligned, and the remaining
/// edges before and after them. Width 1 means that no start suits all operands: every element is a group.
struct VectorRange {
  std::int64_t elements = 0;
  std::int64_t groups = 0;
  int width = 1;
  int head = 0;  ///< elements before the first group

  /// The number of elements outside of groups; less than 2 * width.
  constexpr int edges() const { return static_cast<int>(elements - groups * width); }
  constexpr std::int64_t edge(int i) const { return i < head ? i : groups * width + i; }
  constexpr std::int64_t first_of(std::int64_t group) const { return head + group * width; }
};

/// An operand's alignment requirement for a group's first element e: (offset + e * step) is a multiple of
/// `modulus`.
struct Demand {
  std::uint64_t offset = 0;
  std::int64_t step = 1;
  std::int64_t modulus = 1;
};

/// The requirement of `width` elements of `bytes` each at `data` that are accessed at once, with at most 16
/// bytes per access.
inline Demand demand_of(const void* data, std::int64_t bytes, int width) {
  return {reinterpret_cast<std::uintptr_t>(data), bytes, std::min<std::int64_t>(16, bytes * width)};
}

constexpr VectorRange vector_range(std::int64_t elements, int width, std::initializer_list<Demand> demands) {
  for (int head = 0; head < width && head + width <= elements; ++head) {
    const bool suits = std::all_of(demands.begin(), demands.end(), [head](const Demand& demand) {
      return (demand.offset + static_cast<std::uint64_t>(head * demand.step)) %
                 static_cast<std::uint64_t>(demand.modulus) ==
             0;
    });
    if (suits) return {elements, (elements - head) / width, width, head};
  }
  return {elements, elements, 1, 0};
}

/// The number of blocks in a grid whose blocks process `items_each` items at a time in a loop: as many as
/// there is work for, at most `waves` times the number that the device holds at once. 0 without items.
constexpr unsigned grid_blocks(std::int64_t items, std::int64_t items_each, int multiprocessors, int resident,
                               int waves = 4) {
  const std::int64_t wanted = (items + items_each - 1) / items_each;
  const std::int64_t most = std::int64_t{multiprocessors} * resident * waves;
  return static_cast<unsigned>(std::min(wanted, std::max<std::int64_t>(most, 1)));
}

/// A block of threads for [rows, groups of columns]: x runs over groups.
struct Tile {
  int x = 1;
  int y = 1;
};
/// `threads` is a power of two, at least 32. x is the least power of two that covers the groups, at most
/// `threads`.
constexpr Tile tile_of(std::int64_t groups, int threads) {
  int x = 1;
  while (x < threads && x < groups) x *= 2;
  return {x, threads / x};
}

/// The width of the groups of a row kernel: `width` when every row starts aligned, else 1.
constexpr int row_width(std::int64_t columns, int width, std::initializer_list<Demand> demands) {
  if (columns % width != 0) return 1;
  const VectorRange range = vector_range(std::max<std::int64_t>(columns, width), width, demands);
  return range.width == width && range.head == 0 ? width : 1;
}

}  // namespace tranche::kernels::cuda
