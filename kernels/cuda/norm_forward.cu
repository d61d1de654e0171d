// Layer norm and RMS norm, forward. x is read once and stays in registers for the mean, the variance around
// it and the result; statistics are fp32. RMS norm is the norm around 0 without a bias. A warp computes a row
// (eight rows per block) up to 1024 columns of 16 bits or 512 of fp32, a part of a warp up to 128 or 64
// columns, as heads have, and a block up to 8192 or 4096. Wider rows, and rows that are not aligned to 16
// bytes, are read three times.
//
// Bytes per element: size(x) + size(y), and 8 per row; with the residual sum size(a) + size(b) +
// size(residual) + size(y).

#include <algorithm>

#include "kernels/cuda/conversions.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/geometry.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/norm.h"
#include "kernels/cuda/reduce.h"

namespace tranche::kernels::cuda {

namespace {

constexpr int block_threads = 256;

/// x is a; or, if `residual` is not null, the rounded sum of a and b, which is stored there. `mean` and
/// `bias` are null for RMS norm.
template <class T>
struct Forward {
  Elements<T> a, b, residual, weight, bias, y;
  float* mean;
  float* rstd;
  float epsilon;
  std::int64_t rows, columns;

  template <int n>
  __device__ __forceinline__ void read(std::int64_t i, float (&values)[n]) const {
    const auto first = a.template load<n>(i);
    if (residual.data == nullptr) return Elements<T>::template widen<n>(first, values);
    float other[n];
    const auto second = b.template load<n>(i);
    Elements<T>::template widen<n>(first, values);
    Elements<T>::template widen<n>(second, other);
#pragma unroll
    for (int k = 0; k < n; ++k) values[k] = widened(narrowed<T>(values[k] + other[k]));
    residual.template store<n>(i, values);
  }
  template <int n>
  __device__ __forceinline__ void write(std::int64_t i, std::int64_t column, float row_mean, float row_rstd,
                                        float (&values)[n]) const {
    float scale[n], shift[n] = {};
    Elements<T>::template widen<n>(weight.template load<n>(column), scale);
    if (bias.data != nullptr) Elements<T>::template widen<n>(bias.template load<n>(column), shift);
#pragma unroll
    for (int k = 0; k < n; ++k) values[k] = (values[k] - row_mean) * row_rstd * scale[k] + shift[k];
    y.template store_fast<n>(i, values);
  }
};

template <class T, int vectors>
__global__ void __launch_bounds__(block_threads) forward_kernel(const Forward<T> call) {
  constexpr int width = 16 / static_cast<int>(sizeof(T));
  __shared__ float shared[2][most_warps][1];
  const std::int64_t row = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  // A row that does not exist has no columns; its threads may share a warp with an existing row.
  const std::int64_t columns = row < call.rows ? call.columns : 0;
  const std::int64_t start = row * call.columns;
  const auto count = static_cast<float>(call.columns);
  float x[vectors][width] = {};
#pragma unroll
  for (int v = 0; v < vectors; ++v) {
    const std::int64_t column = (std::int64_t{v} * blockDim.x + threadIdx.x) * width;
    if (column < columns) call.template read<width>(start + column, x[v]);
  }
  float mean = 0;
  if (call.mean != nullptr) {
    float sum[1] = {0};
#pragma unroll
    for (int v = 0; v < vectors; ++v) {
#pragma unroll
      for (int k = 0; k < width; ++k) sum[0] += x[v][k];
    }
    block_sums(sum, shared[0]);
    mean = sum[0] / count;
  }
  float squares[1] = {0};
#pragma unroll
  for (int v = 0; v < vectors; ++v) {
    if ((std::int64_t{v} * blockDim.x + threadIdx.x) * width >= columns) continue;
#pragma unroll
    for (int k = 0; k < width; ++k) squares[0] += (x[v][k] - mean) * (x[v][k] - mean);
  }
  block_sums(squares, shared[1]);
  const float rstd = 1.0f / sqrtf(squares[0] / count + call.epsilon);
#pragma unroll
  for (int v = 0; v < vectors; ++v) {
    const std::int64_t column = (std::int64_t{v} * blockDim.x + threadIdx.x) * width;
    if (column < columns) call.template write<width>(start + column, column, mean, rstd, x[v]);
  }
  if (threadIdx.x == 0 && row < call.rows) {
    if (call.mean != nullptr) call.mean[row] = mean;
    call.rstd[row] = rstd;
  }
}

/// This variant supports any number of columns at any address.
template <class T>
__global__ void __launch_bounds__(block_threads) forward_any_kernel(const Forward<T> call) {
  __shared__ float shared[2][most_warps][1];
  const std::int64_t row = blockIdx.x;
  const std::int64_t start = row * call.columns;
  const auto count = static_cast<float>(call.columns);
  // Each thread reads back what it wrote: from the second pass on x is the stored residual sum.
  Forward<T> again = call;
  if (call.residual.data != nullptr) again.a = call.residual;
  again.residual.data = nullptr;
  float x[1];
  float sum[1] = {0};
  for (std::int64_t c = threadIdx.x; c < call.columns; c += blockDim.x) {
    call.template read<1>(start + c, x);
    sum[0] += x[0];
  }
  block_sums(sum, shared[0]);
  const float mean = call.mean == nullptr ? 0.0f : sum[0] / count;
  float squares[1] = {0};
  for (std::int64_t c = threadIdx.x; c < call.columns; c += blockDim.x) {
    again.template read<1>(start + c, x);
    squares[0] += (x[0] - mean) * (x[0] - mean);
  }
  block_sums(squares, shared[1]);
  const float rstd = 1.0f / sqrtf(squares[0] / count + call.epsilon);
  for (std::int64_t c = threadIdx.x; c < call.columns; c += blockDim.x) {
    again.template read<1>(start + c, x);
    call.template write<1>(start + c, c, mean, rstd, x);
  }
  if (threadIdx.x == 0) {
    if (call.mean != nullptr) call.mean[row] = mean;
    call.rstd[row] = rstd;
  }
}

template <class T>
void launch_forward(Stream& stream, const char* name, const Forward<T>& call) {
  constexpr int width = 16 / static_cast<int>(sizeof(T));
  const auto demand = [](const Elements<T>& operand) {
    return operand.data == nullptr ? Demand{} : demand_of(operand.data, sizeof(T), width);
  };
  const std::int64_t groups = divide_round_up(call.columns, width);
  const bool fits = row_width(call.columns, width,
                              {demand(call.a), demand(call.b), demand(call.residual), demand(call.weight),
                               demand(call.bias), demand(call.y)}) == width;
  if (!fits || groups > 4 * block_threads) {
    const auto threads =
        static_cast<unsigned>(std::min<std::int64_t>(block_threads, round_up(call.columns, 32)));
    return launch(stream, name, forward_any_kernel<T>,
                  {.grid = static_cast<unsigned>(call.rows), .block = threads}, call);
  }
  const bool warps = groups <= 4 * warp_size;
  const std::int64_t most = warps ? warp_size : block_threads;
  const std::int64_t vectors = divide_round_up(groups, most);
  const auto team = static_cast<unsigned>(warps ? tile_of(groups, warp_size).x
                                                : round_up(divide_round_up(groups, vectors), warp_size));
  const unsigned rows_each = warps ? block_threads / team : 1;
  const LaunchShape shape{.grid = static_cast<unsigned>(divide_round_up(call.rows, rows_each)),
                          .block = dim3(team, rows_each)};
  const auto kernel = vectors == 1   ? forward_kernel<T, 1>
                      : vectors == 2 ? forward_kernel<T, 2>
                      : vectors == 3 ? forward_kernel<T, 3>
                                     : forward_kernel<T, 4>;
  launch(stream, name, kernel, shape, call);
}

void forward(Stream& stream, const char* name, const ConstTensorView& a, const ConstTensorView& b,
             const ConstTensorView& residual, const ConstTensorView& weight, const ConstTensorView& bias,
             float epsilon, const TensorView& y, const TensorView& mean, const TensorView& rstd) {
  with_storage(y.dtype, [&](auto storage) {
    using T = decltype(storage);
    launch_forward(
        stream, name,
        Forward<T>{elements_of<T>(a), elements_of<T>(b), elements_of<T>(residual), elements_of<T>(weight),
                   elements_of<T>(bias), elements_of<T>(y), mean.as<float>(), rstd.as<float>(), epsilon,
                   rstd.elements(), weight.elements()});
  });
}

}  // namespace

void layer_norm_forward(Stream& stream, const ConstTensorView& x, const ConstTensorView& weight,
                        const ConstTensorView& bias, float epsilon, const TensorView& y,
                        const TensorView& mean, const TensorView& rstd) {
  forward(stream, "layer_norm_forward", x, {}, {}, weight, bias, epsilon, y, mean, rstd);
}

void residual_layer_norm_forward(Stream& stream, const ConstTensorView& a, const ConstTensorView& b,
                                 const ConstTensorView& weight, const ConstTensorView& bias, float epsilon,
                                 const TensorView& residual, const TensorView& y, const TensorView& mean,
                                 const TensorView& rstd) {
  forward(stream, "residual_layer_norm_forward", a, b, residual, weight, bias, epsilon, y, mean, rstd);
}

void rms_norm_forward(Stream& stream, const ConstTensorView& x, const ConstTensorView& weight, float epsilon,
                      const TensorView& out, const TensorView& rstd) {
  forward(stream, "rms_norm_forward", x, {}, {}, weight, {}, epsilon, out, {}, rstd);
}

void residual_rms_norm_forward(Stream& stream, const ConstTensorView& a, const ConstTensorView& b,
                               const ConstTensorView& weight, float epsilon, const TensorView& sum,
                               const TensorView& out, const TensorView& rstd) {
  forward(stream, "residual_rms_norm_forward", a, b, sum, weight, {}, epsilon, out, {}, rstd);
}

}  // namespace tranche::kernels::cuda
