#pragma once
/// Divides one dimension of a tensor among the ranks of the axis `tensor`. Integers only. A slice is a Box;
/// common_runs() visits its runs in the whole tensor.

#include <cstdint>

#include "partition/box.h"
#include "tranche/core/shape.h"

namespace tranche::detail {

/// The cut of a tensor: its dimension, which consists of `blocks` equal blocks. Each block is divided
/// separately, in multiples of `grain` elements.
struct TensorCut {
  int axis = -1;  ///< -1: every rank has the whole tensor
  int blocks = 1;
  std::int64_t grain = 1;
  bool whole() const { return axis < 0; }
  friend bool operator==(const TensorCut&, const TensorCut&) = default;
};

/// The number of grains in each block of the dimension. Throws InvalidArgument when the tensor has no such
/// dimension, or its extent does not consist of whole grains.
std::int64_t grains_of(const Shape& shape, const TensorCut& cut);
/// True when every one of `parts` ranks gets a part: there are at least as many grains as ranks, or an equal
/// number of neighbouring ranks can share each grain.
bool can_be_cut(std::int64_t grains, int parts);
/// The number of neighbouring ranks with the same part: parts / grains if there are fewer grains than ranks,
/// else 1.
int sharers(std::int64_t grains, int parts);
/// Grains [grains * part / parts, grains * (part + 1) / parts), or one grain if that is empty; the sizes of
/// parts may differ by one grain. Throws InvalidArgument for a part that does not exist, and when
/// can_be_cut() is false.
ElementRange grains_of_part(std::int64_t grains, int part, int parts);
/// The part of a tensor that rank `part` of `parts` has: all of it if the cut is whole or parts is 1. Throws
/// like the functions above.
Box slice_of(const Shape& shape, const TensorCut& cut, int part, int parts);
/// The shape of a box when it is stored as a tensor.
Shape shape_of(const Box& box);

}  // namespace tranche::detail
