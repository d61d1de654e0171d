#pragma once
/// Boxes: the part of a tensor that a buffer holds, as a slice of each dimension. Integers only.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "partition/flat_layout.h"
#include "tranche/core/shape.h"

namespace tranche::detail {

/// Indices of one dimension, as HDF5's hyperslabs have them: `count` blocks of `block` indices each, from
/// `start` on, `stride` from one to the next.
struct Slice {
  std::int64_t start = 0;
  std::int64_t stride = 1;
  std::int64_t count = 1;
  std::int64_t block = 1;
  std::int64_t size() const { return count * block; }
  /// The index of the dimension that is number `i` of the slice.
  std::int64_t index(std::int64_t i) const { return start + i / block * stride + i % block; }
  friend bool operator==(const Slice&, const Slice&) = default;
};

/// A slice of each dimension; its elements are numbered in row-major order. A tensor without extents has one
/// box, without slices.
using Box = std::vector<Slice>;

/// All of a tensor.
Box whole_box(const Shape& shape);
std::int64_t elements_of(const Box& box);
/// "[0:4, 8:40 by 16 of 8]"
std::string to_string(const Box& box);
/// True when each slice is made of blocks that do not overlap and lies within its extent.
bool lies_within(const Box& box, const Shape& shape);
/// True when two boxes of one tensor have an element in common. Takes logarithmic time, whatever the counts.
bool meet(const Box& a, const Box& b);
/// True when a box of a tensor whose row-major elements come in blocks of so many, the last one being shorter
/// where they do not divide it, holds whole blocks alone.
bool holds_whole_blocks(const Box& box, const Shape& shape, std::int64_t block);

/// Elements that follow each other in two boxes of a tensor and in the tensor.
struct CommonRun {
  std::int64_t first = 0;   ///< number of the run's first element in the first box,
  std::int64_t second = 0;  ///< in the second,
  std::int64_t tensor = 0;  ///< in the tensor
  std::int64_t elements = 0;
};
/// Calls visit() for what both boxes hold of the first one's elements `within`, in ascending order. Takes
/// time by these elements, not by the boxes.
void common_runs(const Shape& shape, const Box& first, const Box& second, ElementRange within,
                 const std::function<void(const CommonRun&)>& visit);

/// The elements `range` of a box as boxes of the tensor, in their order.
std::vector<Box> boxes_of(const Box& box, ElementRange range);

}  // namespace tranche::detail
