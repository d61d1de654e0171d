#include "tranche/optim/optimizer.h"

#include <fmt/core.h>

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

UpdateRange UpdateRange::part(const TensorSegment& segment) const {
  UpdateRange result;
  result.gradient = gradient.slice(segment.first, segment.count);
  result.master = master.slice(segment.first, segment.count);
  for (const TensorView& tensor : state) result.state.push_back(tensor.slice(segment.first, segment.count));
  result.weight = weight.data == nullptr ? TensorView{nullptr, weight.dtype, {segment.count}}
                                         : weight.slice(segment.first, segment.count);
  result.rounding = rounding;
  result.rounding_key = rounding_key;
  return result;
}

}  // namespace tranche
