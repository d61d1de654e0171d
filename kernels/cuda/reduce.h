#pragma once
/// Sums and maxima over the threads of a warp or block, in a fixed tree: every thread gets the same bits.

#include "kernels/cuda/simt.h"

namespace tranche::kernels::cuda {

inline constexpr int most_warps = 32;

template <class T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int distance = warp_size / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  return value;
}

/// Computes `count` sums over the block's threads in x: whole warps, in order, or a power of two that shares
/// its warp with other rows of threads. Beyond one warp it contains a barrier of the block, and `shared` must
/// not be used again before another barrier.
template <int count>
__device__ __forceinline__ void block_sums(float (&values)[count], float (*shared)[count]) {
  const int lanes = static_cast<int>(blockDim.x);
#pragma unroll
  for (float& value : values) {
#pragma unroll
    for (int distance = warp_size / 2; distance > 0; distance /= 2) {
      if (distance < lanes) value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
  }
  const int warps = lanes / warp_size;
  if (warps <= 1) return;
  if (threadIdx.x % warp_size == 0) {
#pragma unroll
    for (int k = 0; k < count; ++k) shared[threadIdx.x / warp_size][k] = values[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < count; ++k) {
    values[k] = shared[0][k];
    for (int warp = 1; warp < warps; ++warp) values[k] += shared[warp][k];
  }
}

}  // namespace tranche::kernels::cuda
