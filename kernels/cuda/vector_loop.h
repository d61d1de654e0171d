#pragma once
/// The loop of element-wise kernels. An operation has
///   template <int n> struct or alias Loaded;
///   template <int n> Loaded<n> load(std::int64_t first) const;      reads the inputs of n elements
///   template <int n> void finish(std::int64_t first, const Loaded<n>&) const;   computes and stores them
/// so that the loads of several groups are in flight before the first is used.

#include <cstdint>

#include "kernels/cuda/geometry.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/simt.h"

namespace tranche::kernels::cuda {

inline constexpr int vector_loop_threads = 256;

/// The part of thread block `block` of `blocks`. Groups are assigned to blocks in runs of `unroll` *
/// vector_loop_threads, so that a block's accesses are adjacent.
template <int width, int unroll, class Operation>
__device__ __forceinline__ void for_vector_range(const Operation& operation, const VectorRange& range,
                                                 unsigned block, unsigned blocks) {
  constexpr std::int64_t run = vector_loop_threads * unroll;
  const int thread = static_cast<int>(threadIdx.x);
  for (std::int64_t start = block * run; start < range.groups; start += blocks * run) {
    if (start + run <= range.groups) {
      typename Operation::template Loaded<width> loaded[unroll];
#pragma unroll
      for (int u = 0; u < unroll; ++u) {
        loaded[u] = operation.template load<width>(range.first_of(start + u * vector_loop_threads + thread));
      }
#pragma unroll
      for (int u = 0; u < unroll; ++u) {
        operation.template finish<width>(range.first_of(start + u * vector_loop_threads + thread), loaded[u]);
      }
    } else {
      for (std::int64_t group = start + thread; group < range.groups; group += vector_loop_threads) {
        const std::int64_t first = range.first_of(group);
        operation.template finish<width>(first, operation.template load<width>(first));
      }
    }
  }
  if (width > 1 && block == 0 && thread < range.edges()) {
    const std::int64_t i = range.edge(thread);
    operation.template finish<1>(i, operation.template load<1>(i));
  }
}

template <int width, int unroll, class Operation>
__global__ void __launch_bounds__(vector_loop_threads)
    vector_loop_kernel(const Operation operation, const VectorRange range) {
  for_vector_range<width, unroll>(operation, range, blockIdx.x, gridDim.x);
}

inline LaunchShape vector_loop_shape(const VectorRange& range, int unroll) {
  if (range.elements == 0) return {.grid = 0, .block = vector_loop_threads};
  const unsigned blocks =
      grid_blocks(range.groups, std::int64_t{unroll} * vector_loop_threads, multiprocessors(), 8);
  return {.grid = blocks == 0 ? 1 : blocks, .block = vector_loop_threads};
}

/// Makes one launch; none for an empty range.
template <int width, int unroll, class Operation>
void launch_vector_loop(Stream& stream, const char* name, const Operation& operation,
                        const VectorRange& range) {
  if (range.width == width) {
    launch(stream, name, vector_loop_kernel<width, unroll, Operation>, vector_loop_shape(range, unroll),
           operation, range);
  } else {
    launch(stream, name, vector_loop_kernel<1, unroll, Operation>, vector_loop_shape(range, unroll),
           operation, range);
  }
}

}  // namespace tranche::kernels::cuda
