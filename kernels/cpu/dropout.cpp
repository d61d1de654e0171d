#include "kernels/cpu/dropout.h"

#include <algorithm>

#include "kernels/cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/dropout.cpp"
#include "hwy/foreach_target.h"
#include "kernels/cpu/philox-inl.h"
#include "kernels/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {

/// y = x * factor, but +0 where the factor is 0 (for any x).
void apply_factors(const float* factors, const ConstTensorView& x, const TensorView& y, std::int64_t first,
                   std::int64_t count) {
  for_each_vector(count, [&](auto d, std::int64_t i) HWY_ATTR {
    const auto factor = hn::LoadU(d, factors + i);
    const auto product = hn::Mul(load_any(d, x.dtype, x.data, first + i), factor);
    store_any(d, hn::IfThenZeroElse(hn::Eq(factor, hn::Zero(d)), product), y.dtype, y.data, first + i);
  });
}

/// Computes the factors of the four draws of each block, for as many whole vectors of blocks as there are;
/// returns the number of blocks done.
std::int64_t factors_of_blocks(const RandomKey& key, std::uint64_t first_block, std::int64_t blocks,
                               [[maybe_unused]] std::uint32_t threshold, [[maybe_unused]] float scale,
                               [[maybe_unused]] float* factors) {
  return for_random_blocks(key, first_block, blocks, [&](auto draws, std::int64_t i) HWY_ATTR {
    const hn::ScalableTag<std::uint32_t> u;
    const hn::ScalableTag<float> d;
    const auto dropped = hn::RebindMask(d, hn::Lt(hn::BitCast(u, draws), hn::Set(u, threshold)));
    hn::StoreU(hn::IfThenZeroElse(dropped, hn::Set(d, scale)), d, factors + i);
  });
}

}  // namespace tranche::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tranche::kernels::cpu {

HWY_EXPORT(apply_factors);
HWY_EXPORT(factors_of_blocks);

void DropoutMask::factors(std::int64_t sample, std::int64_t first_element, std::int64_t count,
                          float* factors) const {
  const RandomKey stream = draws_.key(sample);
  const std::int64_t end = first_element + count;
  std::int64_t element = first_element;
  while (element < end) {
    const std::int64_t block = element / 4;
    if (element % 4 == 0) {
      const std::int64_t done = HWY_DYNAMIC_DISPATCH(factors_of_blocks)(
          stream, static_cast<std::uint64_t>(block), (end - element) / 4, draws_.threshold, draws_.scale,
          factors + (element - first_element));
      element += 4 * done;
      if (done > 0) continue;
    }
    const auto draws = random_block(stream, static_cast<std::uint64_t>(block));
    for (const std::int64_t stop = std::min(end, block * 4 + 4); element < stop; ++element) {
      const auto draw = draws[static_cast<std::size_t>(element % 4)];
      factors[element - first_element] = draws_.keeps(draw) ? draws_.scale : 0;
    }
  }
}

namespace {

constexpr std::int64_t factors_at_once = 1024;

/// Handles a part that is some columns of all rows.
void dropout_of_columns(int threads, const DropoutMask& mask, std::span<const std::int64_t> samples,
                        const DropoutPart& part, const ConstTensorView& x, const TensorView& y) {
  const std::int64_t rows = x.elements() / part.columns, run = part.columns / part.column_blocks,
                     apart = part.row_elements / part.column_blocks,
                     rows_per_sample = rows / static_cast<std::int64_t>(samples.size());
  const std::int64_t rows_at_once = std::max<std::int64_t>(8 * factors_at_once / part.columns, 1);
  parallel_ranges(threads, rows, rows_at_once, [&](std::int64_t first, std::int64_t count) {
    float factors[factors_at_once];
    for (std::int64_t row = first; row < first + count; ++row) {
      const std::int64_t sample = row / rows_per_sample, in_sample = row % rows_per_sample;
      for (std::int64_t at = 0; at < part.columns;) {
        const std::int64_t in_run = at % run, now = std::min(factors_at_once, run - in_run);
        mask.factors(samples[static_cast<std::size_t>(sample)],
                     part.offset + in_sample * part.row_elements + at / run * apart + part.first_column +
                         in_run,
                     now, factors);
        HWY_DYNAMIC_DISPATCH(apply_factors)(factors, x, y, row * part.columns + at, now);
        at += now;
      }
    }
  });
}

}  // namespace

void dropout(int threads, const DropoutMask& mask, std::span<const std::int64_t> samples,
             const DropoutPart& part, const ConstTensorView& x, const TensorView& y) {
  const std::int64_t elements = x.elements();
  if (elements == 0) return;
  if (part.columns > 0) return dropout_of_columns(threads, mask, samples, part, x, y);
  const std::int64_t per_sample = part.per_sample, last = static_cast<std::int64_t>(samples.size());
  parallel_ranges(threads, elements, 8 * factors_at_once, [&](std::int64_t first, std::int64_t count) {
    float factors[factors_at_once];
    const std::int64_t end = first + count;
    while (first < end) {
      const std::int64_t element = part.first + first, sample = element / per_sample;
      std::int64_t now = std::min(factors_at_once, end - first);
      if (sample < last) {
        now = std::min(now, (sample + 1) * per_sample - element);
        mask.factors(samples[static_cast<std::size_t>(sample)], part.offset + element - sample * per_sample,
                     now, factors);
      } else {
        std::fill_n(factors, now, 0.0f);
      }
      HWY_DYNAMIC_DISPATCH(apply_factors)(factors, x, y, first, now);
      first += now;
    }
  });
}

}  // namespace tranche::kernels::cpu
#endif
