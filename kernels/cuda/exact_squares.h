#pragma once
/// The sum of squares of a thread block's numbers, without rounding: a square is exact in fp64 and is divided
/// into integer multiples of descending powers of two, which are added as integers. So the order of threads
/// and blocks changes no bit.
///
/// A thread block processes blocks of 4096 numbers, 16 per thread, in registers. The greatest magnitude of a
/// block determines the first power of two; each round takes 50 bits, and two rounds are enough if exponents
/// differ by at most 26.

#include <cstdint>

#include "kernels/cuda/reduce.h"
#include "kernels/cuda/simt.h"
#include "tranche/core/exact_sum.h"

namespace tranche::kernels::cuda {

inline constexpr int square_threads = 256;
inline constexpr int squares_each = 16;  // numbers per thread
inline constexpr std::int64_t square_block = square_threads * squares_each;

/// Lives in shared memory of a block of square_threads threads, all of which must make every call.
struct ExactSquares {
  static constexpr int warps = square_threads / warp_size;
  static constexpr int round_bits = 50;  // 4096 multiples below 2^50 fit 63 bits

  std::int64_t limbs[SquareSum::limb_count];
  std::uint32_t greatest_of_warps[warps];
  unsigned long long sums[warps];

  __device__ __forceinline__ void clear() {
    if (threadIdx.x < SquareSum::limb_count) limbs[threadIdx.x] = 0;
    __syncthreads();
  }

  /// The greatest magnitude of the block's numbers, as bits of fp32; 0x7f800000 and above mean that one is
  /// not finite.
  __device__ __forceinline__ std::uint32_t greatest_magnitude(const float (&values)[squares_each]) {
    std::uint32_t greatest = 0;
#pragma unroll
    for (int k = 0; k < squares_each; ++k) {
      greatest = max(greatest, __float_as_uint(values[k]) & 0x7fffffffu);
    }
#pragma unroll
    for (int distance = warp_size / 2; distance > 0; distance /= 2) {
      greatest = max(greatest, __shfl_xor_sync(0xffffffffu, greatest, distance));
    }
    __syncthreads();
    if (threadIdx.x % warp_size == 0) greatest_of_warps[threadIdx.x / warp_size] = greatest;
    __syncthreads();
    for (int warp = 0; warp < warps; ++warp) greatest = max(greatest, greatest_of_warps[warp]);
    return greatest;
  }

  /// Adds finite numbers whose greatest magnitude is `greatest`.
  __device__ __forceinline__ void add(const float (&values)[squares_each], std::uint32_t greatest) {
    double squares[squares_each];
#pragma unroll
    for (int k = 0; k < squares_each; ++k) {
      const auto x = static_cast<double>(values[k]);
      squares[k] = x * x;
    }
    // A square is below 2^(2 exponent - 252), and its last bit is not below 2^-298.
    int unit = 2 * max(static_cast<int>(greatest >> 23), 1) - 252 - round_bits;
    for (int left = greatest != 0; left != 0; unit -= round_bits) {
      const double to_unit = ldexp(1.0, -unit), from_unit = ldexp(1.0, unit);
      unsigned long long sum = 0;
      int rest = 0;
#pragma unroll
      for (int k = 0; k < squares_each; ++k) {
        const auto multiples = static_cast<long long>(squares[k] * to_unit);
        sum += static_cast<unsigned long long>(multiples);
        squares[k] = squares[k] - static_cast<double>(multiples) * from_unit;
        rest |= squares[k] != 0;
      }
      sum = warp_sum(sum);
      left = __syncthreads_or(rest);
      if (threadIdx.x % warp_size == 0) sums[threadIdx.x / warp_size] = sum;
      __syncthreads();
      if (threadIdx.x == 0) {
        for (int warp = 1; warp < warps; ++warp) sum += sums[warp];
        add_to_limbs(sum, unit);
      }
    }
  }

  /// Adds any numbers; values that are not finite count as infinity.
  __device__ __forceinline__ void add(const float (&values)[squares_each]) {
    const std::uint32_t greatest = greatest_magnitude(values);
    if (greatest < 0x7f800000u) {
      add(values, greatest);
    } else if (threadIdx.x == 0) {
      limbs[SquareSum::limb_count - 1] += SquareSum::infinite;
    }
  }

  /// Adds the sum to one in the device's memory, once, by atomics; the caller propagates carries later.
  __device__ __forceinline__ void finish(SquareSum& sum) {
    __syncthreads();
    if (threadIdx.x < SquareSum::limb_count && limbs[threadIdx.x] != 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(&sum.limbs[threadIdx.x]),
                static_cast<unsigned long long>(limbs[threadIdx.x]));
    }
  }

 private:
  /// Adds sum * 2^exponent, with the sum below 2^63, by one thread.
  __device__ void add_to_limbs(std::uint64_t sum, int exponent) {
    const int position = exponent - SquareSum::lowest_exponent;
    const int shift = position % 32;
    std::int64_t* const limb = limbs + position / 32;
    const std::uint64_t low = sum << shift;
    limb[0] += static_cast<std::int64_t>(low & 0xffffffffu);
    limb[1] += static_cast<std::int64_t>(low >> 32);
    limb[2] += shift == 0 ? 0 : static_cast<std::int64_t>(sum >> (64 - shift));
  }
};

}  // namespace tranche::kernels::cuda
