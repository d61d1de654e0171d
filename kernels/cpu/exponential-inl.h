// The exponential of GELU and SiLU, with the same bits on every instruction set; kernels/exponential.h is its
// scalar form.
#if defined(TRANCHE_KERNELS_CPU_EXPONENTIAL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TRANCHE_KERNELS_CPU_EXPONENTIAL_INL_H_
#undef TRANCHE_KERNELS_CPU_EXPONENTIAL_INL_H_
#else
#define TRANCHE_KERNELS_CPU_EXPONENTIAL_INL_H_
#endif

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// exp(x) for x in [-80, 80], error within 2 units in the last place: 2^n times a polynomial on
/// [-ln 2 / 2, ln 2 / 2] (coefficients of Cephes' expf).
template <class D>
HWY_INLINE hn::VFromD<D> exponential(D d, hn::VFromD<D> x) {
  const hn::RebindToSigned<D> integers;
  // Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits.
  const auto rounder = hn::Set(d, 12582912.0f);
  const auto shifted = hn::Add(hn::Mul(x, hn::Set(d, 1.44269504088896341f)), rounder);
  const auto n = hn::Sub(shifted, rounder);
  auto r = hn::Sub(x, hn::Mul(n, hn::Set(d, 0.693359375f)));  // ln 2 in two parts; the first product is exact
  r = hn::Sub(r, hn::Mul(n, hn::Set(d, -2.12194440e-4f)));
  auto p = hn::Set(d, 1.9875691500e-4f);
  p = hn::Add(hn::Mul(p, r), hn::Set(d, 1.3981999507e-3f));
  p = hn::Add(hn::Mul(p, r), hn::Set(d, 8.3334519073e-3f));
  p = hn::Add(hn::Mul(p, r), hn::Set(d, 4.1665795894e-2f));
  p = hn::Add(hn::Mul(p, r), hn::Set(d, 1.6666665459e-1f));
  p = hn::Add(hn::Mul(p, r), hn::Set(d, 5.0000001201e-1f));
  p = hn::Add(hn::Add(hn::Mul(p, hn::Mul(r, r)), r), hn::Set(d, 1.0f));
  return hn::BitCast(d, hn::Add(hn::BitCast(integers, p), hn::ShiftLeft<23>(hn::BitCast(integers, shifted))));
}

/// The vector form of coarse_power_of_two_element() in kernels/exponential.h.
template <class D>
HWY_INLINE hn::VFromD<D> coarse_power_of_two(D d, hn::VFromD<D> t) {
  const auto polynomial = [d](hn::VFromD<D> f) HWY_ATTR {
    auto p = hn::Set(d, 9.78291221e-3f);
    p = hn::Add(hn::Mul(p, f), hn::Set(d, 5.59768826e-2f));
    p = hn::Add(hn::Mul(p, f), hn::Set(d, 2.40207106e-1f));
    p = hn::Add(hn::Mul(p, f), hn::Set(d, 6.93113625e-1f));
    return hn::Add(hn::Mul(p, f), hn::Set(d, 1.0f));
  };
#if HWY_TARGET <= HWY_AVX3  // has instructions for the reduction and for the scaling, which also clamps t
  if constexpr (hn::MaxLanes(D()) == 16) {
    const hn::VFromD<D> f{_mm512_reduce_ps(t.raw, 0)};
    return hn::VFromD<D>{_mm512_scalef_ps(polynomial(f).raw, hn::Sub(t, f).raw)};
  }
#endif
  const hn::RebindToSigned<D> integers;
  const auto rounder = hn::Set(d, 12582912.0f);
  const auto bounded = hn::Max(hn::Min(t, hn::Set(d, 128.0f)), hn::Set(d, -120.0f));
  const auto shifted = hn::Add(bounded, rounder);
  const auto p = polynomial(hn::Sub(bounded, hn::Sub(shifted, rounder)));
  return hn::BitCast(d, hn::Add(hn::BitCast(integers, p), hn::ShiftLeft<23>(hn::BitCast(integers, shifted))));
}

}  // namespace tranche::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // TRANCHE_KERNELS_CPU_EXPONENTIAL_INL_H_
