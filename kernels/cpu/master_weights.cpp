#include "kernels/cpu/master_weights.h"

#include "core/split_float.h"
#include "kernels/cpu/parallel.h"

namespace tranche::kernels::cpu {

void split_halves(int threads, const ConstTensorView& values, const TensorView& high, const TensorView& low) {
  const auto* from = values.as<float>();
  auto* upper = high.as<bfloat16>();
  auto* lower = static_cast<std::uint16_t*>(low.data);  // null: not written
  parallel_ranges(threads, values.elements(), parallel_grain, [&](std::int64_t first, std::int64_t count) {
    for (std::int64_t i = first; i < first + count; ++i) upper[i] = detail::split_float(from[i]).high;
    if (lower == nullptr) return;
    for (std::int64_t i = first; i < first + count; ++i) lower[i] = detail::split_float(from[i]).low;
  });
}

void join_halves(int threads, const ConstTensorView& high, const ConstTensorView& low,
                 const TensorView& values) {
  const auto* upper = high.as<bfloat16>();
  const auto* lower = low.as<std::uint16_t>();
  auto* to = values.as<float>();
  parallel_ranges(threads, values.elements(), parallel_grain, [&](std::int64_t first, std::int64_t count) {
    for (std::int64_t i = first; i < first + count; ++i) to[i] = detail::join_float({upper[i], lower[i]});
  });
}

}  // namespace tranche::kernels::cpu
