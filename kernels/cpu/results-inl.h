// The loop of element-wise operations with several results. Included once per instruction set; see
// vector-inl.h.
#if defined(TRANCHE_KERNELS_CPU_RESULTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TRANCHE_KERNELS_CPU_RESULTS_INL_H_
#undef TRANCHE_KERNELS_CPU_RESULTS_INL_H_
#else
#define TRANCHE_KERNELS_CPU_RESULTS_INL_H_
#endif

#include <array>
#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {

/// Loads elements in memory order, for a body that otherwise loads halves of pairs.
struct Neighbours {
  std::int64_t index;
  template <class D, class T>
  HWY_INLINE hn::VFromD<D> operator()(D d, const T* from) const {
    return load(d, from + index);
  }
};

/// Stores the results of body(d, at), a std::array with a vector for each of `to`, for all of [0, count);
/// at(d, from) loads the elements at the same position. The body must give the same bits for any number of
/// lanes, by arithmetic on operands of the dtype T; an output may overwrite an input. `streaming` as for
/// store_pair().
template <class T, std::size_t n, class Body>
HWY_INLINE void for_each_result(std::int64_t count, const std::array<T*, n>& to, bool streaming,
                                const Body& body) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  for (; i + 2 * lanes <= count; i += 2 * lanes) {
    const auto first = body(d, HalfOfPair<0>{i});
    const auto second = body(d, HalfOfPair<1>{i});
    for (std::size_t k = 0; k < n; ++k) store_halves<true>(d, first[k], second[k], to[k] + i, streaming);
  }
  const auto rest = [&](auto tag) HWY_ATTR {
    const auto result = body(tag, Neighbours{i});
    for (std::size_t k = 0; k < n; ++k) store(tag, result[k], to[k] + i);
  };
  for (; i + lanes <= count; i += lanes) rest(d);
  for (; i < count; ++i) rest(hn::CappedTag<float, 1>());
}

}  // namespace tranche::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // TRANCHE_KERNELS_CPU_RESULTS_INL_H_
