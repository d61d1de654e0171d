#include "comm/deterministic_sum.h"

namespace tranche::comm {

void deterministic_sum(Stream& stream, std::span<const void* const> pieces, DataType dtype,
                       const ReductionOptions& options, const TensorView& out, kernels::SumTarget target) {
  const DataType to = options.round_to.value_or(dtype);
  if (dtype != to) {
    kernels::rounded_sum(stream, {pieces[0], dtype, out.shape}, to, options.accumulate, out);
  } else if (pieces.size() > 1 || pieces[0] != out.data || dtype != out.dtype || options.accumulate) {
    kernels::ordered_sum(stream, pieces, dtype, {options.group_size, options.outer_group}, options.accumulate,
                         out, target);
  }
}

}  // namespace tranche::comm
