// Vectors of fp32 loaded from and stored to the three floating dtypes. Included once per instruction set by
// sources that use foreach_target.h. Everything here gives the same bits on every instruction set: multiplies
// and adds stay separate, and the 16-bit conversions are those of narrow-inl.h.
#if defined(TRANCHE_KERNELS_CPU_VECTOR_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef TRANCHE_KERNELS_CPU_VECTOR_INL_H
#undef TRANCHE_KERNELS_CPU_VECTOR_INL_H
#else
#define TRANCHE_KERNELS_CPU_VECTOR_INL_H
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/cpu/narrow-inl.h"
#include "tranche/core/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

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
  return widened(d, load_bits(d, &from->bits), bfloat16());
}
template <class D>
HWY_INLINE hn::VFromD<D> load(D d, const float16* from) {
  return widened(d, load_bits(d, &from->bits), float16());
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

/// Stores two neighbouring vectors; 16-bit elements are stored as one vector. With `streaming` the stores are
/// non-temporal: `to` must be aligned to a whole vector, and the caller calls hwy::FlushStream before another
/// thread may read.
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

/// One of two vectors whose elements are adjacent in memory, in the order that is cheapest to separate: for
/// fp32 one vector follows the other, 16-bit elements are separated into even and odd ones. Operands of one
/// dtype are in the same order.
template <int half>
struct HalfOfPair {
  std::int64_t index;  ///< index of the pair's first element

  template <class D>
  HWY_INLINE hn::VFromD<D> operator()(D d, const float* from) const {
    return hn::LoadU(d, from + index + half * static_cast<std::int64_t>(hn::Lanes(d)));
  }
#if HWY_TARGET == HWY_SCALAR  // has no wider vectors: the first of two elements is the even one
  template <class D, class Narrow>
  HWY_INLINE hn::VFromD<D> operator()(D d, const Narrow* from) const {
    return load(d, from + index + half);
  }
#else
  template <class D>
  HWY_INLINE hn::VFromD<D> operator()(D d, const bfloat16* from) const {
    const auto both = patterns(d, &from[index].bits);
    if constexpr (half == 0) return hn::BitCast(d, hn::ShiftLeft<16>(both));
    return hn::BitCast(d, hn::And(both, hn::Set(Bits<D>(), 0xffff0000u)));
  }
  template <class D>
  HWY_INLINE hn::VFromD<D> operator()(D d, const float16* from) const {
    const auto both = patterns(d, &from[index].bits);
    if constexpr (half == 0) return widened(d, hn::And(both, hn::Set(Bits<D>(), 0xffffu)), float16());
    return widened(d, hn::ShiftRight<16>(both), float16());
  }

 private:
  template <class D>
  static HWY_INLINE hn::VFromD<Bits<D>> patterns(D, const std::uint16_t* from) {
    const hn::Repartition<std::uint16_t, D> narrow;
    return hn::BitCast(Bits<D>(), hn::LoadU(narrow, from));
  }
#endif
};

/// Stores both halves of a pair; `streaming` as for store_pair(), `of_bf16` as for rounded_to_upper().
template <bool of_bf16 = false, class D>
HWY_INLINE void store_halves(D d, hn::VFromD<D> first, hn::VFromD<D> second, float* to, bool streaming) {
  store_pair(d, first, second, to, streaming);
}
template <bool of_bf16 = false, class D, class Narrow>
HWY_INLINE void store_halves(D d, hn::VFromD<D> even, hn::VFromD<D> odd, Narrow* to, bool streaming) {
#if HWY_TARGET == HWY_SCALAR
  store_pair(d, even, odd, to, streaming);
#else
  const hn::Repartition<std::uint16_t, D> narrow;
  const auto both = interleaved<of_bf16>(d, even, odd, Narrow());
  if (streaming) {
    hn::Stream(both, narrow, &to->bits);
  } else {
    hn::StoreU(both, narrow, &to->bits);
  }
#endif
}

/// Load and store with a dtype known at run time, for loops whose speed does not depend on it.
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

/// Copies by non-temporal stores; `to` and `bytes` are multiples of whole lines.
HWY_INLINE void stream_copy(const void* from, std::int64_t bytes, void* to) {
  const hn::ScalableTag<std::uint8_t> d;
  const auto step = static_cast<std::int64_t>(hn::Lanes(d));
  const auto* in = static_cast<const std::uint8_t*>(from);
  auto* out = static_cast<std::uint8_t*>(to);
  for (std::int64_t i = 0; i < bytes; i += step) hn::Stream(hn::LoadU(d, in + i), d, out + i);
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
