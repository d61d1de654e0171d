// The norm and the check for non-finite numbers (exact_squares.h). The gradient is read once. The first
// launch clears 176 bytes, to which each thread block of the second adds once by atomics; a third launch
// propagates carries.

#include <algorithm>
#include <type_traits>

#include "kernels/cuda/conversions.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/exact_squares.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/reduction.h"

namespace tranche::kernels::cuda {

namespace {

constexpr std::int64_t most_thread_blocks = 2048;

/// Blocks per multiprocessor. With four a thread has 64 registers, which is one too few for float16; with
/// three it has 80.
template <class T>
__global__ void __launch_bounds__(square_threads, std::is_same_v<T, float16> ? 3 : 4)
    gradient_statistics_kernel(const T* gradient, const std::int64_t elements,
                               GradientStatistics* statistics) {
  __shared__ ExactSquares squares;
  const int thread = static_cast<int>(threadIdx.x);
  squares.clear();
  const std::int64_t blocks = (elements + square_block - 1) / square_block;
  for (std::int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const std::int64_t begin = block * square_block;
    float values[squares_each];
#pragma unroll
    for (int k = 0; k < squares_each; ++k) {
      const std::int64_t i = begin + k * square_threads + thread;
      values[k] = i < elements ? widened(gradient[i]) : 0.0f;
    }
    const std::uint32_t greatest = squares.greatest_magnitude(values);
    if (greatest >= 0x7f800000u) {
#pragma unroll
      for (int k = 0; k < squares_each; ++k) {
        const std::int64_t i = begin + k * square_threads + thread;
        if ((__float_as_uint(values[k]) & 0x7fffffffu) >=
            0x7f800000u) {  // as an unsigned number the initial -1 is the greatest
          atomicMin(reinterpret_cast<unsigned long long*>(&statistics->first_non_finite),
                    static_cast<unsigned long long>(i));
        }
      }
      continue;
    }
    squares.add(values, greatest);
  }
  squares.finish(statistics->squares);
}

__global__ void clear_kernel(GradientStatistics* statistics) {
  if (threadIdx.x < SquareSum::limb_count) statistics->squares.limbs[threadIdx.x] = 0;
  if (threadIdx.x == 0) statistics->first_non_finite = -1;
}

__global__ void normalize_kernel(GradientStatistics* statistics) {
  std::int64_t* const limbs = statistics->squares.limbs;
  for (int i = 0; i + 1 < SquareSum::limb_count; ++i) {
    limbs[i + 1] += limbs[i] >> 32;
    limbs[i] &= 0xffffffff;
  }
}

}  // namespace

void gradient_statistics(Stream& stream, const ConstTensorView& gradient, GradientStatistics* statistics) {
  const std::int64_t elements = gradient.elements();
  const auto grid = std::min(divide_round_up(elements, square_block), most_thread_blocks);
  launch(stream, "gradient_statistics", clear_kernel, {.grid = 1, .block = warp_size}, statistics);
  if (elements == 0) return;
  with_storage(gradient.dtype, [&](auto storage) {
    using T = decltype(storage);
    launch(stream, "gradient_statistics", gradient_statistics_kernel<T>,
           {.grid = static_cast<unsigned>(grid), .block = square_threads},
           static_cast<const T*>(gradient.data), elements, statistics);
  });
  launch(stream, "gradient_statistics", normalize_kernel, {.grid = 1, .block = 1}, statistics);
}

}  // namespace tranche::kernels::cuda
