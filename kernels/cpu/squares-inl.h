// Sums of squares without rounding, block by block (RunningSquares). Included once per instruction set; see
// vector-inl.h.
#if defined(TRANCHE_KERNELS_CPU_SQUARES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TRANCHE_KERNELS_CPU_SQUARES_INL_H_
#undef TRANCHE_KERNELS_CPU_SQUARES_INL_H_
#else
#define TRANCHE_KERNELS_CPU_SQUARES_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <iterator>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/cpu/reduction.h"
#include "kernels/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {

/// The least and the greatest magnitude of a block, as bits of fp32; zeros are ignored.
struct MagnitudeRange {
  std::uint32_t least = 0xffffffffu, greatest = 0;
};

template <class T>
HWY_INLINE MagnitudeRange magnitude_range(const T* values, std::int64_t count) {
  const hn::ScalableTag<float> d;
  const hn::RebindToUnsigned<decltype(d)> bits;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  auto least = hn::Set(bits, 0xffffffffu), greatest = hn::Zero(bits);
  const auto take = [&](const T* from) HWY_ATTR {
    const auto magnitude = hn::And(hn::BitCast(bits, load(d, from)), hn::Set(bits, 0x7fffffffu));
    greatest = hn::Max(greatest, magnitude);
    least = hn::Min(least, hn::Sub(magnitude, hn::Set(bits, 1)));  // zero becomes the largest number
  };
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) take(values + i);
  if (i < count) {
    T last[hn::MaxLanes(d)] = {};
    std::copy(values + i, values + count, last);
    take(last);
  }
  return {hn::GetLane(hn::MinOfLanes(bits, least)) + 1, hn::GetLane(hn::MaxOfLanes(bits, greatest))};
}

/// The lanes accept elements whose exponents are at most this much below the greatest. Each lane has two fp64
/// numbers. `upper` is between 2^(unit + 52) and twice that, so that its mantissa counts multiples of 2^unit
/// and adding a square rounds it to a multiple; `lower` sums the rounding errors, which is exact too. An
/// element is below 2^(exponent - 126), its square below 2^(unit + 40), and the squares of most_elements
/// below 2^(unit + 52), even in one lane. The sum of all rounding errors is at most 2^(unit + 11), and a
/// multiple of 2^(unit - 42).
constexpr int narrow_exponents = 17;

HWY_INLINE int unit_of(const RunningSquares& squares) {
  return 2 * squares.exponent - 292;
}
HWY_INLINE double begin_of(const RunningSquares& squares) {
  return std::bit_cast<double>(static_cast<std::int64_t>(unit_of(squares) + 52 + 1023) << 52);
}

/// Adds a block and returns true if the lanes can represent it. Too large a number is detected because an
/// upper lane leaves its power of two, or becomes NaN; too small a number, by the least magnitude.
template <class T>
HWY_INLINE bool add_narrow_squares(const T* values, std::int64_t count, RunningSquares& squares) {
  const hn::CappedTag<double, 8> wide;
  const hn::Rebind<float, decltype(wide)> d;
  const hn::CappedTag<float, 16> whole;
  const hn::RebindToUnsigned<decltype(whole)> bits;
  using Wide = hn::VFromD<decltype(wide)>;
  constexpr auto lanes = static_cast<std::int64_t>(hn::MaxLanes(wide));
  constexpr std::int64_t step = 4 * lanes;
  const auto at = [&](double* of, int k) HWY_ATTR { return hn::Load(wide, of + k * lanes); };
  auto upper0 = at(squares.upper, 0), upper1 = at(squares.upper, 1), upper2 = at(squares.upper, 2),
       upper3 = at(squares.upper, 3);
  auto lower0 = at(squares.lower, 0), lower1 = at(squares.lower, 1), lower2 = at(squares.lower, 2),
       lower3 = at(squares.lower, 3);
  auto least = hn::Zero(bits);  // negated twice the bits: its maximum belongs to the least nonzero magnitude
  const auto add = [&](const T* from, Wide& upper, Wide& lower) HWY_ATTR {
    const auto x = hn::PromoteTo(wide, load(d, from));
    const auto sum = hn::MulAdd(x, x, upper);  // fused or not: the square is exact
    lower = hn::Add(lower, hn::MulSub(x, x, hn::Sub(sum, upper)));
    upper = sum;
  };
  T last[step] = {};
  for (std::int64_t i = 0; i < count; i += step) {
    const T* from = values + i;
    if (i + step <= count) {
      // The next block is prefetched while this one, which is in the core's own cache, is processed.
      const char* const next = reinterpret_cast<const char*>(from + count);
      for (std::size_t line = 0; line < step * sizeof(T); line += 64) hwy::Prefetch(next + line);
    } else {
      std::copy(from, values + count, last);
      from = last;
    }
    add(from, upper0, lower0);
    add(from + lanes, upper1, lower1);
    add(from + 2 * lanes, upper2, lower2);
    add(from + 3 * lanes, upper3, lower3);
    for (std::int64_t k = 0; k < step; k += static_cast<std::int64_t>(hn::MaxLanes(whole))) {
      const auto x = hn::BitCast(bits, load(whole, from + k));
      least = hn::Max(least, hn::Sub(hn::Zero(bits), hn::Add(x, x)));
    }
  }
  const int exponent = squares.exponent - narrow_exponents;  // subnormal numbers have exponent 1 too
  const std::uint32_t least_of_lanes = exponent > 1 ? static_cast<std::uint32_t>(exponent) << 24 : 1;
  const bool too_small = !hn::AllFalse(bits, hn::Gt(least, hn::Set(bits, 0 - least_of_lanes)));
  const auto fits = [&, end = hn::Set(wide, 2 * begin_of(squares))](const Wide& upper)
                        HWY_ATTR { return hn::AllTrue(wide, hn::Lt(upper, end)); };
  if (too_small || !fits(upper0) || !fits(upper1) || !fits(upper2) || !fits(upper3)) return false;
  squares.elements += count;
  const auto keep = [&](const Wide& upper, const Wide& lower, int k) HWY_ATTR {
    hn::Store(upper, wide, squares.upper + k * lanes);
    hn::Store(lower, wide, squares.lower + k * lanes);
  };
  keep(upper0, lower0, 0);
  keep(upper1, lower1, 1);
  keep(upper2, lower2, 2);
  keep(upper3, lower3, 3);
  return true;
}

HWY_INLINE void empty_lanes(RunningSquares& squares) {
  if (squares.exponent == 0) return;
  const int unit = unit_of(squares);
  const auto begin = std::bit_cast<std::int64_t>(begin_of(squares));
  std::int64_t multiples = 0;
  double rest = 0;
  for (std::int64_t lane = 0; lane < 4 * std::int64_t{hn::MaxLanes(hn::CappedTag<double, 8>())}; ++lane) {
    multiples += std::bit_cast<std::int64_t>(squares.upper[lane]) - begin;
    rest += squares.lower[lane];
  }
  squares.sum.add(multiples, unit);
  squares.sum.add(rest);
  squares.exponent = 0;
}

HWY_INLINE void begin_lanes(int exponent, RunningSquares& squares) {
  squares.exponent = exponent;
  squares.elements = 0;
  std::fill(std::begin(squares.upper), std::end(squares.upper), begin_of(squares));
  std::fill(std::begin(squares.lower), std::end(squares.lower), 0.0);
}

/// The same for any finite elements: a sum of squares of mantissas for each exponent.
template <class T>
HWY_INLINE void add_wide_squares(const T* values, std::int64_t count, SquareSum& squares) {
  std::uint64_t by_exponent[256] = {};
  for (std::int64_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(to_float(values[i])) & 0x7fffffffu;
    const std::uint32_t exponent = bits >> 23;
    const std::uint64_t mantissa = exponent == 0 ? bits : ((bits & 0x7fffffu) | 0x800000u);
    by_exponent[std::max(exponent, 1u)] += mantissa * mantissa;
  }
  for (int exponent = 1; exponent < 255; ++exponent) {
    const std::uint64_t sum = by_exponent[exponent];
    if (sum != 0) squares.add(static_cast<std::int64_t>(sum), 2 * exponent - 300);
  }
}

/// Adds the squares of at most RunningSquares::most_elements elements and returns true, unless one is not
/// finite.
template <class T>
HWY_INLINE bool add_squares(const T* values, std::int64_t count, RunningSquares& squares) {
  if (squares.exponent != 0) {
    if (squares.elements + count > RunningSquares::most_elements) {
      const int exponent = squares.exponent;
      empty_lanes(squares);
      begin_lanes(exponent, squares);
    }
    if (add_narrow_squares(values, count, squares)) return true;
  }
  const MagnitudeRange range = magnitude_range(values, count);
  if (range.greatest >= 0x7f800000u) return false;
  if (range.greatest == 0) return true;
  empty_lanes(squares);
  const auto exponent_of = [](std::uint32_t bits) { return std::max(static_cast<int>(bits >> 23), 1); };
  const int greatest = exponent_of(range.greatest), exponents = greatest - exponent_of(range.least);
  if (exponents > narrow_exponents) {
    add_wide_squares(values, count, squares.sum);
    return true;
  }
  // The range is chosen with room for larger numbers in later blocks, if possible.
  begin_lanes(exponents < narrow_exponents ? greatest + 1 : greatest, squares);
  add_narrow_squares(values, count, squares);
  return true;
}

}  // namespace tranche::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // TRANCHE_KERNELS_CPU_SQUARES_INL_H_
