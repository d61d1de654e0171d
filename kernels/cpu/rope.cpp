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

template <class T>
void rotate_row(const Rope& call, std::int64_t row) {
  const std::int64_t half = call.width / 2;
  const float* cosines = call.table + row * call.width;
  const float* sines = cosines + half;
  const float sign = call.inverse ? -1.0f : 1.0f;
  for (std::int64_t head = 0; head < call.heads; ++head) {
    T* low = static_cast<T*>(call.x) + (row * call.heads + head) * call.head_dim;
    T* high = low + half;
    const auto rotated = [&](auto d, std::int64_t i) HWY_ATTR {
      const auto cosine = load(d, cosines + i), sine = hn::Mul(hn::Set(d, sign), load(d, sines + i));
      const auto a = load(d, low + i), b = load(d, high + i);
      return std::array{hn::Sub(hn::Mul(a, cosine), hn::Mul(b, sine)),
                        hn::Add(hn::Mul(b, cosine), hn::Mul(a, sine))};
    };
    const hn::ScalableTag<float> d;
    const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
    std::int64_t i = 0;
    for (; i + 2 * lanes <= half; i += 2 * lanes) {  // 16-bit elements are packed two vectors at a time
      const auto first = rotated(d, i), second = rotated(d, i + lanes);
      store_pair(d, first[0], second[0], low + i, false);
      store_pair(d, first[1], second[1], high + i, false);
    }
    for_each_vector(half - i, [&](auto tag, std::int64_t offset) HWY_ATTR {
      const auto result = rotated(tag, i + offset);
      store(tag, result[0], low + i + offset);
      store(tag, result[1], high + i + offset);
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
