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

#if HWY_TARGET != HWY_SCALAR
/// The two halves of the 64-bit products of all lanes with `factor`.
template <class D>
HWY_INLINE void multiply_wide(D, hn::VFromD<D> value, hn::VFromD<D> factor, hn::VFromD<D>& high,
                              hn::VFromD<D>& low) {
  const hn::Repartition<std::uint64_t, D> wide;
  const D d;
  const auto even = hn::MulEven(value, factor);
  const auto odd = hn::MulEven(hn::BitCast(d, hn::ShiftRight<32>(hn::BitCast(wide, value))), factor);
  high = hn::OddEven(hn::BitCast(d, odd), hn::BitCast(d, hn::ShiftRight<32>(even)));
  low = hn::OddEven(hn::BitCast(d, hn::ShiftLeft<32>(odd)), hn::BitCast(d, even));
}
#endif

/// Factors of the four draws of each of `blocks` blocks from first_block on, a lane a block, as long as whole
/// vectors remain; returns the number of blocks done. The counter is core's (core/random.h: RandomKey).
std::int64_t factors_of_blocks([[maybe_unused]] const RandomKey& key, std::uint64_t first_block,
                               std::int64_t blocks, [[maybe_unused]] std::uint32_t threshold,
                               [[maybe_unused]] float scale, [[maybe_unused]] float* factors) {
#if HWY_TARGET == HWY_SCALAR
  static_cast<void>(first_block + static_cast<std::uint64_t>(blocks));
  return 0;
#else
  const hn::ScalableTag<std::uint32_t> u;
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(u));
  const auto low_word = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
  const auto high_word = [](std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); };
  const auto multiplier_0 = hn::Set(u, 0xd2511f53u);
  const auto multiplier_1 = hn::Set(u, 0xcd9e8d57u);
  const auto limit = hn::Set(u, threshold);
  const auto kept = hn::Set(d, scale);
  const auto purpose = static_cast<std::uint32_t>(key.purpose) << 24;
  std::int64_t done = 0;
  for (; done + lanes <= blocks; done += lanes) {
    const std::uint64_t block = first_block + static_cast<std::uint64_t>(done);
    if (low_word(block + static_cast<std::uint64_t>(lanes) - 1) < low_word(block))
      break;  // lanes differ above
    auto c0 = hn::Iota(u, low_word(block));
    auto c1 = hn::Set(u, high_word(block) | purpose);
    auto c2 = hn::Set(u, low_word(key.subject));
    auto c3 = hn::Set(u, high_word(key.subject));
    std::uint32_t k0 = low_word(key.seed);
    std::uint32_t k1 = high_word(key.seed);
    for (int round = 0; round < 10; ++round) {
      hn::VFromD<decltype(u)> high_0, low_0, high_1, low_1;
      multiply_wide(u, c0, multiplier_0, high_0, low_0);
      multiply_wide(u, c2, multiplier_1, high_1, low_1);
      c0 = hn::Xor(hn::Xor(high_1, c1), hn::Set(u, k0));
      c1 = low_1;
      c2 = hn::Xor(hn::Xor(high_0, c3), hn::Set(u, k1));
      c3 = low_0;
      k0 += 0x9e3779b9u;
      k1 += 0xbb67ae85u;
    }
    const auto factor = [&](hn::VFromD<decltype(u)> draw) HWY_ATTR {
      return hn::IfThenZeroElse(hn::RebindMask(d, hn::Lt(draw, limit)), kept);
    };
    hn::StoreInterleaved4(factor(c0), factor(c1), factor(c2), factor(c3), d, factors + 4 * done);
  }
  return done;
#endif
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
