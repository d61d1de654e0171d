// Norm and finite check. A square is exact in fp64 and is cut in whole multiples of descending powers of two,
// which are added as integers: the sum is exact, so the order in which threads and blocks come to it changes
// no bit.
//
// A thread block takes blocks of 4096 elements, 16 a thread, in registers. The greatest magnitude of a
// block decides the first power of two; each round takes 50 bits, and two rounds are enough where exponents
// differ by at most 26. One read of the gradient; 176 bytes, which a launch before has cleared, are added to
// by atomics, once a thread block; a launch behind carries.

#include <algorithm>

#include "kernels/cuda/conversions.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/reduce.h"
#include "kernels/cuda/reduction.h"

namespace tranche::kernels::cuda {

namespace {

constexpr int threads = 256;
constexpr int warps = threads / warp_size;
constexpr int each = 16;  // elements of a thread
constexpr std::int64_t block_elements = threads * each;
constexpr std::int64_t most_thread_blocks = 2048;
constexpr int round_bits = 50;  // 4096 multiples below 2^50 fit 63 bits

__device__ __forceinline__ std::uint32_t block_maximum(std::uint32_t value, std::uint32_t* shared) {
#pragma unroll
  for (int distance = warp_size / 2; distance > 0; distance /= 2) {
    value = max(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  __syncthreads();
  if (threadIdx.x % warp_size == 0) shared[threadIdx.x / warp_size] = value;
  __syncthreads();
  for (int warp = 0; warp < warps; ++warp) value = max(value, shared[warp]);
  return value;
}

/// sum * 2^exponent, with the sum below 2^63, in limbs that one thread has to itself.
__device__ void add_to_limbs(std::int64_t* limbs, std::uint64_t sum, int exponent) {
  const int position = exponent - SquareSum::lowest_exponent;
  const int shift = position % 32;
  std::int64_t* const limb = limbs + position / 32;
  const std::uint64_t low = sum << shift;
  limb[0] += static_cast<std::int64_t>(low & 0xffffffffu);
  limb[1] += static_cast<std::int64_t>(low >> 32);
  limb[2] += shift == 0 ? 0 : static_cast<std::int64_t>(sum >> (64 - shift));
}

template <class T>
__global__ void __launch_bounds__(threads)
    gradient_statistics_kernel(const T* gradient, const std::int64_t elements,
                               GradientStatistics* statistics) {
  __shared__ std::int64_t limbs[SquareSum::limb_count];
  __shared__ std::uint32_t greatest_of_warps[warps];
  __shared__ unsigned long long sums[warps];
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < SquareSum::limb_count) limbs[thread] = 0;
  const std::int64_t blocks = (elements + block_elements - 1) / block_elements;
  for (std::int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const std::int64_t begin = block * block_elements;
    float values[each];
    std::uint32_t greatest = 0;
#pragma unroll
    for (int k = 0; k < each; ++k) {
      const std::int64_t i = begin + k * threads + thread;
      values[k] = i < elements ? widened(gradient[i]) : 0.0f;
      greatest = max(greatest, __float_as_uint(values[k]) & 0x7fffffffu);
    }
    greatest = block_maximum(greatest, greatest_of_warps);
    if (greatest >= 0x7f800000u) {
#pragma unroll
      for (int k = 0; k < each; ++k) {
        const std::int64_t i = begin + k * threads + thread;
        if ((__float_as_uint(values[k]) & 0x7fffffffu) >=
            0x7f800000u) {  // -1 is the greatest unsigned number
          atomicMin(reinterpret_cast<unsigned long long*>(&statistics->first_non_finite),
                    static_cast<unsigned long long>(i));
        }
      }
      continue;
    }
    double squares[each];
#pragma unroll
    for (int k = 0; k < each; ++k) {
      const auto x = static_cast<double>(values[k]);
      squares[k] = x * x;
    }
    // A square is below 2^(2 exponent - 252), its last bit not below 2^-298.
    int unit = 2 * max(static_cast<int>(greatest >> 23), 1) - 252 - round_bits;
    for (int left = greatest != 0; left != 0; unit -= round_bits) {
      const double to_unit = ldexp(1.0, -unit), from_unit = ldexp(1.0, unit);
      unsigned long long sum = 0;
      int rest = 0;
#pragma unroll
      for (int k = 0; k < each; ++k) {
        const auto multiples = static_cast<long long>(squares[k] * to_unit);
        sum += static_cast<unsigned long long>(multiples);
        squares[k] = squares[k] - static_cast<double>(multiples) * from_unit;
        rest |= squares[k] != 0;
      }
      sum = warp_sum(sum);
      left = __syncthreads_or(rest);
      if (thread % warp_size == 0) sums[thread / warp_size] = sum;
      __syncthreads();
      if (thread == 0) {
        for (int warp = 1; warp < warps; ++warp) sum += sums[warp];
        add_to_limbs(limbs, sum, unit);
      }
    }
  }
  __syncthreads();
  if (thread < SquareSum::limb_count && limbs[thread] != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&statistics->squares.limbs[thread]),
              static_cast<unsigned long long>(limbs[thread]));
  }
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
  const auto grid = std::min(divide_round_up(elements, block_elements), most_thread_blocks);
  launch(stream, "gradient_statistics", clear_kernel, {.grid = 1, .block = warp_size}, statistics);
  if (elements == 0) return;
  with_storage(gradient.dtype, [&](auto storage) {
    using T = decltype(storage);
    launch(stream, "gradient_statistics", gradient_statistics_kernel<T>,
           {.grid = static_cast<unsigned>(grid), .block = threads}, static_cast<const T*>(gradient.data),
           elements, statistics);
  });
  launch(stream, "gradient_statistics", normalize_kernel, {.grid = 1, .block = 1}, statistics);
}

}  // namespace tranche::kernels::cuda
