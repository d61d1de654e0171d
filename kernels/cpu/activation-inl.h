// Loops of GELU and SwiGLU. Each element needs an exponential, and the rest of its arithmetic depends on
// that. Included once per instruction set; see vector-inl.h.
#if defined(TRANCHE_KERNELS_CPU_ACTIVATION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TRANCHE_KERNELS_CPU_ACTIVATION_INL_H_
#undef TRANCHE_KERNELS_CPU_ACTIVATION_INL_H_
#else
#define TRANCHE_KERNELS_CPU_ACTIVATION_INL_H_
#endif

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/cpu/exponential-inl.h"
#include "kernels/cpu/results-inl.h"
#include "kernels/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {

/// Computes exponential(d, x) of `count` elements x, stored in the order of for_each_result(), so that its
/// `at` can load them.
template <class T, class Exponential>
HWY_INLINE void exponentials(const T* from, std::int64_t count, float* to, const Exponential& exponential) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  for (; i + 2 * lanes <= count; i += 2 * lanes) {
    hn::StoreU(exponential(d, HalfOfPair<0>{i}(d, from)), d, to + i);
    hn::StoreU(exponential(d, HalfOfPair<1>{i}(d, from)), d, to + i + lanes);
  }
  const hn::CappedTag<float, 1> one;
  for (; i < count; ++i) hn::StoreU(exponential(one, load(one, from + i)), one, to + i);
}

/// Stores the results of body(d, at, offset, e) to the operands `to`, like for_each_result(), block by block;
/// `offset` is the block's first element, to which `at` is relative, and `e` are the exponentials of `from`.
/// An element's operations form a dependency chain: with two loops a core has more of them in flight (on Zen
/// 3 1.7 times the speed of one loop). 16-bit results that bypass the caches are written one operand after
/// another, because alternating half lines took up to 1.4 times as long.
template <class T, std::size_t n, class Exponential, class Body>
HWY_INLINE void for_each_activation(const T* from, std::int64_t count, const std::array<T*, n>& to,
                                    bool streaming, const Exponential& exponential, const Body& body) {
  constexpr std::int64_t block = 256;
  alignas(64) float e[block];
  alignas(64) std::byte kept[n][block * sizeof(T)];  // an array of 16-bit numbers would be zeroed
  for (std::int64_t offset = 0; offset < count; offset += block) {
    const std::int64_t width = std::min(block, count - offset);
    const bool in_turns = streaming && n > 1 && sizeof(T) == 2 && width == block;
    std::array<T*, n> results;
    for (std::size_t k = 0; k < n; ++k)
      results[k] = in_turns ? reinterpret_cast<T*>(kept[k]) : to[k] + offset;
    exponentials(from + offset, width, e, exponential);
    for_each_result(width, results, streaming && !in_turns,
                    [&](auto d, auto at) HWY_ATTR { return body(d, at, offset, at(d, e)); });
    for (std::size_t k = 0; in_turns && k < n; ++k) stream_copy(kept[k], sizeof(kept[k]), to[k] + offset);
  }
}

}  // namespace tranche::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // TRANCHE_KERNELS_CPU_ACTIVATION_INL_H_
