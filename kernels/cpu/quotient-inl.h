// Division by a number that stays the same, without the divider: the bits of IEEE's division. Included once
// per instruction set by sources that use foreach_target.h.
#if defined(TRANCHE_KERNELS_CPU_QUOTIENT_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef TRANCHE_KERNELS_CPU_QUOTIENT_INL_H
#undef TRANCHE_KERNELS_CPU_QUOTIENT_INL_H
#else
#define TRANCHE_KERNELS_CPU_QUOTIENT_INL_H
#endif

#include "hwy/highway.h"
#include "tranche/kernels/cpu/known_divisor.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_NATIVE_FMA
/// x / divisor for x = +0, infinite, a quiet NaN or in [2^-80, 2^80]; known_divisor.h says why it is exact.
template <class D>
HWY_INLINE hn::VFromD<D> quotient(D d, hn::VFromD<D> x, const KnownDivisor& by) {
  const auto high = hn::Set(d, by.reciprocal_high);
  const auto guess = hn::MulAdd(x, high, hn::Mul(x, hn::Set(d, by.reciprocal_low)));
  const auto remainder = hn::NegMulAdd(guess, hn::Set(d, by.divisor), x);
  const auto result = hn::MulAdd(remainder, high, guess);
  // Of infinities and NaN the steps above make NaN of one kind or another; the quotient is x itself.
  return hn::IfThenElse(hn::Lt(x, hn::Inf(d)), result, x);
}
#endif

}  // namespace tranche::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
