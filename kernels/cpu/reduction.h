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

/// A sum of squares without rounding that is made of blocks. It runs in fp64 lanes, which go over into `sum`
/// when they are full or do not fit the numbers of a block (squares-inl.h).
struct RunningSquares {
  static constexpr std::int64_t most_elements = 4096;
  SquareSum sum;
  int exponent = 0;              ///< of the greatest numbers that the lanes take; 0: they are empty
  std::int64_t elements = 0;     ///< in the lanes
  alignas(64) double upper[32];  ///< four vectors of at most 8 lanes
  alignas(64) double lower[32];
};
/// Adds the squares of at most RunningSquares::most_elements elements; of one that is not finite, infinity.
void add_squares(const ConstTensorView& values, RunningSquares& squares);
/// All that was added.
const SquareSum& sum_of(RunningSquares& squares);

}  // namespace tranche::kernels::cpu
