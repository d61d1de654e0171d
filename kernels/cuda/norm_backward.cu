// Layer norm and RMS norm, backward. In the first launch a block loops over its rows, several at a time, and
// keeps the sums for the parameters' gradients of its columns in registers; it reads x and dy once and writes
// dx once. The second launch adds the blocks' sums in a fixed tree. The assignment of rows to blocks depends
// only on the shape and the workspace.
//
// Bytes per element: size(x) + size(dy) + size(dx), and size(dx) again to accumulate. In addition the sums
// take 16 bytes (8 for RMS norm) per column and block, which stay in the L2 cache; a block has 16 rows or
// more.

#include <algorithm>

#include "kernels/cuda/conversions.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/geometry.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/norm.h"
#include "kernels/cuda/reduce.h"

namespace tranche::kernels::cuda {

namespace {

constexpr int most_threads = 512;
constexpr int any_threads = 256;
constexpr std::int64_t least_rows = 16;  // least number of rows of a block
// RMS norm's rows that are narrow enough for a warp, such as heads, use blocks of this size.
constexpr int narrow_threads = 256;
constexpr std::int64_t least_narrow_rows = 64;
constexpr std::int64_t most_blocks = 1024;
constexpr int finish_columns = warp_size;
constexpr int finish_slices = 16;

/// The number of parameters: weight and bias, or weight alone for RMS norm, whose `mean` is null.
template <bool centred>
inline constexpr int parameters = centred ? 2 : 1;

template <class T>
struct Backward {
  Elements<T> dy, x, weight, dx;
  const float* mean;
  const float* rstd;
  float* sums;  ///< [blocks][parameters][columns]
  std::int64_t rows, columns, rows_each;
  bool accumulate;
};

/// dx of one group. With h = (x - mean) rstd and g = dy weight: dx = rstd (g - mean(g) - h mean(g h)). RMS
/// norm takes 0 for the mean of x and for mean(g).
template <int n>
__device__ __forceinline__ void gradient_of(const float (&x)[n], const float (&dy)[n],
                                            const float (&weight)[n], float mean, float rstd, float mean_g,
                                            float mean_gh, float (&dx)[n]) {
#pragma unroll
  for (int k = 0; k < n; ++k) {
    const float h = (x[k] - mean) * rstd;
    dx[k] = rstd * (dy[k] * weight[k] - mean_g - h * mean_gh);
  }
}

/// x runs over a row's columns, y over rows that are processed side by side (only for RMS norm).
template <class T, bool centred, int vectors, int together>
__global__ void __launch_bounds__(most_threads) backward_kernel(const Backward<T> call) {
  constexpr int width = 16 / static_cast<int>(sizeof(T));
  using Operand = Elements<T>;
  using Group = typename Operand::template Loaded<width>;
  constexpr int each = parameters<centred>;  // sums of a row: sum of g h, and sum of g if it is centred
  __shared__ float shared[2][most_threads / warp_size][each * together];
  const std::int64_t begin = blockIdx.x * call.rows_each;
  const std::int64_t end = min(begin + call.rows_each, call.rows);
  const auto count = static_cast<float>(call.columns);
  std::int64_t column[vectors];
  Group weight[vectors] = {};
  float weight_sum[vectors][width] = {}, bias_sum[vectors][width] = {};
#pragma unroll
  for (int v = 0; v < vectors; ++v) {
    column[v] = (std::int64_t{v} * blockDim.x + threadIdx.x) * width;
    if (column[v] < call.columns) weight[v] = call.weight.template load<width>(column[v]);
  }
  const std::int64_t side = centred ? 1 : blockDim.y;
  int parity = 0;
  for (std::int64_t base = begin; base < end; base += together * side, parity ^= 1) {
    const auto row_of = [&](int r) { return base + r * side + threadIdx.y; };
    Group x[together][vectors] = {}, dy[together][vectors] = {}, held[together][vectors] = {};
    float mean[together] = {}, rstd[together] = {};
#pragma unroll
    for (int r = 0; r < together; ++r) {
      if (row_of(r) >= end) break;
#pragma unroll
      for (int v = 0; v < vectors; ++v) {
        if (column[v] >= call.columns) continue;
        const std::int64_t i = row_of(r) * call.columns + column[v];
        x[r][v] = call.x.template load<width>(i);
        dy[r][v] = call.dy.template load<width>(i);
        if (call.accumulate) held[r][v] = call.dx.template load<width>(i);
      }
      if constexpr (centred) mean[r] = call.mean[row_of(r)];
      rstd[r] = call.rstd[row_of(r)];
    }
    // Rows and columns that do not exist have dy = 0 and add nothing.
    float sums[each * together] = {};
#pragma unroll
    for (int r = 0; r < together; ++r) {
#pragma unroll
      for (int v = 0; v < vectors; ++v) {
        float xs[width], dys[width], weights[width];
        Operand::template widen<width>(x[r][v], xs);
        Operand::template widen<width>(dy[r][v], dys);
        Operand::template widen<width>(weight[v], weights);
#pragma unroll
        for (int k = 0; k < width; ++k) {
          const float h = (xs[k] - mean[r]) * rstd[r];
          const float g = dys[k] * weights[k];
          if constexpr (centred) sums[each * r] += g;
          sums[each * r + each - 1] += g * h;
          weight_sum[v][k] += dys[k] * h;
          if constexpr (centred) bias_sum[v][k] += dys[k];
        }
      }
    }
    block_sums(sums, shared[parity]);
#pragma unroll
    for (int r = 0; r < together; ++r) {
      if (row_of(r) >= end) break;
#pragma unroll
      for (int v = 0; v < vectors; ++v) {
        if (column[v] >= call.columns) continue;
        float xs[width], dys[width], weights[width], gradient[width];
        Operand::template widen<width>(x[r][v], xs);
        Operand::template widen<width>(dy[r][v], dys);
        Operand::template widen<width>(weight[v], weights);
        gradient_of<width>(xs, dys, weights, mean[r], rstd[r], centred ? sums[each * r] / count : 0.0f,
                           sums[each * r + each - 1] / count, gradient);
        if (call.accumulate) {
          float before[width];
          Operand::template widen<width>(held[r][v], before);
#pragma unroll
          for (int k = 0; k < width; ++k) gradient[k] = before[k] + gradient[k];
        }
        call.dx.template store_fast<width>(row_of(r) * call.columns + column[v], gradient);
      }
    }
  }
  if constexpr (!centred && vectors == 1) {
    __shared__ float gathered[narrow_threads][width];
    if (blockDim.y > 1) {
#pragma unroll
      for (int k = 0; k < width; ++k) gathered[threadIdx.y * blockDim.x + threadIdx.x][k] = weight_sum[0][k];
      __syncthreads();
      if (threadIdx.y > 0) return;
      for (unsigned y = 1; y < blockDim.y; ++y) {
#pragma unroll
        for (int k = 0; k < width; ++k) weight_sum[0][k] += gathered[y * blockDim.x + threadIdx.x][k];
      }
    }
  }
  float* sums = call.sums + std::int64_t{blockIdx.x} * parameters<centred> * call.columns;
#pragma unroll
  for (int v = 0; v < vectors; ++v) {
    if (column[v] >= call.columns) continue;
#pragma unroll
    for (int k = 0; k < width; ++k) {
      sums[column[v] + k] = weight_sum[v][k];
      if constexpr (centred) sums[call.columns + column[v] + k] = bias_sum[v][k];
    }
  }
}

/// This variant supports any number of columns at any address; the sums of a block's columns are in the
/// workspace.
template <class T, bool centred>
__global__ void __launch_bounds__(any_threads) backward_any_kernel(const Backward<T> call) {
  __shared__ float shared[2][any_threads / warp_size][2];
  const std::int64_t begin = blockIdx.x * call.rows_each;
  const std::int64_t end = min(begin + call.rows_each, call.rows);
  const auto count = static_cast<float>(call.columns);
  float* weight_sums = call.sums + std::int64_t{blockIdx.x} * parameters<centred> * call.columns;
  float* bias_sums = weight_sums + call.columns;
  int parity = 0;
  for (std::int64_t row = begin; row < end; ++row, parity ^= 1) {
    const std::int64_t start = row * call.columns;
    const float mean = centred ? call.mean[row] : 0.0f, rstd = call.rstd[row];
    float sums[2] = {};
    for (std::int64_t c = threadIdx.x; c < call.columns; c += blockDim.x) {
      const float h = (widened(*call.x.at(start + c)) - mean) * rstd;
      const float dy = widened(*call.dy.at(start + c));
      const float g = dy * widened(*call.weight.at(c));
      if constexpr (centred) sums[0] += g;
      sums[1] += g * h;
      weight_sums[c] = (row == begin ? 0.0f : weight_sums[c]) + dy * h;
      if constexpr (centred) bias_sums[c] = (row == begin ? 0.0f : bias_sums[c]) + dy;
    }
    block_sums(sums, shared[parity]);
    for (std::int64_t c = threadIdx.x; c < call.columns; c += blockDim.x) {
      float x[1] = {widened(*call.x.at(start + c))}, dy[1] = {widened(*call.dy.at(start + c))};
      float weight[1] = {widened(*call.weight.at(c))}, gradient[1];
      gradient_of<1>(x, dy, weight, mean, rstd, sums[0] / count, sums[1] / count, gradient);
      if (call.accumulate) gradient[0] = widened(*call.dx.at(start + c)) + gradient[0];
      call.dx.template store<1>(start + c, gradient);
    }
  }
}

/// out += the blocks' sums. Each slice adds every finish_slices-th block in order, then the slices are added
/// in order. `bias_gradient` is null for RMS norm.
__global__ void __launch_bounds__(finish_columns* finish_slices)
    add_block_sums_kernel(const float* sums, const std::int64_t blocks, const std::int64_t columns,
                          float* weight_gradient, float* bias_gradient) {
  __shared__ float slices[finish_slices][finish_columns];
  const std::int64_t i = std::int64_t{blockIdx.x} * finish_columns + threadIdx.x;
  const std::int64_t width = bias_gradient == nullptr ? columns : 2 * columns;
  float total = 0;
  if (i < width) {
#pragma unroll 8
    for (std::int64_t block = threadIdx.y; block < blocks; block += finish_slices) {
      total += sums[block * width + i];
    }
  }
  slices[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y != 0 || i >= width) return;
  for (int slice = 1; slice < finish_slices; ++slice) total += slices[slice][threadIdx.x];
  if (i < columns) {
    weight_gradient[i] += total;
  } else {
    bias_gradient[i - columns] += total;
  }
}

template <bool centred, class T>
void launch_backward(Stream& stream, const char* name, const Backward<T>& call, std::int64_t blocks) {
  constexpr int width = 16 / static_cast<int>(sizeof(T));
  const std::int64_t groups = divide_round_up(call.columns, width);
  const bool fits =
      row_width(call.columns, width,
                {demand_of(call.dy.data, sizeof(T), width), demand_of(call.x.data, sizeof(T), width),
                 demand_of(call.weight.data, sizeof(T), width), demand_of(call.dx.data, sizeof(T), width)}) ==
      width;
  const auto grid = static_cast<unsigned>(blocks);
  constexpr int most_vectors = sizeof(T) == 4 ? 4 : 2;  // more would need too many registers
  if (!fits || groups > most_vectors * most_threads) {
    const auto threads =
        static_cast<unsigned>(std::min<std::int64_t>(any_threads, round_up(call.columns, 32)));
    return launch(stream, name, backward_any_kernel<T, centred>, {.grid = grid, .block = threads}, call);
  }
  const std::int64_t vectors = groups <= most_threads ? 1 : groups <= 2 * most_threads ? 2 : 4;
  const bool narrow = !centred && groups <= warp_size;
  const auto team = static_cast<unsigned>(narrow ? tile_of(groups, warp_size).x
                                                 : round_up(divide_round_up(groups, vectors), warp_size));
  const dim3 threads(team, narrow ? narrow_threads / team : 1);
  const auto kernel = vectors == 1   ? backward_kernel<T, centred, 1, 2>
                      : vectors == 2 ? backward_kernel<T, centred, 2, 1>
                                     : backward_kernel<T, centred, most_vectors, 1>;
  launch(stream, name, kernel, {.grid = grid, .block = threads}, call);
}

template <bool centred>
void backward(Stream& stream, const char* name, const ConstTensorView& dy, const ConstTensorView& x,
              const ConstTensorView& weight, const ConstTensorView& mean, const ConstTensorView& rstd,
              bool accumulate_dx, const TensorView& dx, const TensorView& weight_gradient,
              const TensorView& bias_gradient, const Workspace& workspace) {
  const std::int64_t rows = rstd.elements();
  const std::int64_t columns = weight.elements();
  if (rows == 0) return;
  const std::int64_t sum_bytes = 4 * parameters<centred> * columns;
  const std::int64_t most = std::min(most_blocks, workspace.bytes / sum_bytes);
  const bool narrow = !centred && columns * size_of(x.dtype) <= warp_size * 16;
  const std::int64_t rows_each =
      std::max(narrow ? least_narrow_rows : least_rows, divide_round_up(rows, most));
  const std::int64_t blocks = divide_round_up(rows, rows_each);
  auto* sums = static_cast<float*>(workspace.data);
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    launch_backward<centred>(
        stream, name,
        Backward<T>{elements_of<T>(dy), elements_of<T>(x), elements_of<T>(weight), elements_of<T>(dx),
                    mean.as<float>(), rstd.as<float>(), sums, rows, columns, rows_each, accumulate_dx},
        blocks);
  });
  launch(stream, name, add_block_sums_kernel,
         {.grid = static_cast<unsigned>(divide_round_up(parameters<centred> * columns, finish_columns)),
          .block = dim3(finish_columns, finish_slices)},
         sums, blocks, columns, weight_gradient.as<float>(), bias_gradient.as<float>());
}

}  // namespace

void layer_norm_backward(Stream& stream, const ConstTensorView& dy, const ConstTensorView& x,
                         const ConstTensorView& weight, const ConstTensorView& mean,
                         const ConstTensorView& rstd, bool accumulate_dx, const TensorView& dx,
                         const TensorView& weight_gradient, const TensorView& bias_gradient,
                         const Workspace& workspace) {
  backward<true>(stream, "layer_norm_backward", dy, x, weight, mean, rstd, accumulate_dx, dx, weight_gradient,
                 bias_gradient, workspace);
}

void rms_norm_backward(Stream& stream, const ConstTensorView& d_out, const ConstTensorView& x,
                       const ConstTensorView& weight, const ConstTensorView& rstd, bool accumulate,
                       const TensorView& d_x, const TensorView& weight_gradient, const Workspace& workspace) {
  backward<false>(stream, "rms_norm_backward", d_out, x, weight, {}, rstd, accumulate, d_x, weight_gradient,
                  {}, workspace);
}

}  // namespace tranche::kernels::cuda
