#include "kernels/cpu/rope.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

#include "kernels/cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/rope.cpp"
#include "hwy/foreach_target.h"
#include "kernels/cpu/results-inl.h"
#include "kernels/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {

const auto rotated = [](auto a, auto b, auto cosine, auto sine) HWY_ATTR {
  return std::array{hn::Sub(hn::Mul(a, cosine), hn::Mul(b, sine)),
                    hn::Add(hn::Mul(b, cosine), hn::Mul(a, sine))};
};

/// Copies `count` numbers of a table, times `factor`, in the order in which HalfOfPair separates elements of
/// T. rounded_to_upper() supports only some of the NaNs that a caller may pass.
template <class T>
HWY_INLINE void reorder(const float* from, std::int64_t count, float factor, float* to) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto taken = [&](auto tag, const float* at) HWY_ATTR {
    const auto value = hn::Mul(load(tag, at), hn::Set(tag, factor));
    return hn::IfThenElse(hn::IsNaN(value), hn::Set(tag, NAN), value);
  };
  std::int64_t i = 0;
  for (; i + 2 * lanes <= count; i += 2 * lanes) {
    auto lower = taken(d, from + i), upper = taken(d, from + i + lanes);
#if HWY_TARGET != HWY_SCALAR
    if (sizeof(T) == 2) {
      const auto even = hn::ConcatEven(d, upper, lower);
      upper = hn::ConcatOdd(d, upper, lower);
      lower = even;
    }
#endif
    hn::StoreU(lower, d, to + i);
    hn::StoreU(upper, d, to + i + lanes);
  }
  const hn::CappedTag<float, 1> one;
  for (; i < count; ++i) hn::StoreU(taken(one, from + i), one, to + i);
}

/// Heads are rotated in memory order, by parts of the table that stay in a core's first-level cache.
template <class T>
void rotate_row(const Rope& call, std::int64_t row) {
  constexpr std::int64_t part = 256;
  alignas(64) float cosine[part], sine[part];
  const std::int64_t half = call.width / 2;
  const float* table = call.table + row * call.width;
  T* x = static_cast<T*>(call.x) + row * call.heads * call.head_dim;
  for (std::int64_t first = 0; first < half; first += part) {
    const std::int64_t count = std::min(part, half - first);
    reorder<T>(table + first, count, 1.0f, cosine);
    reorder<T>(table + half + first, count, call.inverse ? -1.0f : 1.0f, sine);
    for (std::int64_t head = 0; head < call.heads; ++head) {
      T* low = x + head * call.head_dim + first;
      T* high = low + half;
      for_each_result(count, std::array{low, high}, false, [&](auto d, auto at) HWY_ATTR {
        return rotated(at(d, low), at(d, high), at(d, cosine), at(d, sine));
      });
    }
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
  // Rows with the same position are copies of the first.
  const std::int64_t period = call.positions == nullptr ? call.time : call.rows;
  parallel_ranges(
      call.threads, std::min(period, call.rows), grain, [&](std::int64_t first, std::int64_t count) {
        for (std::int64_t row = first; row < first + count; ++row) {
          const auto position = static_cast<float>(call.positions == nullptr ? call.first_position + row : call.positions[row]);
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
