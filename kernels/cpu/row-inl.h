// Rows of any floating dtype as fp32 vectors, sums and maxima over them, and exp. It builds on vector-inl.h,
// but its results may differ between instruction sets (never between runs, threads or alignments): a row's
// sum runs over as many lanes as the machine has.
#if defined(TRANCHE_KERNELS_CPU_ROW_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TRANCHE_KERNELS_CPU_ROW_INL_H_
#undef TRANCHE_KERNELS_CPU_ROW_INL_H_
#else
#define TRANCHE_KERNELS_CPU_ROW_INL_H_
#endif

#include <hwy/highway.h>
// Must follow highway.h.
#include <hwy/contrib/math/math-inl.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/cache_control.h"
#include "kernels/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using FloatVector = hn::Vec<FloatTag>;
inline constexpr std::int64_t max_lanes = 16;

inline std::int64_t lane_count() {
  return static_cast<std::int64_t>(hn::Lanes(FloatTag()));
}

template <class T>
HWY_INLINE FloatVector load(const T* from) {
  return load(FloatTag(), from);
}
template <class T>
HWY_INLINE void store(FloatVector value, T* to) {
  store(FloatTag(), value, to);
}

/// Loads the first `count` elements, followed by zeros.
template <class T>
FloatVector load_first(const T* from, std::int64_t count) {
  T padded[max_lanes] = {};
  std::memcpy(padded, from, static_cast<std::size_t>(count) * sizeof(T));
  return load(padded);
}
template <class T>
void store_first(FloatVector value, T* to, std::int64_t count) {
  T padded[max_lanes];
  store(value, padded);
  std::memcpy(to, padded, static_cast<std::size_t>(count) * sizeof(T));
}

/// Calls body(index, lanes) over [0, count): full vectors, then one partial (lanes < lane_count()).
/// `load_at`/`store_at` below take the same pair.
template <class Body>
HWY_INLINE void for_vectors(std::int64_t count, const Body& body) {
  const std::int64_t step = lane_count();
  std::int64_t i = 0;
  for (; i + step <= count; i += step) body(i, step);
  if (i < count) body(i, count - i);
}
template <class T>
HWY_INLINE FloatVector load_at(const T* from, std::int64_t index, std::int64_t lanes) {
  return lanes == lane_count() ? load(from + index) : load_first(from + index, lanes);
}
template <class T>
HWY_INLINE void store_at(FloatVector value, T* to, std::int64_t index, std::int64_t lanes) {
  if (lanes == lane_count()) {
    store(value, to + index);
  } else {
    store_first(value, to + index, lanes);
  }
}
/// `value` in the first `lanes` lanes, `other` in the rest.
HWY_INLINE FloatVector keep_first(FloatVector value, std::int64_t lanes, FloatVector other) {
  return hn::IfThenElse(hn::FirstN(FloatTag(), static_cast<std::size_t>(lanes)), value, other);
}

/// The position of a loop's body in a row: a vector of `lanes` elements, or a half of a pair.
struct RowVector {
  static constexpr int part = 0;
  std::int64_t index, lanes;
  std::int64_t place() const { return index; }
  template <class T>
  HWY_INLINE FloatVector operator()(const T* from) const {
    return load_at(from, index, lanes);
  }
  /// `value`, with zeros after the row's end.
  HWY_INLINE FloatVector keep(FloatVector value) const {
    return keep_first(value, lanes, hn::Zero(FloatTag()));
  }
  /// Prefetches elements of a later row.
  template <class T>
  HWY_INLINE void fetch(const T* from) const {
    hwy::Prefetch(from + index);
  }
};
template <int half>
struct RowHalf {
  static constexpr int part = half;
  HalfOfPair<half> at;
  HWY_INLINE std::int64_t place() const { return at.index + half * lane_count(); }
  template <class T>
  HWY_INLINE FloatVector operator()(const T* from) const {
    return at(FloatTag(), from);
  }
  HWY_INLINE FloatVector keep(FloatVector value) const { return value; }
  template <class T>
  HWY_INLINE void fetch(const T* from) const {
    if (half == 0 || sizeof(T) == sizeof(float)) hwy::Prefetch(from + place());
  }
};

inline float sum_of(FloatVector value) {
  return hn::GetLane(hn::SumOfLanes(FloatTag(), value));
}
inline float max_of(FloatVector value) {
  return hn::GetLane(hn::MaxOfLanes(FloatTag(), value));
}

/// exp(x) to about one unit in the last place; 0 for -infinity; NaN stays NaN.
inline FloatVector exp(FloatVector x) {
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(FloatTag(), x));
}

}  // namespace tranche::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // TRANCHE_KERNELS_CPU_ROW_INL_H_
