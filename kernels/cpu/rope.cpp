#include "kernels/cpu/rope.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

#include "kernels/cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/rope.cpp"
#include "hwy/foreach_target.h"
#include "kernels/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {

const auto rotated = [](auto a, auto b, auto cosine, auto sine) HWY_ATTR {
  return std::array{hn::Sub(hn::Mul(a, cosine), hn::Mul(b, sine)),
                    hn::Add(hn::Mul(b, cosine), hn::Mul(a, sine))};
};

/// Two vectors of a table in the order in which HalfOfPair takes 16-bit elements apart. Of a caller's NaNs
/// rounded_to_upper() takes only some.
template <class D>
HWY_INLINE std::array<hn::VFromD<D>, 2> halves_of(D d, const float* from, float factor) {
  const auto taken = [&](const float* at) HWY_ATTR {
    const auto value = hn::Mul(load(d, at), hn::Set(d, factor));
    return hn::IfThenElse(hn::IsNaN(value), hn::Set(d, NAN), value);
  };
  const auto lower = taken(from), upper = taken(from + hn::Lanes(d));
#if HWY_TARGET == HWY_SCALAR
  return {lower, upper};
#else
  return {hn::ConcatEven(d, upper, lower), hn::ConcatOdd(d, upper, lower)};
#endif
}

template <class T>
void rotate_row(const Rope& call, std::int64_t row) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t half = call.width / 2;
  const float* cosines = call.table + row * call.width;
  const float* sines = cosines + half;
  const float sign = call.inverse ? -1.0f : 1.0f;
  T* x = static_cast<T*>(call.x) + row * call.heads * call.head_dim;
  std::int64_t i = 0;
  // 16 bits are bound by arithmetic: all heads take the same vectors of the table. fp32 is bound by memory,
  // which is quickest in order.
  for (; sizeof(T) == 2 && i + 2 * lanes <= half; i += 2 * lanes) {
    const auto cosine = halves_of(d, cosines + i, 1.0f), sine = halves_of(d, sines + i, sign);
    for (std::int64_t head = 0; head < call.heads; ++head) {
      T* low = x + head * call.head_dim;
      T* high = low + half;
      const HalfOfPair<0> even{i};
      const HalfOfPair<1> odd{i};
      const auto first = rotated(even(d, low), even(d, high), cosine[0], sine[0]);
      const auto second = rotated(odd(d, low), odd(d, high), cosine[1], sine[1]);
      store_halves<true>(d, first[0], second[0], low + i, false);
      store_halves<true>(d, first[1], second[1], high + i, false);
    }
  }
  for (std::int64_t head = 0; head < call.heads && i < half; ++head) {
    T* low = x + head * call.head_dim + i;
    T* high = low + half;
    for_each_vector(half - i, [&](auto tag, std::int64_t offset) HWY_ATTR {
      const auto cosine = load(tag, cosines + i + offset),
                 sine = hn::Mul(hn::Set(tag, sign), load(tag, sines + i + offset));
      const auto result = rotated(load(tag, low + offset), load(tag, high + offset), cosine, sine);
      store(tag, result[0], low + offset);
      store(tag, result[1], high + offset);
    });
  }
}

void rotate(const Rope& call, std::int64_t first, std::int64_t count) {
  with_floating(call.dtype, [&](auto type) {
    for (std::int64_t row = first; row < first + count; ++row) rotate_row<decltype(type)>(call, row);
  });
}

}  // namespace tranche::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tranche::kernels::cpu {

HWY_EXPORT(rotate);

void rope_table(const RopeTable& call) {
  constexpr std::int64_t grain = 32;  // rows; a sine takes as long as some forty elements elsewhere
  const auto half = static_cast<std::int64_t>(call.frequencies.size());
  // Rows that have the same position are copies of the first.
  const std::int64_t period = call.positions == nullptr ? call.time : call.rows;
  parallel_ranges(
      call.threads, std::min(period, call.rows), grain, [&](std::int64_t first, std::int64_t count) {
        for (std::int64_t row = first; row < first + count; ++row) {
          const auto position = static_cast<float>(call.positions == nullptr ? row : call.positions[row]);
          float* to = call.table + row * 2 * half;
          for (std::int64_t i = 0; i < half; ++i) {
            const double angle = position * call.frequencies[static_cast<std::size_t>(i)];
            to[i] = static_cast<float>(std::cos(angle));
            to[half + i] = static_cast<float>(std::sin(angle));
          }
          for (std::int64_t copy = row + period; copy < call.rows; copy += period) {
            std::copy_n(to, 2 * half, call.table + copy * 2 * half);
          }
        }
      });
}

void rope(const Rope& call) {
  const auto run = HWY_DYNAMIC_DISPATCH(rotate);
  parallel_ranges(call.threads, call.rows, row_grain(call.heads * call.width),
                  [&](std::int64_t first, std::int64_t count) { run(call, first, count); });
}

}  // namespace tranche::kernels::cpu
#endif
