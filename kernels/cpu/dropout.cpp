#include "tranche/kernels/cpu/dropout.h"

#include <algorithm>

#include "tranche/kernels/cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tranche/kernels/cpu/dropout.cpp"
#include "hwy/foreach_target.h"
#include "tranche/kernels/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {

/// y = x * factor, +0 where the factor is 0 (whatever x is).
void apply_factors(const float* factors, const ConstTensorView& x, const TensorView& y, std::int64_t first,
                   std::int64_t count) {
  for_each_vector(count, [&](auto d, std::int64_t i) HWY_ATTR {
    const auto factor = hn::LoadU(d, factors + i);
    const auto product = hn::Mul(load_any(d, x.dtype, x.data, first + i), factor);
    store_any(d, hn::IfThenZeroElse(hn::Eq(factor, hn::Zero(d)), product), y.dtype, y.data, first + i);
  });
}

}  // namespace tranche::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tranche::kernels::cpu {

HWY_EXPORT(apply_factors);

void DropoutMask::factors(std::int64_t sample, std::int64_t first_element, std::int64_t count,
                          float* factors) const {
  const RandomKey stream = key(sample);
  const std::int64_t end = first_element + count;
  for (std::int64_t element = first_element; element < end;) {
    const auto draws = random_block(stream, static_cast<std::uint64_t>(element) / 4);
    const std::int64_t stop = std::min(end, element / 4 * 4 + 4);
    for (; element < stop; ++element) {
      factors[element - first_element] =
          draws[static_cast<std::size_t>(element % 4)] >= threshold_ ? scale_ : 0;
    }
  }
}

void dropout(int threads, const DropoutMask& mask, std::span<const std::int64_t> samples,
             const ConstTensorView& x, const TensorView& y) {
  constexpr std::int64_t stretch = 1024;
  const std::int64_t elements = x.elements();
  if (elements == 0) return;
  const std::int64_t per_sample = elements / static_cast<std::int64_t>(samples.size());
  parallel_ranges(threads, elements, 8 * stretch, [&](std::int64_t first, std::int64_t count) {
    float factors[stretch];
    const std::int64_t end = first + count;
    while (first < end) {
      const std::int64_t sample = first / per_sample;
      const std::int64_t now = std::min({stretch, end - first, (sample + 1) * per_sample - first});
      mask.factors(samples[static_cast<std::size_t>(sample)], first - sample * per_sample, now, factors);
      HWY_DYNAMIC_DISPATCH(apply_factors)(factors, x, y, first, now);
      first += now;
    }
  });
}

}  // namespace tranche::kernels::cpu
#endif
