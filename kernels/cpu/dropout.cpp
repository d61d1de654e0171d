#include "kernels/cpu/dropout.h"

#include <algorithm>

#include "kernels/cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/dropout.cpp"
#include "hwy/foreach_target.h"
#include "kernels/cpu/vector-inl.h"

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

/// Factors of the four draws of each of `blocks` blocks from first_block on, a 64-bit lane a block, as long
/// as whole vectors remain; returns the number of blocks done. The counter is core's (core/random.h:
/// RandomKey). Each of its four words is in the lower half of a lane, where a product finds it; whatever
/// stands above is not read.
std::int64_t factors_of_blocks([[maybe_unused]] const RandomKey& key, std::uint64_t first_block,
                               std::int64_t blocks, [[maybe_unused]] std::uint32_t threshold,
                               [[maybe_unused]] float scale, [[maybe_unused]] float* factors) {
#if HWY_TARGET == HWY_SCALAR
  static_cast<void>(first_block + static_cast<std::uint64_t>(blocks));
  return 0;
#else
  const hn::ScalableTag<std::uint64_t> w;
  const hn::ScalableTag<std::uint32_t> u;
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(w));
  const auto low_word = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
  const auto multiplier_0 = hn::Set(u, 0xd2511f53u);
  const auto multiplier_1 = hn::Set(u, 0xcd9e8d57u);
  const auto limit = hn::Set(u, threshold);
  const auto kept = hn::Set(d, scale);
  const std::uint64_t purpose = static_cast<std::uint64_t>(key.purpose) << 24;
  // Neighbouring lanes are half a vector of blocks apart, so that what is put together below lies in order.
  std::uint64_t order[HWY_MAX_BYTES / sizeof(std::uint64_t)];
  for (std::int64_t i = 0; i < lanes; ++i) order[i] = static_cast<std::uint64_t>(i / 2 + i % 2 * (lanes / 2));
  const auto lane_block = hn::LoadU(w, order);
  std::int64_t done = 0;
  for (; done + lanes <= blocks; done += lanes) {
    const std::uint64_t block = first_block + static_cast<std::uint64_t>(done);
    if (low_word(block + static_cast<std::uint64_t>(lanes) - 1) < low_word(block))
      break;  // lanes differ above
    auto c0 = hn::Add(hn::Set(w, block), lane_block);
    auto c1 = hn::Set(w, (block >> 32) | purpose);
    auto c2 = hn::Set(w, key.subject);
    auto c3 = hn::Set(w, key.subject >> 32);
    std::uint32_t k0 = low_word(key.seed);
    std::uint32_t k1 = low_word(key.seed >> 32);
    for (int round = 0; round < 10; ++round) {
      const auto product_0 = hn::MulEven(hn::BitCast(u, c0), multiplier_0);
      const auto product_1 = hn::MulEven(hn::BitCast(u, c2), multiplier_1);
      c0 = hn::Xor(hn::Xor(hn::ShiftRight<32>(product_1), c1), hn::Set(w, k0));
      c1 = product_1;
      c2 = hn::Xor(hn::Xor(hn::ShiftRight<32>(product_0), c3), hn::Set(w, k1));
      c3 = product_0;
      k0 += 0x9e3779b9u;
      k1 += 0xbb67ae85u;
    }
    const auto pair = [&](hn::VFromD<decltype(w)> first, hn::VFromD<decltype(w)> second) HWY_ATTR {
      return hn::BitCast(w, hn::OddEven(hn::BitCast(u, hn::ShiftLeft<32>(second)), hn::BitCast(u, first)));
    };
    const auto store = [&](hn::VFromD<decltype(w)> draws, float* to) HWY_ATTR {
      const auto dropped = hn::RebindMask(d, hn::Lt(hn::BitCast(u, draws), limit));
      hn::StoreU(hn::IfThenZeroElse(dropped, kept), d, to);
    };
    const auto front = pair(c0, c1), back = pair(c2, c3);
    store(hn::InterleaveLower(w, front, back), factors + 4 * done);
    store(hn::InterleaveUpper(w, front, back), factors + 4 * done + 2 * lanes);
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
  constexpr std::int64_t block = 1024;
  const std::int64_t elements = x.elements();
  if (elements == 0) return;
  const std::int64_t per_sample = elements / static_cast<std::int64_t>(samples.size());
  parallel_ranges(threads, elements, 8 * block, [&](std::int64_t first, std::int64_t count) {
    float factors[block];
    const std::int64_t end = first + count;
    while (first < end) {
      const std::int64_t sample = first / per_sample;
      const std::int64_t now = std::min({block, end - first, (sample + 1) * per_sample - first});
      mask.factors(samples[static_cast<std::size_t>(sample)], first - sample * per_sample, now, factors);
      HWY_DYNAMIC_DISPATCH(apply_factors)(factors, x, y, first, now);
      first += now;
    }
  });
}

}  // namespace tranche::kernels::cpu
#endif
