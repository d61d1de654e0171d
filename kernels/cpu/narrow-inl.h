// Conversions between vectors of fp32 and 16-bit patterns of bf16 and fp16. They use integer arithmetic
// instead of the hardware's conversions, so that every instruction set gives the same bits. Included once per
// instruction set, by vector-inl.h.
#if defined(TRANCHE_KERNELS_CPU_NARROW_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef TRANCHE_KERNELS_CPU_NARROW_INL_H
#undef TRANCHE_KERNELS_CPU_NARROW_INL_H
#else
#define TRANCHE_KERNELS_CPU_NARROW_INL_H
#endif

#include <cstdint>

#include "hwy/highway.h"
#include "tranche/core/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class D>
using Bits = hn::RebindToUnsigned<D>;

/// a > b for patterns without a sign bit: they are compared as signed integers, which every instruction set
/// supports.
template <class D>
HWY_INLINE auto above(D u, hn::VFromD<D> a, hn::VFromD<D> b) {
  const hn::RebindToSigned<D> integers;
  return hn::RebindMask(u, hn::Gt(hn::BitCast(integers, a), hn::BitCast(integers, b)));
}

/// The values of 16-bit patterns that are zero-extended to 32 bits; the last argument names the format.
template <class D>
HWY_INLINE hn::VFromD<D> widened(D d, hn::VFromD<Bits<D>> brain, bfloat16) {
  return hn::BitCast(d, hn::ShiftLeft<16>(brain));
}
template <class D>
HWY_INLINE hn::VFromD<D> widened(D d, hn::VFromD<Bits<D>> half, float16) {
  const Bits<D> u;
  const auto sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(u, 0x8000u)));
  const auto magnitude = hn::ShiftLeft<13>(hn::And(half, hn::Set(u, 0x7fffu)));
  const auto exponent = hn::And(magnitude, hn::Set(u, 0x0f800000u));
  const auto rebias = hn::Set(u, 0x38000000u);  // (127 - 15) << 23
  const auto normal = hn::Add(magnitude, rebias);
  // Infinities and NaNs: the exponent becomes all ones; NaNs are made quiet.
  const auto special = hn::Add(normal, rebias);
  const auto is_nan = above(u, magnitude, hn::Set(u, 0x0f800000u));
  const auto quiet = hn::Or(special, hn::IfThenElseZero(is_nan, hn::Set(u, 0x00400000u)));
  // Subnormals: 2^-14 (1 + fraction) - 2^-14 is exact and normal in fp32.
  const auto smallest = hn::Set(u, 0x38800000u);
  const auto subnormal =
      hn::BitCast(u, hn::Sub(hn::BitCast(d, hn::Add(magnitude, smallest)), hn::BitCast(d, smallest)));
  auto result = hn::IfThenElse(hn::Eq(exponent, hn::Zero(u)), subnormal, normal);
  result = hn::IfThenElse(hn::Eq(exponent, hn::Set(u, 0x0f800000u)), quiet, result);
  return hn::BitCast(d, hn::Or(result, sign));
}

/// The bf16 pattern of each lane in the upper half; the lower half is undefined. `of_bf16` means that a NaN
/// is the result of arithmetic on bf16 operands: it is quiet and has zeros in its lower half, so that
/// rounding does not change it.
template <bool of_bf16 = false, class D>
HWY_INLINE hn::VFromD<Bits<D>> rounded_to_upper(D, hn::VFromD<D> value) {
  const Bits<D> u;
  const auto bits = hn::BitCast(u, value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(u, 1u));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(u, 0x7fffu)));
  if constexpr (of_bf16) return rounded;
  const auto quiet = hn::Or(bits, hn::Set(u, 0x00400000u));
  return hn::IfThenElse(hn::RebindMask(u, hn::IsNaN(value)), quiet, rounded);
}

/// The 16-bit pattern of each lane, zero-extended; the last argument names the format.
template <class D>
HWY_INLINE hn::VFromD<Bits<D>> bits_of(D d, hn::VFromD<D> value, bfloat16) {
  return hn::ShiftRight<16>(rounded_to_upper(d, value));
}
template <class D>
HWY_INLINE hn::VFromD<Bits<D>> bits_of(D d, hn::VFromD<D> value, float16) {
  const Bits<D> u;
  const auto bits = hn::BitCast(u, value);
  const auto magnitude = hn::And(bits, hn::Set(u, 0x7fffffffu));
  const auto sign = hn::ShiftRight<16>(hn::Xor(bits, magnitude));
  // Normal range: the exponent is rebased and the 13 dropped bits are rounded; a carry moves into the
  // exponent, up to infinity, as it should.
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(u, 1u));
  const auto normal = hn::ShiftRight<13>(
      hn::Add(hn::Sub(magnitude, hn::Set(u, 0x38000000u)), hn::Add(odd, hn::Set(u, 0x0fffu))));
  // Below 2^-14: one unit in the last place of 0.5 is 2^-24, so the addition does the rounding.
  const auto half = hn::Set(u, 0x3f000000u);
  const auto subnormal =
      hn::Sub(hn::BitCast(u, hn::Add(hn::BitCast(d, magnitude), hn::BitCast(d, half))), half);
  const auto nan = hn::Or(hn::Set(u, 0x7e00u), hn::And(hn::ShiftRight<13>(magnitude), hn::Set(u, 0x03ffu)));
  auto result = hn::IfThenElse(above(u, hn::Set(u, 0x38800000u), magnitude), subnormal, normal);
  result = hn::IfThenElse(above(u, magnitude, hn::Set(u, 0x477fffffu)), hn::Set(u, 0x7c00u), result);
  result = hn::IfThenElse(above(u, magnitude, hn::Set(u, 0x7f800000u)), nan, result);
  return hn::Or(result, sign);
}

#if HWY_TARGET != HWY_SCALAR
/// Packs two neighbouring vectors into one of 16-bit patterns.
template <class D>
HWY_INLINE hn::VFromD<hn::Repartition<std::uint16_t, D>> packed(D d, hn::VFromD<D> lower, hn::VFromD<D> upper,
                                                                bfloat16) {
  const hn::Repartition<std::uint16_t, D> narrow;
  return hn::ConcatOdd(narrow, hn::BitCast(narrow, rounded_to_upper(d, upper)),
                       hn::BitCast(narrow, rounded_to_upper(d, lower)));
}
template <class D>
HWY_INLINE hn::VFromD<hn::Repartition<std::uint16_t, D>> packed(D d, hn::VFromD<D> lower, hn::VFromD<D> upper,
                                                                float16) {
  const hn::Repartition<std::uint16_t, D> narrow;
  return hn::ConcatEven(narrow, hn::BitCast(narrow, bits_of(d, upper, float16())),
                        hn::BitCast(narrow, bits_of(d, lower, float16())));
}

/// Packs two vectors, the even and the odd elements, into one of 16-bit patterns. `of_bf16` as for
/// rounded_to_upper().
template <bool of_bf16, class D>
HWY_INLINE hn::VFromD<hn::Repartition<std::uint16_t, D>> interleaved(D d, hn::VFromD<D> even,
                                                                     hn::VFromD<D> odd, bfloat16) {
  const hn::Repartition<std::uint16_t, D> narrow;
  return hn::OddEven(hn::BitCast(narrow, rounded_to_upper<of_bf16>(d, odd)),
                     hn::BitCast(narrow, hn::ShiftRight<16>(rounded_to_upper<of_bf16>(d, even))));
}
template <bool of_bf16, class D>
HWY_INLINE hn::VFromD<hn::Repartition<std::uint16_t, D>> interleaved(D d, hn::VFromD<D> even,
                                                                     hn::VFromD<D> odd, float16) {
  const hn::Repartition<std::uint16_t, D> narrow;
  return hn::BitCast(narrow,
                     hn::Or(bits_of(d, even, float16()), hn::ShiftLeft<16>(bits_of(d, odd, float16()))));
}
#endif

}  // namespace tranche::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
