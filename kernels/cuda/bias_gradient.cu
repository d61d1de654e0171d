// The bias gradient. Compiled without contraction. The order of additions is the CPU's: 64 rows in order,
// then these block sums in order, then the existing gradient.
//
// In the first launch a thread sums 64 rows of four columns and a warp 128 neighbouring columns, with the
// loads of 16 rows in flight. It reads the gradient once and writes 4 / 64 bytes per element. In the second
// launch a thread adds the block sums of a column, with 32 loads in flight. If the workspace does not hold
// all block sums, both are launched again for the next rows.

#include "kernels/cuda/elements.h"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/geometry.h"
#include "kernels/cuda/launch.h"

namespace tranche::kernels::cuda {

namespace {

constexpr int block_rows = 64;
constexpr int row_blocks = 4;  // row blocks of a thread block, one for each warp
constexpr int rows_under_way = 16;
constexpr int sums_under_way = 32;
constexpr int finish_threads = 64;

template <int width, class T>
__global__ void __launch_bounds__(warp_size* row_blocks)
    row_block_sums_kernel(const Elements<T> gradient, const std::int64_t rows, const std::int64_t columns,
                          const std::int64_t first_block, const std::int64_t blocks, float* sums) {
  const std::int64_t column = (std::int64_t{blockIdx.x} * warp_size + threadIdx.x) * width;
  const std::int64_t block = std::int64_t{blockIdx.y} * row_blocks + threadIdx.y;
  if (column >= columns || block >= blocks) return;
  const std::int64_t begin = (first_block + block) * block_rows;
  const std::int64_t end = min(begin + block_rows, rows);
  float sum[width] = {};
  for (std::int64_t row = begin; row < end; row += rows_under_way) {
    typename Elements<T>::template Loaded<width> loaded[rows_under_way] = {};
#pragma unroll
    for (int u = 0; u < rows_under_way; ++u) {
      if (row + u < end) loaded[u] = gradient.template load<width>((row + u) * columns + column);
    }
#pragma unroll
    for (int u = 0; u < rows_under_way; ++u) {
      if (row + u >= end) break;
      float values[width];
      Elements<T>::template widen<width>(loaded[u], values);
      // The sum starts with the first row itself, because 0 + -0 would lose the sign.
#pragma unroll
      for (int k = 0; k < width; ++k) sum[k] = row + u == begin ? values[k] : sum[k] + values[k];
    }
  }
#pragma unroll
  for (int k = 0; k < width; ++k) sums[block * columns + column + k] = sum[k];
}

/// running = running + sums in order, without `running` if `first`; with `last` the result is added to `out`
/// instead of stored.
__global__ void __launch_bounds__(finish_threads)
    add_row_block_sums_kernel(const float* sums, const std::int64_t blocks, const std::int64_t columns,
                              float* running, const bool first, const bool last, float* out) {
  const std::int64_t column = std::int64_t{blockIdx.x} * finish_threads + threadIdx.x;
  if (column >= columns) return;
  float total = first ? 0.0f : running[column];
  for (std::int64_t block = 0; block < blocks; block += sums_under_way) {
    float loaded[sums_under_way] = {};
#pragma unroll
    for (int u = 0; u < sums_under_way; ++u) {
      if (block + u < blocks) loaded[u] = sums[(block + u) * columns + column];
    }
#pragma unroll
    for (int u = 0; u < sums_under_way; ++u) {
      if (block + u >= blocks) break;
      total = first && block + u == 0 ? loaded[u] : total + loaded[u];
    }
  }
  if (last) {
    out[column] = out[column] + total;
  } else {
    running[column] = total;
  }
}

}  // namespace

void bias_gradient(Stream& stream, const ConstTensorView& gradient, const TensorView& bias_gradient,
                   const Workspace& workspace) {
  const std::int64_t columns = bias_gradient.elements();
  const std::int64_t rows = columns == 0 ? 0 : gradient.elements() / columns;
  const std::int64_t row_bytes = columns * 4;
  const std::int64_t all_blocks = divide_round_up(rows, block_rows);
  // One row of the workspace holds the running sums between launches; a grid has at most 65535 blocks in y.
  auto* running = static_cast<float*>(workspace.data);
  auto* sums = running + columns;
  const std::int64_t capacity =
      rows == 0 ? 0 : std::min<std::int64_t>(workspace.bytes / row_bytes - 1, 65535 * row_blocks);
  for (std::int64_t first = 0; first < all_blocks; first += capacity) {
    const std::int64_t blocks = std::min(capacity, all_blocks - first);
    const auto down = static_cast<unsigned>(divide_round_up(blocks, row_blocks));
    with_storage(gradient.dtype, [&](auto storage) {
      using T = decltype(storage);
      constexpr int width = 4;
      const int fits = row_width(columns, width, {demand_of(gradient.data, size_of(gradient.dtype), width)});
      const auto across = static_cast<unsigned>(divide_round_up(columns, std::int64_t{fits} * warp_size));
      launch(stream, "bias_gradient",
             fits == width ? row_block_sums_kernel<width, T> : row_block_sums_kernel<1, T>,
             {.grid = dim3(across, down), .block = dim3(warp_size, row_blocks)}, elements_of<T>(gradient),
             rows, columns, first, blocks, sums);
    });
    launch(stream, "bias_gradient", add_row_block_sums_kernel,
           {.grid = static_cast<unsigned>(divide_round_up(columns, finish_threads)), .block = finish_threads},
           sums, blocks, columns, running, first == 0, first + blocks == all_blocks,
           bias_gradient.as<float>());
  }
}

}  // namespace tranche::kernels::cuda
