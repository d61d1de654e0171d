#pragma once
/// The loop of element-wise kernels. An operation has
///   template <int n> struct or alias Loaded;
///   template <int n> Loaded<n> load(std::int64_t first) const;      reads the inputs of n elements
///   template <int n> void finish(std::int64_t first, const Loaded<n>&) const;   computes and stores them
/// so that the loads of several groups are under way before the first is used.

#include <cstdint>

#include "kernels/cuda/geometry.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/simt.h"

namespace tranche::kernels::cuda {

inline constexpr int stretch_threads = 256;

/// The share of thread block `block` of `blocks`. Groups lie over the blocks in runs of `unroll` *
/// stretch_threads, so that a block's accesses are neighbours.
template <int width, int unroll, class Operation>
__device__ __forceinline__ void for_stretch(const Operation& operation, const Stretch& stretch,
                                            unsigned block, unsigned blocks) {
  constexpr std::int64_t run = stretch_threads * unroll;
  const int thread = static_cast<int>(threadIdx.x);
  for (std::int64_t start = block * run; start < stretch.groups; start += blocks * run) {
    if (start + run <= stretch.groups) {
      typename Operation::template Loaded<width> loaded[unroll];
#pragma unroll
      for (int u = 0; u < unroll; ++u) {
        loaded[u] = operation.template load<width>(stretch.first_of(start + u * stretch_threads + thread));
      }
#pragma unroll
      for (int u = 0; u < unroll; ++u) {
        operation.template finish<width>(stretch.first_of(start + u * stretch_threads + thread), loaded[u]);
      }
    } else {
      for (std::int64_t group = start + thread; group < stretch.groups; group += stretch_threads) {
        const std::int64_t first = stretch.first_of(group);
        operation.template finish<width>(first, operation.template load<width>(first));
      }
    }
  }
  if (width > 1 && block == 0 && thread < stretch.edges()) {
    const std::int64_t i = stretch.edge(thread);
    operation.template finish<1>(i, operation.template load<1>(i));
  }
}

template <int width, int unroll, class Operation>
__global__ void __launch_bounds__(stretch_threads)
    stretch_kernel(const Operation operation, const Stretch stretch) {
  for_stretch<width, unroll>(operation, stretch, blockIdx.x, gridDim.x);
}

inline LaunchShape stretch_shape(const Stretch& stretch, int unroll) {
  if (stretch.elements == 0) return {.grid = 0, .block = stretch_threads};
  const unsigned blocks =
      grid_blocks(stretch.groups, std::int64_t{unroll} * stretch_threads, multiprocessors(), 8);
  return {.grid = blocks == 0 ? 1 : blocks, .block = stretch_threads};
}

/// One launch; nothing for an empty stretch.
template <int width, int unroll, class Operation>
void launch_stretch(Stream& stream, const char* name, const Operation& operation, const Stretch& stretch) {
  if (stretch.width == width) {
    launch(stream, name, stretch_kernel<width, unroll, Operation>, stretch_shape(stretch, unroll), operation,
           stretch);
  } else {
    launch(stream, name, stretch_kernel<1, unroll, Operation>, stretch_shape(stretch, unroll), operation,
           stretch);
  }
}

}  // namespace tranche::kernels::cuda
