#pragma once
/// UpdateRange for rules whose arithmetic is a kernel of kernels/optimizer_update.h. Internal.

#include <span>
#include <string_view>
#include <vector>

#include "tranche/kernels/optimizer_update.h"
#include "tranche/optim/optimizer.h"

namespace tranche::detail {

std::vector<kernels::UpdateSegment> kernel_segments(std::span<const TensorSegment> segments);

template <class Arguments>
kernels::GroupArguments<Arguments> group_arguments(const UpdateRange& range) {
  return {reinterpret_cast<const Arguments*>(range.numbers), range.groups, range.numbers_stride};
}

/// Throws InvalidArgument unless the range comes with as many state tensors as the rule has.
void check_states(std::string_view optimizer, const UpdateRange& range, std::size_t wanted);

}  // namespace tranche::detail
