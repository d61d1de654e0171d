#include "tranche/optim/optimizer.h"

#include <fmt/core.h>

#include <algorithm>

#include "optim/segments.h"
#include "tranche/core/error.h"

namespace tranche {

void Optimizer::check_group(const GroupOptions& group) const {
  const char* own = group.learning_rate  ? "learning_rate"
                    : group.weight_decay ? "weight_decay"
                    : group.betas        ? "betas"
                    : group.epsilon      ? "eps"
                                         : nullptr;
  if (own == nullptr) return;
  throw InvalidArgument(fmt::format(
      "{}: it does not say that it honours a parameter group's own {}; override Optimizer::check_group()",
      name(), own));
}

bool Optimizer::apply_segments(Stream& stream, const OptimizerStep& step, const ShardView& stretch,
                               std::span<const OptimizerSegment> segments) const {
  check_segments(name(), stretch.master.elements(), segments);
  ShardView piece;
  for (const OptimizerSegment& segment : segments) {
    piece.gradient = stretch.gradient.slice(segment.first, segment.count);
    piece.master = stretch.master.slice(segment.first, segment.count);
    piece.state.clear();
    for (const TensorView& state : stretch.state) {
      piece.state.push_back(state.slice(segment.first, segment.count));
    }
    piece.weight = stretch.weight.data == nullptr ? TensorView{nullptr, stretch.weight.dtype, {segment.count}}
                                                  : stretch.weight.slice(segment.first, segment.count);
    piece.group = segment.group;
    piece.tensor = segment.tensor;
    piece.first_element = segment.first_element;
    piece.tensor_elements = segment.tensor_elements;
    apply(stream, step, piece, segment.reduced);
  }
  return false;
}

void check_segments(std::string_view optimizer, std::int64_t elements,
                    std::span<const OptimizerSegment> segments) {
  std::int64_t end = 0;
  for (const OptimizerSegment& segment : segments) {
    if (segment.first < end || segment.count < 0 || segment.count > elements - segment.first) {
      throw InvalidArgument(fmt::format(
          "{}: the segment of tensor '{}' from element {} with {} elements does not lie between element {}, "
          "where the one before it ends, and {}, the end of the stretch; pass segments in ascending order",
          optimizer, segment.tensor, segment.first, segment.count, end, elements));
    }
    end = segment.first + segment.count;
  }
}

GroupedSegments grouped(std::span<const OptimizerSegment> segments) {
  GroupedSegments result;
  result.segments.reserve(segments.size());
  for (const OptimizerSegment& segment : segments) {
    // Models have a handful of groups, so a search beats a table; mostly it is the group of the last segment.
    std::size_t group = result.segments.empty() ? 0 : static_cast<std::size_t>(result.segments.back().group);
    if (group >= result.groups.size() || !(result.groups[group] == segment.group)) {
      const auto found = std::find(result.groups.begin(), result.groups.end(), segment.group);
      group = static_cast<std::size_t>(found - result.groups.begin());
      if (found == result.groups.end()) result.groups.push_back(segment.group);
    }
    result.segments.push_back({segment.first, segment.count, static_cast<int>(group)});
  }
  return result;
}

}  // namespace tranche
