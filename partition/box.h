#pragma once
/// Boxes: the part of a tensor that a buffer holds, as a slice of each dimension. They compute integers only.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "partition/flat_layout.h"
#include "tranche/core/shape.h"

namespace tranche::detail {

/// Indices of one dimension, in the form of HDF5's hyperslabs: `count` blocks of `block` indices each, the
/// first one at `start`, with `stride` from the begin of one to the begin of the next.
struct Slice {
  std::int64_t start = 0;
  std::int64_t stride = 1;
  std::int64_t count = 1;
  std::int64_t block = 1;
  std::int64_t size() const { return count * block; }
  /// The dimension's index at position `i` of the slice.
  std::int64_t index(std::int64_t i) const { return start + i / block * stride + i % block; }
  friend bool operator==(const Slice&, const Slice&) = default;
};

/// A slice of each dimension. Elements are numbered in row-major order. A tensor without dimensions has one
/// box, without slices.
using Box = std::vector<Slice>;

/// The box of the whole tensor.
Box whole_box(const Shape& shape);
std::int64_t elements_of(const Box& box);
/// "[0:4, 8:40 by 16 of 8]"
std::string to_string(const Box& box);
/// True when each slice consists of blocks that do not overlap and lie within its extent.
bool lies_within(const Box& box, const Shape& shape);
/// True when two boxes of one tensor have an element in common. Takes time logarithmic in the counts.
bool meet(const Box& a, const Box& b);
/// True when a box consists of whole blocks. The tensor's row-major elements are divided into blocks of
/// `block` elements; the last block may be shorter.
bool holds_whole_blocks(const Box& box, const Shape& shape, std::int64_t block);

/// Elements that are contiguous in two boxes of a tensor and in the tensor.
struct CommonRun {
  std::int64_t first = 0;   ///< number of the run's first element in the first box
  std::int64_t second = 0;  ///< in the second box
  std::int64_t tensor = 0;  ///< in the tensor
  std::int64_t elements = 0;
};
/// Calls visit() for the elements `within` of the first box that both boxes hold, in ascending order. The
/// time depends on the number of these elements, not on the boxes.
void common_runs(const Shape& shape, const Box& first, const Box& second, ElementRange within,
                 const std::function<void(const CommonRun&)>& visit);

/// The elements `range` of a box as boxes of the tensor, in order.
std::vector<Box> boxes_of(const Box& box, ElementRange range);

}  // namespace tranche::detail
