#pragma once
/// How the ranks of the axis `tensor` cut one dimension of a tensor. Integers only; a slice is a Box, whose
/// runs in the whole tensor common_runs() visits.

#include <cstdint>

#include "partition/box.h"
#include "tranche/core/shape.h"

namespace tranche::detail {

/// The dimension of a tensor that is cut, in `blocks` equal blocks side by side, each of which is cut by
/// itself in whole grains of `grain` elements.
struct TensorCut {
  int axis = -1;  ///< -1: every rank has the whole tensor
  int blocks = 1;
  std::int64_t grain = 1;
  bool whole() const { return axis < 0; }
  friend bool operator==(const TensorCut&, const TensorCut&) = default;
};

/// Grains in each block of the dimension that is cut. Throws InvalidArgument when the tensor has no such
/// dimension, or its extent does not consist of whole grains.
std::int64_t grains_of(const Shape& shape, const TensorCut& cut);
/// True when every one of `parts` ranks gets a part: there are as many grains or more, or the same number of
/// neighbouring ranks shares each grain.
bool can_be_cut(std::int64_t grains, int parts);
/// Neighbouring ranks that have the same part: parts / grains where there are fewer grains than ranks, else
/// 1.
int sharers(std::int64_t grains, int parts);
/// Grains [grains * part / parts, grains * (part + 1) / parts), and at least one: parts may differ by one
/// grain. Throws InvalidArgument for a part that does not exist, and when can_be_cut() is false.
ElementRange grains_of_part(std::int64_t grains, int part, int parts);
/// The part of a tensor that rank `part` of `parts` has: all of it where the cut is whole or parts is 1.
/// Throws as the functions above do.
Box slice_of(const Shape& shape, const TensorCut& cut, int part, int parts);
/// The shape of a box as a tensor of its own.
Shape shape_of(const Box& box);

}  // namespace tranche::detail
