#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/versions.h"
#include "tranche/kernels/reduction.h"

namespace tranche::kernels::cpu {

/// How far ahead a sum of so many pieces asks for each of them. As measured on a Zen 4 whose memory copies
/// 90 GB/s: with 1024 bytes four pieces take a quarter longer than with none; two take least with 192.
/// Intel's processors, where 1024 was found to be best for optimizers, keep it, and so does a single piece.
inline std::int64_t sum_prefetch_bytes(std::size_t pieces) {
#if defined(__x86_64__)
  if (__builtin_cpu_is("intel")) return 1024;
#endif
  return pieces == 1 ? 1024 : pieces == 2 ? 192 : 0;
}

/// As in kernels/reduction.h, arguments checked, on the calling thread and `threads - 1` more.
OnThreads<decltype(kernels::ordered_sum)> ordered_sum;
OnThreads<decltype(kernels::rounded_sum)> rounded_sum;
OnThreads<decltype(kernels::gradient_statistics)> gradient_statistics;
OnThreads<decltype(kernels::add_digest)> add_digest;

/// Adds the squares of at most 4096 elements without rounding; of one that is not finite, infinity.
void add_squares(const ConstTensorView& values, SquareSum& squares);

}  // namespace tranche::kernels::cpu
