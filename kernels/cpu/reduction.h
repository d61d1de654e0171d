#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/versions.h"
#include "tranche/kernels/reduction.h"

namespace tranche::kernels::cpu {

/// The prefetch distance for a sum of so many operands. Measured on a Zen 4 that copies memory at 90 GB/s:
/// with 1024 bytes four operands take a quarter longer than without prefetch; two are fastest with 192.
/// Intel's processors, where 1024 was best for optimizers, keep that, and so does a single operand.
inline std::int64_t sum_prefetch_bytes(std::size_t pieces) {
#if defined(__x86_64__)
  if (__builtin_cpu_is("intel")) return 1024;
#endif
  return pieces == 1 ? 1024 : pieces == 2 ? 192 : 0;
}

/// Like kernels/reduction.h with checked arguments, on the calling thread and `threads - 1` more.
OnThreads<decltype(kernels::ordered_sum)> ordered_sum;
OnThreads<decltype(kernels::rounded_sum)> rounded_sum;
OnThreads<decltype(kernels::gradient_statistics)> gradient_statistics;
OnThreads<decltype(kernels::add_digest)> add_digest;

/// A sum of squares without rounding, built from blocks. It runs in fp64 lanes, which are added to `sum` when
/// they are full or cannot represent a block's numbers (squares-inl.h).
struct RunningSquares {
  static constexpr std::int64_t most_elements = 4096;
  SquareSum sum;
  int exponent = 0;              ///< of the largest numbers that the lanes accept; 0: they are empty
  std::int64_t elements = 0;     ///< number added to the lanes
  alignas(64) double upper[32];  ///< four vectors of at most 8 lanes
  alignas(64) double lower[32];
};
/// Adds the squares of at most RunningSquares::most_elements elements; a value that is not finite counts as
/// infinity.
void add_squares(const ConstTensorView& values, RunningSquares& squares);
/// The sum of everything added so far.
const SquareSum& sum_of(RunningSquares& squares);

}  // namespace tranche::kernels::cpu
