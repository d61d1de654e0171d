// Norm and finite check. The contract fixes the order of every addition: eight fp64 lanes a block of 4096
// elements, each a chain of 512, then the chain of the blocks' sums. Compiled without contraction, so the
// bits are the CPU's.
//
// First launch: eight threads a block, a thread a lane. Rows of 512 bytes of each of eight blocks go to
// shared memory by 16-byte asynchronous copies, `stages` of them in flight; one read of the gradient, 8 bytes
// a block written. Second launch: one thread adds the blocks' sums, which the others load. It reads next to
// nothing but is a chain of one dependent fp64 addition (some 8 cycles) for each 4096 elements: 5 us for a
// shard of 4M elements, whose first launch takes 4 us at the bandwidth of an H200 when it fills the device;
// the share of the chain stays the same for larger shards.

#include <algorithm>

#include "kernels/cuda/conversions.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/reduction.h"

namespace tranche::kernels::cuda {

namespace {

constexpr int lanes = 8;
constexpr int norm_blocks = 8;  // of a thread block
constexpr int block_threads = norm_blocks * lanes;
constexpr int row_bytes = 512;
constexpr int row_chunks = row_bytes / 16;
constexpr int pitch =
    row_bytes + 32;  // warps read eight numbers of four rows at once: other banks for each row
constexpr int stages = 4;
constexpr int finish_threads = 256;
constexpr int sums_each = 8;  // block sums that a thread brings at a time
constexpr std::int64_t no_index = INT64_MAX;

/// Copies row `row` (of row_bytes) of the thread block's norm blocks to a stage. What lies behind the
/// gradient's end is zero, whose square changes no sum.
template <class T>
__device__ __forceinline__ void load(const T* gradient, std::int64_t elements, std::int64_t first_block,
                                     int row, unsigned char* stage, bool aligned) {
  constexpr int row_elements = row_bytes / static_cast<int>(sizeof(T));
  constexpr int chunk_elements = 16 / static_cast<int>(sizeof(T));
#pragma unroll
  for (int c = 0; c < norm_blocks * row_chunks / block_threads; ++c) {
    const int chunk = c * block_threads + static_cast<int>(threadIdx.x);
    const int block = chunk / row_chunks;
    const int column = chunk % row_chunks;
    const std::int64_t first = (first_block + block) * norm_block_elements +
                               std::int64_t{row} * row_elements + column * chunk_elements;
    unsigned char* to = stage + block * pitch + column * 16;
    if (aligned && (first + chunk_elements <= elements || first >= elements)) {
      cp_async_16(to, first < elements ? gradient + first : gradient, first < elements);
    } else {
#pragma unroll
      for (int e = 0; e < chunk_elements; ++e) {
        reinterpret_cast<T*>(to)[e] = first + e < elements ? gradient[first + e] : T{};
      }
    }
  }
}

template <class T>
__global__ void __launch_bounds__(block_threads)
    block_sums_kernel(const T* gradient, const std::int64_t elements, const std::int64_t first_norm_block,
                      const std::int64_t norm_block_count, double* sums, const bool aligned) {
  __shared__ __align__(16) unsigned char stage[stages][norm_blocks * pitch];
  constexpr int row_elements = row_bytes / static_cast<int>(sizeof(T));
  constexpr int rows = static_cast<int>(norm_block_elements) / row_elements;
  const std::int64_t first_block = first_norm_block + std::int64_t{blockIdx.x} * norm_blocks;
  const int block = static_cast<int>(threadIdx.x) / lanes;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
#pragma unroll
  for (int s = 0; s < stages - 1; ++s) {
    load(gradient, elements, first_block, s, stage[s], aligned);
    cp_async_commit();
  }
  double sum = 0;
  for (int row = 0; row < rows; ++row) {
    cp_async_wait<stages - 2>();
    __syncthreads();
    if (row + stages - 1 < rows) {
      load(gradient, elements, first_block, row + stages - 1, stage[(row + stages - 1) % stages], aligned);
    }
    cp_async_commit();
    const T* values = reinterpret_cast<const T*>(stage[row % stages] + block * pitch) + lane;
#pragma unroll 16
    for (int i = 0; i < row_elements; i += lanes) {
      const auto x = static_cast<double>(widened(values[i]));
      sum = sum + x * x;
    }
  }
  // ((0+1)+(2+3))+((4+5)+(6+7))
#pragma unroll
  for (int distance = 1; distance < lanes; distance *= 2) {
    sum = sum + __shfl_xor_sync(0xffffffffu, sum, distance);
  }
  const std::int64_t mine = std::int64_t{blockIdx.x} * norm_blocks + block;
  if (lane == 0 && mine < norm_block_count) sums[mine] = sum;
}

/// The least of the block's values, for every thread.
__device__ __forceinline__ std::int64_t least_of_block(std::int64_t value, std::int64_t* shared) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = min(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  __syncthreads();
  if (threadIdx.x % warp_size == 0) shared[threadIdx.x / warp_size] = value;
  __syncthreads();
  for (int warp = 0; warp < finish_threads / warp_size; ++warp) value = min(value, shared[warp]);
  return value;
}

/// Adds `count` block sums in order to statistics' (or to zero with `first`). A block's sum is finite exactly
/// when its elements are: squares of fp32 numbers stay far below the range of fp64.
template <class T>
__global__ void __launch_bounds__(finish_threads)
    finish_statistics_kernel(const T* gradient, const std::int64_t elements,
                             const std::int64_t first_norm_block, const std::int64_t count,
                             const double* sums, GradientStatistics* statistics, const bool first) {
  constexpr int tile = finish_threads * sums_each;
  __shared__ double staged[2][tile];
  __shared__ std::int64_t least[finish_threads / warp_size];
  const int thread = static_cast<int>(threadIdx.x);
  std::int64_t suspect = no_index;
  const auto stage_tile = [&](std::int64_t start, double* to) {
#pragma unroll
    for (int k = 0; k < sums_each; ++k) {
      const std::int64_t block = start + k * finish_threads + thread;
      const double sum = block < count ? sums[block] : 0.0;
      to[k * finish_threads + thread] = sum;
      if (!isfinite(sum)) suspect = min(suspect, block);
    }
  };
  double total = first ? 0.0 : statistics->sum_of_squares;
  const std::int64_t found_before = first ? -1 : statistics->first_non_finite;
  stage_tile(0, staged[0]);
  for (std::int64_t start = 0; start < count; start += tile) {
    __syncthreads();
    const int now = static_cast<int>(start / tile % 2);
    if (thread == finish_threads - 1) {  // the chain; the other warps load the next tile meanwhile
      const int end = static_cast<int>(min(std::int64_t{tile}, count - start));
#pragma unroll 8
      for (int i = 0; i < end; ++i) total = total + staged[now][i];
    }
    if (start + tile < count) stage_tile(start + tile, staged[1 - now]);
  }
  const std::int64_t bad_block = least_of_block(suspect, least);
  std::int64_t found = no_index;
  if (bad_block != no_index) {
    const std::int64_t begin = (first_norm_block + bad_block) * norm_block_elements;
    const std::int64_t end = min(begin + norm_block_elements, elements);
    for (std::int64_t i = begin + thread; i < end; i += finish_threads) {
      if (!isfinite(widened(gradient[i]))) found = min(found, i);
    }
  }
  found = least_of_block(found, least);
  if (thread == finish_threads - 1) {
    statistics->sum_of_squares = total;
    statistics->first_non_finite = found_before >= 0 ? found_before : found == no_index ? -1 : found;
  }
}

}  // namespace

void gradient_statistics(Stream& stream, const ConstTensorView& gradient, GradientStatistics* statistics,
                         const Workspace& workspace) {
  const std::int64_t elements = gradient.elements();
  const std::int64_t blocks = divide_round_up(elements, norm_block_elements);
  const std::int64_t capacity = std::min<std::int64_t>(workspace.bytes / 8, std::int64_t{1} << 20);
  auto* sums = static_cast<double*>(workspace.data);
  const bool aligned = reinterpret_cast<std::uintptr_t>(gradient.data) % 16 == 0;
  with_storage(gradient.dtype, [&](auto storage) {
    using T = decltype(storage);
    const auto* data = static_cast<const T*>(gradient.data);
    std::int64_t first = 0;
    do {  // once for no elements, whose statistics are written too
      const std::int64_t count = std::min(capacity, blocks - first);
      launch(stream, "gradient_statistics", block_sums_kernel<T>,
             {.grid = static_cast<unsigned>(divide_round_up(count, norm_blocks)), .block = block_threads},
             data, elements, first, count, sums, aligned);
      launch(stream, "gradient_statistics", finish_statistics_kernel<T>, {.grid = 1, .block = finish_threads},
             data, elements, first, count, sums, statistics, first == 0);
      first += count;
    } while (first < blocks);
  });
}

}  // namespace tranche::kernels::cuda
