// Vectors of fp32 loaded from and stored to the three floating dtypes. Included once per instruction set by
// sources that use foreach_target.h; everything in it gives the same bits on every one of them: multiplies
// and adds stay separate, and the 16-bit conversions are our own integer arithmetic, not the hardware's.
#if defined(TRANCHE_KERNELS_CPU_VECTOR_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef TRANCHE_KERNELS_CPU_VECTOR_INL_H
#undef TRANCHE_KERNELS_CPU_VECTOR_INL_H
#else
#define TRANCHE_KERNELS_CPU_VECTOR_INL_H
#endif

#include <cstdint>

#include "hwy/highway.h"
#include "tranche/core/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class D>
using Bits = hn::RebindToUnsigned<D>;

/// a > b for patterns without their sign: as signed integers, which every instruction set compares.
template <class D>
HWY_INLINE auto above(D u, hn::VFromD<D> a, hn::VFromD<D> b) {
  const hn::RebindToSigned<D> integers;
  return hn::RebindMask(u, hn::Gt(hn::BitCast(integers, a), hn::BitCast(integers, b)));
}

/// 16-bit patterns, zero-extended.
template <class D>
HWY_INLINE hn::VFromD<Bits<D>> load_bits(D, const std::uint16_t* from) {
  const hn::Rebind<std::uint16_t, D> narrow;
  return hn::PromoteTo(Bits<D>(), hn::LoadU(narrow, from));
}

template <class D>
HWY_INLINE void store_bits(D, hn::VFromD<Bits<D>> bits, std::uint16_t* to) {
  const hn::Rebind<std::uint16_t, D> narrow;
  const hn::RebindToSigned<D> integers;  // values fit 16 bits, so the saturating conversion is exact
  hn::StoreU(hn::DemoteTo(narrow, hn::BitCast(integers, bits)), narrow, to);
}

template <class D>
HWY_INLINE hn::VFromD<D> load(D d, const float* from) {
  return hn::LoadU(d, from);
}
template <class D>
HWY_INLINE hn::VFromD<D> load(D d, const bfloat16* from) {
  return hn::BitCast(d, hn::ShiftLeft<16>(load_bits(d, &from->bits)));
}
template <class D>
HWY_INLINE hn::VFromD<D> load(D d, const float16* from) {
  const Bits<D> u;
  const auto half = load_bits(d, &from->bits);
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

/// The bf16 pattern of each lane in the upper half; the lower half is of no meaning.
template <class D>
HWY_INLINE hn::VFromD<Bits<D>> rounded_to_upper(D, hn::VFromD<D> value) {
  const Bits<D> u;
  const auto bits = hn::BitCast(u, value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(u, 1u));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(u, 0x7fffu)));
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
  // Normal range: rebias the exponent and round the 13 bits that go; a carry moves into the exponent, up to
  // infinity, as it should.
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

template <class D>
HWY_INLINE void store(D d, hn::VFromD<D> value, float* to) {
  hn::StoreU(value, d, to);
}
template <class D>
HWY_INLINE void store(D d, hn::VFromD<D> value, bfloat16* to) {
  store_bits(d, bits_of(d, value, bfloat16()), &to->bits);
}
template <class D>
HWY_INLINE void store(D d, hn::VFromD<D> value, float16* to) {
  store_bits(d, bits_of(d, value, float16()), &to->bits);
}

#if HWY_TARGET != HWY_SCALAR
/// Two neighbouring vectors as one of 16-bit patterns.
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
#endif

/// Two neighbouring vectors, of which 16-bit elements leave as one. With `streaming` they go past the caches:
/// `to` is aligned to a whole vector, and hwy::FlushStream comes before anyone else is told.
template <class D>
HWY_INLINE void store_pair(D d, hn::VFromD<D> lower, hn::VFromD<D> upper, float* to, bool streaming) {
  const auto lanes = hn::Lanes(d);
  if (streaming) {
    hn::Stream(lower, d, to);
    hn::Stream(upper, d, to + lanes);
  } else {
    hn::StoreU(lower, d, to);
    hn::StoreU(upper, d, to + lanes);
  }
}
template <class D, class Narrow>
HWY_INLINE void store_pair(D d, hn::VFromD<D> lower, hn::VFromD<D> upper, Narrow* to, bool streaming) {
#if HWY_TARGET == HWY_SCALAR  // has neither wider vectors nor such stores
  static_cast<void>(streaming);
  store(d, lower, to);
  store(d, upper, to + 1);
#else
  const hn::Repartition<std::uint16_t, D> narrow;
  const auto both = packed(d, lower, upper, Narrow());
  if (streaming) {
    hn::Stream(both, narrow, &to->bits);
  } else {
    hn::StoreU(both, narrow, &to->bits);
  }
#endif
}

/// Load and store with a dtype known at run time; for loops that are not bound by it.
template <class D>
HWY_INLINE hn::VFromD<D> load_any(D d, DataType dtype, const void* from, std::int64_t i) {
  switch (dtype) {
    case DataType::bfloat16:
      return load(d, static_cast<const bfloat16*>(from) + i);
    case DataType::float16:
      return load(d, static_cast<const float16*>(from) + i);
    default:
      return load(d, static_cast<const float*>(from) + i);
  }
}
template <class D>
HWY_INLINE void store_any(D d, hn::VFromD<D> value, DataType dtype, void* to, std::int64_t i) {
  switch (dtype) {
    case DataType::bfloat16:
      return store(d, value, static_cast<bfloat16*>(to) + i);
    case DataType::float16:
      return store(d, value, static_cast<float16*>(to) + i);
    default:
      return store(d, value, static_cast<float*>(to) + i);
  }
}

/// Calls body(d, i) for every vector of fp32 lanes in [0, count), then for single lanes; the body must give
/// the same bits for any number of lanes.
template <class Body>
HWY_INLINE void for_each_vector(std::int64_t count, const Body& body) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) body(d, i);
  const hn::CappedTag<float, 1> one;
  for (; i < count; ++i) body(one, i);
}

/// Calls f with a value of the dtype's storage type.
template <class F>
HWY_INLINE void with_floating(DataType dtype, const F& f) {
  switch (dtype) {
    case DataType::bfloat16:
      return f(bfloat16{});
    case DataType::float16:
      return f(float16{});
    default:
      return f(float{});
  }
}

}  // namespace tranche::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
