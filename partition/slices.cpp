#include "partition/slices.h"

#include <algorithm>
#include <string>
#include <vector>

#include "tranche/core/error.h"

namespace tranche::detail {

std::int64_t grains_of(const Shape& shape, const TensorCut& cut) {
  if (cut.axis < 0 || cut.axis >= shape.rank()) {
    throw InvalidArgument("a tensor of shape " + shape.to_string() + " has no dimension " +
                          std::to_string(cut.axis) + " to cut");
  }
  const std::int64_t extent = shape[cut.axis];
  if (cut.blocks < 1 || cut.grain < 1 || extent % cut.blocks != 0 || extent / cut.blocks % cut.grain != 0) {
    throw InvalidArgument("dimension " + std::to_string(cut.axis) + " of shape " + shape.to_string() +
                          " is not " + std::to_string(cut.blocks) + " blocks of whole grains of " +
                          std::to_string(cut.grain) + " elements");
  }
  return extent / cut.blocks / cut.grain;
}

bool can_be_cut(std::int64_t grains, int parts) {
  return grains >= parts || (grains > 0 && parts % grains == 0);
}

int sharers(std::int64_t grains, int parts) {
  return grains >= parts ? 1 : static_cast<int>(parts / grains);
}

ElementRange grains_of_part(std::int64_t grains, int part, int parts) {
  if (part < 0 || part >= parts || !can_be_cut(grains, parts)) {
    throw InvalidArgument("part " + std::to_string(part) + " of " + std::to_string(grains) + " grains over " +
                          std::to_string(parts) + " ranks");
  }
  const std::int64_t begin = grains * part / parts;
  return {begin, std::max(begin + 1, grains * (part + 1) / parts)};
}

Box slice_of(const Shape& shape, const TensorCut& cut, int part, int parts) {
  Box box = whole_box(shape);
  if (cut.whole() || parts == 1) return box;
  const ElementRange grains = grains_of_part(grains_of(shape, cut), part, parts);
  const std::int64_t block = grains.size() * cut.grain;
  box[static_cast<std::size_t>(cut.axis)] = {
      grains.begin * cut.grain, cut.blocks == 1 ? block : shape[cut.axis] / cut.blocks, cut.blocks, block};
  return box;
}

Shape shape_of(const Box& box) {
  std::vector<std::int64_t> extents;
  for (const Slice& slice : box) extents.push_back(slice.size());
  return Shape(extents);
}

}  // namespace tranche::detail
