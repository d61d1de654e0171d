#pragma once
/// Optimizer::apply_segments' list for rules that have a kernel for whole ranges. Internal.

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "tranche/kernels/optimizer_update.h"
#include "tranche/optim/optimizer.h"

namespace tranche {

/// Throws InvalidArgument naming the first segment that is out of order or leaves a stretch of `elements`.
void check_segments(std::string_view optimizer, std::int64_t elements,
                    std::span<const OptimizerSegment> segments);

/// Segments that name their group by its place in a list without repetitions.
struct GroupedSegments {
  std::vector<GroupOptions> groups;
  std::vector<kernels::UpdateSegment> segments;
};
GroupedSegments grouped(std::span<const OptimizerSegment> segments);

}  // namespace tranche
