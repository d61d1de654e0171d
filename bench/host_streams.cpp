#include "bench/host_streams.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "hwy/cache_control.h"
#include "kernels/cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/host_streams.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::bench::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Reads two neighbouring vectors and writes them back. `zero` is known only at run time, so the compiler can
/// remove neither.
template <class D>
HWY_INLINE void touch(D d, float* at, hn::VFromD<D> zero) {
  const auto lanes = hn::Lanes(d);
  const auto lower = hn::LoadU(d, at), upper = hn::LoadU(d, at + lanes);
  hn::StoreU(hn::Xor(lower, zero), d, at);
  hn::StoreU(hn::Xor(upper, zero), d, at + lanes);
}

HWY_INLINE void ask(const void* from, std::int64_t bytes) {
  for (std::int64_t b = 0; b < bytes; b += 64) hwy::Prefetch(static_cast<const char*>(from) + b);
}

template <int states, class Gradient, bool prefetched>
HWY_INLINE void pass_loop(const HostStreams& s, std::int64_t first, std::int64_t count, float runtime_zero,
                          std::int64_t ahead) {
  const hn::ScalableTag<float> d;
  const hn::ScalableTag<std::uint16_t> narrow;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto zero = hn::Set(d, runtime_zero);
  const auto* gradient = static_cast<const Gradient*>(s.gradient);
  auto* weight = reinterpret_cast<std::uint16_t*>(s.weight);
  const std::int64_t step = 2 * lanes;
  for (std::int64_t i = first; i + step <= first + count; i += step) {
    if (prefetched) {
      const std::int64_t bytes = step * 4;
      ask(reinterpret_cast<const char*>(gradient + i) + ahead,
          step * static_cast<std::int64_t>(sizeof(Gradient)));
      ask(reinterpret_cast<const char*>(s.master + i) + ahead, bytes);
      if (states > 0) ask(reinterpret_cast<const char*>(s.state[0] + i) + ahead, bytes);
      if (states > 1) ask(reinterpret_cast<const char*>(s.state[1] + i) + ahead, bytes);
    }
    touch(d, s.master + i, zero);
    if (states > 0) touch(d, s.state[0] + i, zero);
    if (states > 1) touch(d, s.state[1] + i, zero);
    if constexpr (sizeof(Gradient) == 2) {
      hn::Stream(hn::LoadU(narrow, gradient + i), narrow, weight + i);
    } else {
      const auto both = hn::Xor(hn::LoadU(d, gradient + i), hn::LoadU(d, gradient + i + lanes));
      hn::Stream(hn::BitCast(narrow, both), narrow, weight + i);
    }
  }
}

template <int states>
HWY_INLINE void pass_states(const HostStreams& s, std::int64_t first, std::int64_t count, float zero,
                            std::int64_t ahead) {
  if (size_of(s.gradient_type) == 2) {
    ahead > 0 ? pass_loop<states, std::uint16_t, true>(s, first, count, zero, ahead)
              : pass_loop<states, std::uint16_t, false>(s, first, count, zero, ahead);
  } else {
    ahead > 0 ? pass_loop<states, float, true>(s, first, count, zero, ahead)
              : pass_loop<states, float, false>(s, first, count, zero, ahead);
  }
}

void pass_range(const HostStreams& s, std::int64_t first, std::int64_t count, float zero,
                std::int64_t ahead) {
  if (s.states == 0) pass_states<0>(s, first, count, zero, ahead);
  if (s.states == 1) pass_states<1>(s, first, count, zero, ahead);
  if (s.states == 2) pass_states<2>(s, first, count, zero, ahead);
}

/// Part `part` of the `parts` parts of a mixed pass.
void mixed_part(const MixedStream& s, std::int64_t part, std::int64_t parts, float runtime_zero) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto slice = [&](auto* memory, std::int64_t bytes) {
    constexpr std::int64_t line = 128;
    const std::int64_t first = bytes / line * part / parts * line,
                       end = bytes / line * (part + 1) / parts * line;
    using Float =
        std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(memory)>>, const float, float>;
    return std::pair(reinterpret_cast<Float*>(memory + first), (end - first) / 4);
  };
  const auto zero = hn::Set(d, runtime_zero);
  auto lower = zero, upper = zero;
  const auto [read, read_count] = slice(s.read, s.read_bytes);
  for (std::int64_t i = 0; i < read_count; i += 2 * lanes) {
    lower = hn::Xor(lower, hn::LoadU(d, read + i));
    upper = hn::Xor(upper, hn::LoadU(d, read + i + lanes));
  }
  const auto [updated, updated_count] = slice(s.updated, s.updated_bytes);
  for (std::int64_t i = 0; i < updated_count; i += 2 * lanes) touch(d, updated + i, zero);
  const auto [written, written_count] = slice(s.written, s.written_bytes);
  for (std::int64_t i = 0; i < written_count; i += 2 * lanes) {
    if (s.non_temporal) {
      hn::Stream(lower, d, written + i);
      hn::Stream(upper, d, written + i + lanes);
    } else {
      hn::StoreU(lower, d, written + i);
      hn::StoreU(upper, d, written + i + lanes);
    }
  }
  // This store never happens, but keeps the loads if nothing is written.
  if (hn::GetLane(hn::Xor(lower, upper)) == 12345.0f) const_cast<char*>(s.read)[0] = 0;
}

void triad_range(float* a, const float* b, const float* c, std::int64_t first, std::int64_t count) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto scale = hn::Set(d, 3.0f);
  for (std::int64_t i = first; i + lanes <= first + count; i += lanes) {
    hn::Stream(hn::Add(hn::LoadU(d, b + i), hn::Mul(scale, hn::LoadU(d, c + i))), d, a + i);
  }
}

}  // namespace tranche::bench::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tranche::bench {

HWY_EXPORT(pass_range);
HWY_EXPORT(mixed_part);
HWY_EXPORT(triad_range);

void pass_without_arithmetic(const HostStreams& streams, int threads, std::int64_t ahead) {
  const volatile float zero = 0;
  kernels::cpu::parallel_ranges(threads, streams.elements, kernels::cpu::parallel_grain,
                                [&](std::int64_t first, std::int64_t count) {
                                  HWY_DYNAMIC_DISPATCH(pass_range)(streams, first, count, zero, ahead);
                                  hwy::FlushStream();
                                });
}

void mixed_pass(const MixedStream& streams, int threads) {
  const volatile float zero = 0;
  // Short parts mix reads and writes closely, as a kernel does: parts of 4096 bytes take up to 1.7 times as
  // long. Even shorter parts would be limited by their loops.
  constexpr std::int64_t part_bytes = 512, grain = 256;
  const std::int64_t longest = std::max({streams.read_bytes, streams.written_bytes, streams.updated_bytes});
  const std::int64_t parts = std::max<std::int64_t>(1, longest / part_bytes);
  kernels::cpu::parallel_ranges(threads, parts, grain, [&](std::int64_t first, std::int64_t count) {
    for (std::int64_t part = first; part < first + count; ++part) {
      HWY_DYNAMIC_DISPATCH(mixed_part)(streams, part, parts, zero);
    }
    hwy::FlushStream();
  });
}

void triad(float* a, const float* b, const float* c, std::int64_t elements, int threads) {
  kernels::cpu::parallel_ranges(threads, elements, kernels::cpu::parallel_grain,
                                [&](std::int64_t first, std::int64_t count) {
                                  HWY_DYNAMIC_DISPATCH(triad_range)(a, b, c, first, count);
                                  hwy::FlushStream();
                                });
}

}  // namespace tranche::bench
#endif
